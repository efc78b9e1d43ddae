"""Tables, one row at a time: CSV (RFC 4180), TSV (a line is a row, quotes have no meaning), JSONL; files of texts.

    columns = choose_columns(Path("train.csv"), TEXTS, "auto", ["label"])
    for row in read_rows(Path("train.csv"), columns): ...       # Row(texts, labels, line, group, split)

The first row of a CSV or TSV file names its columns; in a .txt file every line that is not blank is a text. A row is
blank, as a line is, if no cell holds more than spaces or null. UTF-8, with or without a byte order mark, lines ended by
LF or CRLF. An error names file, line and rule.
"""

import codecs
import csv
import json
import math
import os
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from data.labels import SEPARATOR
from data.tables.parquet import PARQUET, objects_in, schema_of
from utils.errors import Exit, UserError, some

TABLES = (".csv", ".tsv", ".jsonl", PARQUET)  # endings; a file of another has a text on each line
MAX_FIELD = 2**20  # characters; a longer field is most likely a quote that was never closed
MAX_LINE = 2**24  # bytes
_SEPARATORS = {"\t": "tabs", ";": "semicolons", ",": "commas", "|": "vertical bars"}


class Inputs(NamedTuple):
    """What the samples of a table are, and how their columns are found."""

    word: str
    flag: str
    usual: tuple[str, ...]  # names of the column; the first that a table has
    most: int  # columns of a sample
    several: str  # what several columns are, in words
    suffixes: tuple[str, ...]  # of files in the folder of a split; a .txt beside an image may be its caption


TEXTS = Inputs("text", "--text-column", ("text",), 2, "two (A,B) for a sentence pair", (*TABLES, ".txt"))
IMAGES = Inputs(
    "image", "--image-column", ("image", "path", "file", "filename", "file_name"), 8, "several (A,B)", TABLES)
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
            needed = some([inputs.usual[0], *labels, *filter(None, [group])])
            raise UserError(f"{path}: a .txt file has no {'labels' if labels else 'groups'}; give a table (.csv, .tsv,"
                            f" .jsonl) with the columns {needed}", Exit.BAD_DATA)
        return Columns(("text",), ())

    # labels, groups
    require_columns(path, labels, "give --label-column the name of the column with the labels")
    require_columns(path, [group] if group else [], "give --group-column the name of the column with the groups")
    split = SPLIT if SPLIT in names and SPLIT not in (*labels, group) else None
    taken = {*labels, group}

    # the inputs, by name
    if chosen != "auto":
        texts = tuple(name.strip() for name in chosen.split(","))
        require_columns(path, texts, f"give {inputs.flag} a column that it has")
        if len(texts) > inputs.most or len(set(texts)) < len(texts) or taken & set(texts):
            raise UserError(f"{inputs.flag} {chosen}: give one column, or {inputs.several}, {inputs.most} at most; the"
                            " columns of labels and groups cannot be among them")
        return Columns(texts, tuple(labels), group, None if SPLIT in texts else split)

    # the inputs, found
    free = [name for name in names if name not in {*taken, split}]
    free = [*filter(None, free)] or free
    found = [name for name in inputs.usual if name in free] or free
    if found == free and len(free) != 1:
        raise UserError(f"{path}: which column is the {inputs.word}? it has {some(names)}; name it with"
                        f" {inputs.flag}, or {inputs.several}", Exit.BAD_DATA)
    return Columns((found[0],), tuple(labels), group, split)


def require_columns(path: Path, wanted: Sequence[str], way_out: str) -> None:
    """Raise UserError (65) if a table lacks one of the columns; the message names the columns that it has."""
    names = column_names(path)
    if names is not None and (missing := [name for name in wanted if name not in names]):
        way_out = _separator_meant(path) or way_out
        raise UserError(f"{path}: there is no column {some(missing)}; it has {some(names)}; {way_out}", Exit.BAD_DATA)


def read_rows(path: Path, columns: Columns, keep_blank: bool = False, unwanted: str = "") -> Iterator[Row]:
    """The rows of a file in their order, without blank ones; keep_blank makes them empty, but not lines of a table.

    A line of a text file holds a pair as A<tab>B. unwanted: a column that the first row lacks, so no row may have it.
    Raises UserError (65) with file, line and rule.
    """
    # a text file
    if path.suffix not in TABLES:
        yield from (_line_row(path, number, line, len(columns.texts)) for number, line in _lines(path)
                    if keep_blank or line.strip())
        return

    # a table
    wanted = [*columns.texts, *columns.labels, *filter(None, (columns.group, columns.split))]
    for number, values in objects_in(str(path), wanted) if path.suffix == PARQUET else _objects(path):
        if _is_blank(values.values()):
            if not keep_blank:
                continue
            values = dict.fromkeys(wanted) | values
        if missing := [name for name in wanted if name not in values]:
            raise _wrong(path, number, f"has no {some(missing)}; it has {some(values)}")
        if unwanted and unwanted in values:
            raise _wrong(path, number, f"has {unwanted}, and the first row has none; give it to each row, or to none")
        texts = tuple(_text(path, number, name, values[name]) for name in columns.texts)
        labels = tuple(_label(path, number, name, values[name]) for name in columns.labels)
        group, split = ("" if name is None else _label(path, number, name, values[name])
                        for name in (columns.group, columns.split))
        yield Row(texts, labels, number, group, split)


def column_names(path: Path) -> list[str] | None:
    """Those of a table, by its first row; None for a text file. Raises UserError (65)."""
    if path.suffix not in TABLES:
        return None
    names = (schema_of(str(path)).names if path.suffix == PARQUET else
             next((list(values) for _, values in _objects(path) if values), []) if path.suffix == ".jsonl" else
             list(dict.fromkeys(_names(path, _fields(path)))))
    if not names:
        raise UserError(f"{path}: is empty; it must hold a table", Exit.BAD_DATA)
    return names


def _objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line, {column: value}) of every row."""
    if path.suffix == ".jsonl":
        for number, line in _lines(path):
            if line.strip():
                yield number, _parsed(path, number, line)
        return
    rows = _fields(path)
    names = _names(path, rows)
    for number, fields in rows:
        if len(fields) != len(names) and not _is_blank(fields):
            quotes = "put a field with a comma, a quote or a line break in quotes"
            rule = _separator_meant(path) or (quotes if path.suffix == ".csv" else "a tab ends a field")
            raise _wrong(path, number, f"has {len(fields)} fields, the header {len(names)} ({some(names)}); {rule}")
        yield number, dict.fromkeys(names, "") | dict(zip(names, fields, strict=False))


def _fields(path: Path) -> Iterator[tuple[int, list[str]]]:
    """(line, fields) of every row of a CSV or TSV file, with the header."""
    if path.suffix == ".tsv":
        yield from ((number, line.rstrip("\r\n").split("\t")) for number, line in _lines(path) if line.strip("\r\n"))
        return
    csv.field_size_limit(MAX_FIELD)
    reader, number = csv.reader((line for _, line in _lines(path)), strict=True), 1
    try:
        for fields in reader:
            if fields:
                yield number, fields
            number = reader.line_num + 1
    except csv.Error as error:
        rule = "there is a carriage return outside quotes" if "new-line" in str(error) else str(error)
        way_out = _separator_meant(path) or "CSV: double a quote inside a quoted field, and close every quote"
        raise _wrong(path, number, f"{rule} ({way_out})") from None


def _names(path: Path, rows: Iterator[tuple[int, list[str]]]) -> list[str]:
    """Those in the first row that is not blank; "" for any number of columns without a name."""
    number, header = next((row for row in rows if not _is_blank(row[1])), (1, []))
    names = [name.strip() for name in header]
    named = [*filter(None, names)]
    if len(set(named)) < len(named):
        raise _wrong(path, number, f"two columns have the same name; the columns are {some(named)}")
    return names


def _is_blank(cells: Iterable[Any]) -> bool:
    return all(cell is None or (isinstance(cell, str) and not cell.strip()) for cell in cells)


def _separator_meant(path: Path) -> str:
    """What to do if the first line has no separator of the kind that the file's ending promises, but another; or ""."""
    own = {".csv": ",", ".tsv": "\t"}.get(path.suffix)
    line = next((line.strip() for _, line in _lines(path) if line.strip()), "") if own else ""
    mark = next((mark for mark in _SEPARATORS if mark in line), None)
    if not own or own in line or not mark:
        return ""
    file = path.with_suffix(".tsv" if mark == "\t" else ".csv").name
    way_out = f"rename it to {file}" if mark in "\t," else f"save it with commas, as {file}"
    return f"its columns seem to be separated by {_SEPARATORS[mark]}: {way_out}"


def _parsed(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        pairs = json.loads(line, object_pairs_hook=tuple)
    except (ValueError, RecursionError) as error:
        raise _wrong(path, number, f"is not JSON: {error}") from None
    if not isinstance(pairs, tuple):
        raise _wrong(path, number, 'must be an object, {"column": value, ...}')
    if len(value := dict(pairs)) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise _wrong(path, number, f"the key {twice} stands there twice")
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
    value = "" if value is None else value
    if not isinstance(value, str):
        raise _wrong(path, number, f"{column} must be a text, not {json.dumps(value)[:40]}")
    if len(value) > MAX_FIELD:
        raise _wrong(path, number, f"{column} is longer than {MAX_FIELD} characters")
    if re.search("[\0\ud800-\udfff]", value):  # JSON can spell them
        raise _wrong(path, number, f"{column} holds a NUL or half a surrogate pair, so it is not text; correct it")
    return value


def _label(path: Path, number: int, column: str, value: Any) -> str:
    if isinstance(value, list) and all(isinstance(each, str) and SEPARATOR not in each for each in value):
        value = SEPARATOR.join(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise _wrong(path, number, f"{column} is {value}, which JSON does not have; write null, or a number")
    if isinstance(value, list | tuple):
        raise _wrong(path, number, f"{column} must be a word, a number, or a list of words without {SEPARATOR}, not"
                     f" {json.dumps(dict(value) if isinstance(value, tuple) else value)[:40]}")
    return _text(path, number, column, value).strip() if isinstance(value, str | None) else json.dumps(value)


def _wrong(path: Path, number: int, rule: str) -> UserError:
    return UserError(f"{path} line {number}: {rule}", Exit.BAD_DATA)
