"""Tables of texts, a row at a time: CSV (RFC 4180), TSV (a line is a row, a quote an ordinary character), JSONL; and text files.

    files, notes = find_tables("reviews")                       # {"train": [train.csv], "val": [val.csv]}
    columns = choose_columns(files["train"][0], "auto", "label")
    for row in read_rows(files["train"][0], columns): ...       # Row(texts, label, line)

The first row of a CSV or TSV file names its columns; in a .txt file every line that is not blank is a text. UTF-8, with or
without a byte order mark, lines ended by LF or CRLF. What breaks a rule is named with its file and line.
"""

import csv
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from data.splits import SPLIT_NAMES, VAL_NAMES
from utils.errors import Exit, UserError, some

SUFFIXES = (".csv", ".tsv", ".jsonl", ".txt")
MAX_FIELD = 2**20  # characters; more is most likely a quote that was never closed
MAX_LINE = 2**24  # bytes


class Columns(NamedTuple):
    """Which columns are read."""

    texts: tuple[str, ...]  # one, or two: a sentence pair
    label: str | None


class Row(NamedTuple):
    """One sample as it stands in its file."""

    texts: tuple[str, ...]
    label: str | None
    line: int  # its first, counted from 1


def find_tables(root: str) -> tuple[dict[str, list[Path]], list[str]]:
    """The files of each split (train and, where there are such, val and test), and notes for the user.

    root: a file; or a folder with train.csv, val.csv, ... (any of SUFFIXES) or train/, val/, ... that hold such files; or one
    that holds such files directly, which then are all for training. Raises UserError (65, 66).
    """
    top = Path(root)
    if not top.exists():
        raise UserError(f"--data {root}: there is no such file or folder", Exit.NO_INPUT)
    if not top.is_dir():
        return {"train": [table_at(root)]}, []
    files, notes = {}, []
    if files_of_train := _files_of(top, "train"):
        files["train"] = files_of_train
        if val := next((name for name in VAL_NAMES if _files_of(top, name)), None):
            files["val"] = _files_of(top, val)
            notes += [f"validation uses {val}, for there is no val"] if val != "val" else []
        if val != "test" and (test := _files_of(top, "test")):
            files["test"] = test
        return files, notes
    names = sorted(path.name for path in top.iterdir() if not path.name.startswith("."))
    tables = [top / name for name in names if _is_table(top / name)]
    if similar := [name for name in names if Path(name).stem.lower() in SPLIT_NAMES and (top / name in tables or (top / name).is_dir())]:
        raise UserError(f"--data {root}: has {some(similar)} but no texts for training; name the training file train.csv (or .tsv, .jsonl,"
                        " .txt), or put such files into train/", Exit.BAD_DATA)
    if not tables:
        raise UserError(f"--data {root}: holds no files of texts ({' '.join(SUFFIXES)}), but {some(names)}", Exit.BAD_DATA)
    return {"train": tables}, [f"there is no train, so all {len(tables)} files of texts in --data are read"]


def table_at(name: str) -> Path:
    """The file of texts with this name. Raises UserError: 66 if there is none, 65 if it is none of SUFFIXES."""
    path = Path(name)
    if not path.is_file():
        raise UserError(f"{name}: there is no such file", Exit.NO_INPUT)
    if not _is_table(path):
        raise UserError(f"{name}: a file of texts ends in {', '.join(SUFFIXES)}", Exit.BAD_DATA)
    return path


def _files_of(top: Path, split: str) -> list[Path]:
    inside = sorted(path for path in (top / split).rglob("*") if _is_table(path)
                    and not any(part.startswith(".") for part in path.relative_to(top).parts))
    found = [top / f"{split}{suffix}" for suffix in SUFFIXES if _is_table(top / f"{split}{suffix}")] + ([top / split] if inside else [])
    if len(found) > 1:
        raise UserError(f"--data {top}: {' and '.join(path.name for path in found)} are both {split}; keep one", Exit.BAD_DATA)
    return inside or found


def _is_table(path: Path) -> bool:
    return path.suffix in SUFFIXES and path.is_file()


def choose_columns(path: Path, text_column: str, label_column: str | None) -> Columns:
    """The columns that are read of `path`. text_column: --text-column. label_column: None = there are no labels.

    Raises UserError (65) where they are not in the file; the message names those that are.
    """
    names = _header(path)
    if names is None:
        if label_column is not None:
            raise UserError(f"{path}: a .txt file has no labels; give a table (.csv, .tsv, .jsonl) with the columns text and label",
                            Exit.BAD_DATA)
        return Columns(("text",), None)
    has = f"it has {some(names)}"
    if label_column is not None and label_column not in names:
        raise UserError(f"{path}: there is no column {label_column}; {has}; name the one with the classes by --label-column", Exit.BAD_DATA)
    if text_column != "auto":
        texts = tuple(name.strip() for name in text_column.split(","))
        if missing := [name for name in texts if name not in names]:
            raise UserError(f"{path}: there is no column {some(missing)}; {has}; see --text-column", Exit.BAD_DATA)
        if len(texts) > 2 or len(set(texts)) < len(texts) or label_column in texts:
            raise UserError(f"--text-column {text_column}: give one column, or two for a sentence pair, and not that of the label")
        return Columns(texts, label_column)
    others = [name for name in names if name != label_column]
    if "text" not in others and len(others) != 1:
        raise UserError(f"{path}: which column is the text? {has}; name it by --text-column, or two (A,B) for a sentence pair",
                        Exit.BAD_DATA)
    return Columns(("text",) if "text" in others else (others[0],), label_column)


def require_columns(path: Path, columns: Columns) -> None:
    """Raise UserError (65) if a table lacks one of the columns; the message names those that it has."""
    names = _header(path) if path.suffix in (".csv", ".tsv", ".jsonl") else None
    if names is not None and (missing := [name for name in columns.texts if name not in names]):
        raise UserError(f"{path}: there is no column {some(missing)}; it has {some(names)}", Exit.BAD_DATA)


def read_rows(path: Path, columns: Columns, keeps_blank: bool = False) -> Iterator[Row]:
    """The rows of a file in their order, blank lines left out; those of a text file become empty texts if keeps_blank.

    A line of a text file holds a pair as A<tab>B. Raises UserError (65) with file, line and rule.
    """
    if path.suffix not in (".csv", ".tsv", ".jsonl"):
        yield from (_line_row(path, number, line, len(columns.texts)) for number, line in _lines(path)
                   if keeps_blank or line.strip())
        return
    wanted = [*columns.texts, *filter(None, [columns.label])]
    for number, values in _objects(path):
        if missing := [name for name in wanted if name not in values]:
            raise _wrong(path, number, f"has no {some(missing)}; it has {some(values)}")
        texts = tuple(_text(path, number, name, values[name]) for name in columns.texts)
        yield Row(texts, None if columns.label is None else _label(path, number, columns.label, values[columns.label]), number)


def _header(path: Path) -> list[str] | None:
    """Names of the columns; None for a text file."""
    if path.suffix == ".txt":
        return None
    first = next(_objects(path) if path.suffix == ".jsonl" else _fields(path), None)
    if first is None:
        raise UserError(f"{path}: is empty; it must hold a table", Exit.BAD_DATA)
    return _names(path, first) if isinstance(first[1], list) else list(first[1])


def _objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line, {column: value}) of every row."""
    if path.suffix == ".jsonl":
        for number, line in _lines(path):
            if line.strip():
                yield number, _parsed(path, number, line)
        return
    rows = _fields(path)
    names = _names(path, next(rows, (1, [])))
    for number, fields in rows:
        if len(fields) != len(names):
            raise _wrong(path, number, f"{len(fields)} fields, and the header names {len(names)} ({some(names)});" + (
                " a field with a comma, a quote or a line break stands in quotes" if path.suffix == ".csv" else " a tab ends a field"))
        yield number, dict(zip(names, fields, strict=True))


def _fields(path: Path) -> Iterator[tuple[int, list[str]]]:
    """(line, fields) of every row of a CSV or TSV file, the header's included."""
    if path.suffix == ".tsv":
        yield from ((number, line.rstrip("\r\n").split("\t")) for number, line in _lines(path) if line.strip("\r\n"))
        return
    csv.field_size_limit(MAX_FIELD)
    reader = csv.reader((line for _, line in _lines(path)), strict=True)
    while True:
        number = reader.line_num + 1
        try:
            fields = next(reader, None)
        except csv.Error as error:
            rule = "a carriage return stands outside quotes" if "new-line" in str(error) else str(error)
            raise _wrong(path, number, f"{rule} (CSV: a quote in a quoted field is doubled, and every quote is closed)") from None
        if fields is None:
            return
        if fields:
            yield number, fields


def _names(path: Path, header: tuple[int, list[str]]) -> list[str]:
    names = [name.strip() for name in header[1]]
    if len(set(names)) < len(names):
        raise _wrong(path, header[0], f"two columns have the same name, of {some(names)}")
    return names


def _parsed(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _wrong(path, number, f"is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise _wrong(path, number, 'must be an object, {"column": value, ...}')
    return value


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """(number, line with its end), decoded."""
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(iter(lambda: file.readline(MAX_LINE + 1), b""), 1):
                if len(raw) > MAX_LINE:
                    raise _wrong(path, number, f"is longer than {MAX_LINE >> 20} MiB")
                try:
                    line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    byte = error.object[error.start]
                    raise _wrong(path, number, f"byte 0x{byte:02x} is not UTF-8; convert the file (iconv -t UTF-8)") from None
                if "\0" in line:
                    raise _wrong(path, number, "holds a NUL character, so it is no text; remove it")
                yield number, line
    except OSError as error:
        raise UserError(f"cannot read {path}: {os.strerror(error.errno or 0)}", Exit.IO) from None


def _line_row(path: Path, number: int, line: str, num_texts: int) -> Row:
    texts = tuple(text.strip() for text in line.split("\t")) if num_texts == 2 and line.strip() else (line.strip(),) * num_texts
    if len(texts) != num_texts:
        raise _wrong(path, number, f"{len(texts)} texts; a sentence pair is two, with a tab in between")
    return Row(texts, None, number)


def _text(path: Path, number: int, column: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _wrong(path, number, f"{column} must be a text, and is {json.dumps(value)[:40]}")
    if len(value) > MAX_FIELD:
        raise _wrong(path, number, f"{column} is longer than {MAX_FIELD} characters")
    if re.search("[\0\ud800-\udfff]", value):  # as JSON can spell them
        raise _wrong(path, number, f"{column} holds a NUL or half a surrogate pair, so it is no text; correct it")
    return value


def _label(path: Path, number: int, column: str, value: Any) -> str:
    if isinstance(value, list | dict | None):
        raise _wrong(path, number, f"{column} must be a word or a number, and is {json.dumps(value)[:40]}")
    return _text(path, number, column, value).strip() if isinstance(value, str) else json.dumps(value)


def _wrong(path: Path, number: int, rule: str) -> UserError:
    return UserError(f"{path} line {number}: {rule}", Exit.BAD_DATA)
