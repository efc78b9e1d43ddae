"""Tables, one row at a time: CSV (RFC 4180), TSV (a line is a row, quotes have no meaning), JSONL; files of texts.

    columns = choose_columns(Path("train.csv"), TEXTS, "auto", ["label"])
    for row in read_rows(Path("train.csv"), columns): ...       # Row(texts, labels, line, group, split)

The first row of a CSV or TSV file names its columns; in a .txt file every line that is not blank is a text. UTF-8, with
or without a byte order mark, lines ended by LF or CRLF. An error names file, line and rule.
"""

import codecs
import csv
import json
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from utils.errors import Exit, UserError, some

MAX_FIELD = 2**20  # characters; a longer field is most likely a quote that was never closed
MAX_LINE = 2**24  # bytes


class Inputs(NamedTuple):
    """What the samples of a table are, and how their columns are found."""

    word: str
    flag: str
    usual: tuple[str, ...]  # names of the column; the first that a table has
    most: int  # columns of a sample
    several: str  # what several columns are, in words


TEXTS = Inputs("text", "--text-column", ("text",), 2, "two (A,B) for a sentence pair")
IMAGES = Inputs("image", "--image-column", ("image", "path", "file", "filename", "file_name"), 8,
                "several (A,B) if a sample has several images")
SPLIT = "split"  # the column that says of which split a row is


class Columns(NamedTuple):
    """Which columns are read."""

    texts: tuple[str, ...]  # the inputs: texts (two are a sentence pair), or paths of images
    labels: tuple[str, ...]  # empty = there are no labels
    group: str | None = None
    split: str | None = None


class Row(NamedTuple):
    """One row, as it is in its file."""

    texts: tuple[str, ...]
    labels: tuple[str, ...]
    line: int  # its first line, counted from 1
    group: str = ""
    split: str = ""


def choose_columns(
    path: Path, inputs: Inputs, chosen: str, labels: Sequence[str], group: str | None = None
) -> Columns:
    """The columns of `path` that are read. chosen: the value of inputs.flag. labels: empty = there are no labels.

    Raises UserError (65) if the file lacks one; the message names the columns that it has.
    """
    # a text file
    names = column_names(path)
    if names is None:
        if labels or group:
            raise UserError(f"{path}: a .txt file has no {'labels' if labels else 'groups'}; give a table (.csv, .tsv,"
                            f" .jsonl) with the columns {some([inputs.usual[0], *labels, *filter(None, [group])])}",
                            Exit.BAD_DATA)
        return Columns(("text",), ())

    # labels, groups
    has = f"it has {some(names)}"
    others = {"--label-column": labels, "--group-column": [group] if group else []}
    for flag, wanted in others.items():
        if missing := [name for name in wanted if name not in names]:
            what = "labels" if flag == "--label-column" else "groups"
            raise UserError(f"{path}: there is no column {some(missing)}; {has}; give {flag} the name of the column"
                            f" with the {what}", Exit.BAD_DATA)
    split = SPLIT if SPLIT in names and SPLIT not in (*labels, group) else None
    taken = {*labels, group}

    # the inputs, by name
    if chosen != "auto":
        texts = tuple(name.strip() for name in chosen.split(","))
        if missing := [name for name in texts if name not in names]:
            raise UserError(f"{path}: there is no column {some(missing)}; {has}; give {inputs.flag} a column that it"
                            " has", Exit.BAD_DATA)
        if len(texts) > inputs.most or len(set(texts)) < len(texts) or taken & set(texts):
            raise UserError(f"{inputs.flag} {chosen}: give one column, or {inputs.several}, {inputs.most} at most; the"
                            " columns of labels and groups cannot be among them")
        return Columns(texts, tuple(labels), group, None if SPLIT in texts else split)

    # the inputs, found
    free = [name for name in names if name not in {*taken, split}]
    found = [name for name in inputs.usual if name in free] or free
    if found == free and len(free) != 1:
        raise UserError(f"{path}: which column is the {inputs.word}? {has}; name it with {inputs.flag}, or"
                        f" {inputs.several}", Exit.BAD_DATA)
    return Columns((found[0],), tuple(labels), group, split)


def require_columns(path: Path, columns: Columns) -> None:
    """Raise UserError (65) if a table lacks one of the columns; the message names the columns that it has."""
    names = column_names(path)
    if names is not None and (missing := [name for name in columns.texts if name not in names]):
        raise UserError(f"{path}: there is no column {some(missing)}; it has {some(names)}", Exit.BAD_DATA)


def read_rows(path: Path, columns: Columns, keep_blank: bool = False, unwanted: str = "") -> Iterator[Row]:
    """The rows of a file in their order, without blank lines; in a text file keep_blank makes them empty texts.

    A line of a text file holds a pair as A<tab>B. unwanted: a column that the first row lacks, so no row may have it.
    Raises UserError (65) with file, line and rule.
    """
    # a text file
    if path.suffix not in (".csv", ".tsv", ".jsonl"):
        yield from (_line_row(path, number, line, len(columns.texts)) for number, line in _lines(path)
                    if keep_blank or line.strip())
        return

    # a table
    wanted = [*columns.texts, *columns.labels, *filter(None, (columns.group, columns.split))]
    for number, values in _objects(path):
        if missing := [name for name in wanted if name not in values]:
            raise _wrong(path, number, f"has no {some(missing)}; it has {some(values)}")
        if unwanted in values:
            raise _wrong(path, number, f"has {unwanted}, and the first row has none; give it to each row, or to none")
        texts = tuple(_text(path, number, name, values[name]) for name in columns.texts)
        labels = tuple(_label(path, number, name, values[name]) for name in columns.labels)
        group, split = ("" if name is None else _label(path, number, name, values[name])
                        for name in (columns.group, columns.split))
        yield Row(texts, labels, number, group, split)


def column_names(path: Path) -> list[str] | None:
    """Those of a table, by its first row; None for a text file. Raises UserError (65)."""
    if path.suffix not in (".csv", ".tsv", ".jsonl"):
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
            rule = ("put a field with a comma, a quote or a line break in quotes" if path.suffix == ".csv" else
                    "a tab ends a field")
            raise _wrong(path, number,
                         f"has {len(fields)} fields, but the header has {len(names)} ({some(names)}); {rule}")
        yield number, dict(zip(names, fields, strict=True))


def _fields(path: Path) -> Iterator[tuple[int, list[str]]]:
    """(line, fields) of every row of a CSV or TSV file, with the header."""
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
            rule = "there is a carriage return outside quotes" if "new-line" in str(error) else str(error)
            raise _wrong(path, number, f"{rule} (CSV: double a quote inside a quoted field, and close every"
                         " quote)") from None
        if fields is None:
            return
        if fields:
            yield number, fields


def _names(path: Path, header: tuple[int, list[str]]) -> list[str]:
    names = [name.strip() for name in header[1]]
    if len(set(names)) < len(names):
        raise _wrong(path, header[0], f"two columns have the same name; the columns are {some(names)}")
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
                    raise _wrong(path, number, f"byte 0x{byte:02x} is not UTF-8; {_conversion(path, raw)}") from None
                if "\0" in line:
                    rule = (f"is not UTF-8; {_conversion(path, raw)}" if 3 * raw.count(0) > len(raw) > 4 else
                            "holds a NUL character, so it is not text; remove it")
                    raise _wrong(path, number, rule)
                yield number, line
    except OSError as error:
        raise UserError(f"cannot read {path}: {os.strerror(error.errno or 0)}", Exit.IO) from None


def _conversion(path: Path, raw: bytes) -> str:
    """What to do with a file whose line `raw` is not UTF-8, with the encoding that it is most likely in."""
    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        found = "UTF-16"
    elif b"\0" in raw:
        found = "UTF-16BE" if raw.startswith(b"\0") else "UTF-16LE"
    else:
        found = "ISO-8859-1" if set(raw) & {0x81, 0x8D, 0x8F, 0x90, 0x9D} else "WINDOWS-1252"
    files = ["-o", f"{path.with_suffix('')}.utf-8{path.suffix}", str(path)] if path.suffix else []
    command = shlex.join(["iconv", "-f", found, "-t", "UTF-8", *files])
    return f"it looks like {found}: convert it, and use the new file ({command})"


def _line_row(path: Path, number: int, line: str, num_texts: int) -> Row:
    texts = (line.strip(),) * num_texts
    if num_texts == 2 and line.strip():
        texts = tuple(text.strip() for text in line.split("\t"))
    if len(texts) != num_texts:
        raise _wrong(path, number, f"{len(texts)} texts; a sentence pair is two texts with a tab between them")
    return Row(texts, (), number)


def _text(path: Path, number: int, column: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _wrong(path, number, f"{column} must be a text, not {json.dumps(value)[:40]}")
    if len(value) > MAX_FIELD:
        raise _wrong(path, number, f"{column} is longer than {MAX_FIELD} characters")
    if re.search("[\0\ud800-\udfff]", value):  # JSON can spell them
        raise _wrong(path, number, f"{column} holds a NUL or half a surrogate pair, so it is not text; correct it")
    return value


def _label(path: Path, number: int, column: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        value = "|".join(value)  # several labels
    if isinstance(value, list | dict):
        raise _wrong(path, number, f"{column} must be a word or a number, not {json.dumps(value)[:40]}")
    return _text(path, number, column, value).strip() if isinstance(value, str) else json.dumps(value)


def _wrong(path: Path, number: int, rule: str) -> UserError:
    return UserError(f"{path} line {number}: {rule}", Exit.BAD_DATA)
