"""Files that a user names with --output: whole or absent, CSV that any reader understands.

Tests: tests/end_to_end/test_predict.py
"""

import csv
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from utils.errors import Exit, UserError

TEXT = {"encoding": "utf-8", "errors": "surrogateescape"}  # file names may be in any encoding


@contextmanager
def open_output(name: str | None, flag: str = "--output") -> Iterator[TextIO]:
    """Standard output, or a file that gets its name when it is complete. Raises UserError (73), which names `flag`."""
    # standard output
    if name is None:
        sys.stdout.reconfigure(**TEXT)
        yield sys.stdout
        sys.stdout.flush()
        return

    # a file
    path, partial, file = _begin(name, flag)
    try:
        with file:
            yield file
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def require_output(name: str, flag: str = "--output") -> None:
    """Raise UserError (73) if open_output would, before there is anything to write."""
    _, partial, file = _begin(name, flag)
    file.close()
    partial.unlink()


def csv_writer(file: TextIO) -> Callable[[Sequence[Any]], None]:
    """A function that writes a row; fields are quoted where they must be."""
    plain = csv.writer(file, lineterminator="\n")
    quoted = csv.writer(file, lineterminator="\n", quoting=csv.QUOTE_ALL)

    def write(row: Sequence[Any]) -> None:
        needs_quotes = any(isinstance(field, str) and "\r" in field for field in row)  # Python 3.11 would not quote it
        (quoted if needs_quotes else plain).writerow(row)

    return write


def without_places(nest: Any) -> Any:
    """The nest of dicts and lists with the last part of each absolute path alone: for what is shown to others."""
    if isinstance(nest, dict):
        return {name: without_places(value) for name, value in nest.items()}
    if isinstance(nest, list | tuple):
        return [without_places(value) for value in nest]
    return os.path.basename(nest.rstrip("/")) if isinstance(nest, str) and nest.startswith("/") else nest


def _begin(name: str, flag: str) -> tuple[Path, Path, TextIO]:
    """The path, that of the file until it is complete, and this file."""
    path = Path(name).resolve()  # a link stays a link
    partial = path.with_name(f".tmp-{path.name}-{os.getpid()}")
    try:
        if path.exists() and not path.is_file():
            raise FileExistsError(0, "it exists and is not a file")
        return path, partial, partial.open("w", newline="", **TEXT)
    except OSError as error:
        raise UserError(f"{flag} {name}: cannot write it ({error.strerror}); name another file",
                        Exit.CANNOT_CREATE) from None
