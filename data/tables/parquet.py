"""Parquet files as tables: their columns, and their rows in order, of which some are in memory at a time.

pyarrow is imported where a file is read: nothing else needs it.

Tests: tests/end_to_end/test_parquet.py
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from utils.errors import Exit, UserError, some

PARQUET = ".parquet"
ROWS = 100  # in memory at a time
WORD_TYPES = ("string", "large_string", "string_view", "bool")  # of columns, as they print themselves


def schema_of(path: str) -> Any:
    """The columns of a Parquet file, as pyarrow.Schema. Raises UserError: 64 without pyarrow, 65 for other files."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"{path}: Parquet files are read by pyarrow, which is not installed: pip install pyarrow"
                        ) from None
    try:
        return pyarrow.parquet.read_schema(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{path} cannot be read as Parquet: {error}", Exit.BAD_DATA) from None


def class_names(schema: Any) -> dict[str, tuple[str, ...]]:
    """{column: the names of its classes}, as the hub's features have them in the schema's metadata."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return {name: tuple(each["names"]) for name, each in features.items()
                if isinstance(each, dict) and each.get("_type") == "ClassLabel"}
    except (KeyError, ValueError, TypeError):
        return {}


def objects_in(path: str, wanted: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number of the row from 1 on, {column: value}) of these columns; a class by its name. Raises UserError (65)."""
    schema = schema_of(path)
    from pyarrow import types

    names = class_names(schema)
    for name in wanted:
        if name not in schema.names:
            raise UserError(f"{path}: there is no column {name}; it has {some(schema.names)}", Exit.BAD_DATA)
        kind = getattr(schema.field(name).type, "value_type", schema.field(name).type)  # of lists and dictionaries
        if not (types.is_integer(kind) or types.is_floating(kind) or str(kind) in (*WORD_TYPES, "null")):
            raise UserError(f"{path}: the column {name} is {kind}; texts and labels are strings, numbers or lists of"
                            " strings", Exit.BAD_DATA)
    for number, values in enumerate(rows_of(path, wanted), 1):
        yield number, {name: names[name][value] if value in range(len(names.get(name, ()))) else value
                       for name, value in zip(wanted, values, strict=True)}


def rows_of(path: str, columns: Sequence[str], at_once: int = ROWS) -> Iterator[tuple[Any, ...]]:
    """The values of these columns, row by row; at most `at_once` rows are in memory. Raises UserError (65)."""
    import pyarrow.parquet

    pyarrow.set_cpu_count(1)
    try:
        with pyarrow.parquet.ParquetFile(path, buffer_size=2**20) as file:
            for batch in file.iter_batches(at_once, columns=[*columns], use_threads=False):
                values = batch.to_pydict()
                yield from zip(*(values[name] for name in columns), strict=True)
    except (OSError, pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise UserError(f"{path} is damaged: {error}", Exit.BAD_DATA) from None
