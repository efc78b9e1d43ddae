"""Images in Parquet files, imported once: byte for byte into tar files in the cache, from which they are read.

A random sample of a Parquet file costs the decompression of its whole row group; a member of a tar file is one read.
The columns are those of the hub: an image is a struct of bytes and path; a label is a whole number, whose names the
schema's metadata has (ClassLabel), or a word.

Tests: tests/end_to_end/test_parquet.py
"""

import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from data.shards.files import files_by_split
from data.shards.shard import ENDING
from data.shards.writing import write_classes, write_shard
from data.splits import plain
from data.tables.parquet import PARQUET, WORD_TYPES, class_names, rows_of, schema_of
from utils.array_folder import digest_of
from utils.errors import Exit, UserError, counted, some
from utils.files import one_at_a_time
from utils.hardware.cores import available_cores

VERSION = 1
IMAGES_AT_ONCE = 8  # in memory, by each thread
USUAL = ("image", "img")  # names of the column with images, if there are several
KINDS = {b"\x89PNG": "png", b"GIF8": "gif", b"RIFF": "webp", b"BM": "bmp", b"II*\0": "tif", b"MM\0*": "tif"}


class Columns(NamedTuple):
    """What is read of a row."""

    image: str
    label: str
    names: tuple[str, ...]  # of the classes, if the schema has them


def is_parquet(root: str) -> bool:
    """Whether --data names Parquet files: one, a pattern, or a folder that holds them."""
    return bool(files_by_split(root, PARQUET)) or (root.endswith(PARQUET) and not os.path.isdir(root))


def imported(root: str, image: str, label: str, cache: Path, note: Callable[[str], None]) -> str:
    """The folder in the cache with SPLIT/*.tar of these Parquet files, made if it is not there.

    image, label: --image-column and --label-column. A killed import goes on with the file that it was at. Raises
    UserError: 64 without pyarrow, 65 for other columns, 66 without a file, 74 if it cannot be written.
    """
    by_split = files_by_split(os.path.abspath(root), PARQUET)
    every = [(path, split, number) for split, paths in by_split.items() for number, path in enumerate(paths)]
    if not every:
        raise UserError(f"--data {root}: there is no such file", Exit.NO_INPUT)
    columns = choose_columns(root, [path for path, *_ in every], image, label)
    try:
        states = [(path, split, os.stat(path).st_size, os.stat(path).st_mtime_ns) for path, split, _ in every]
        folder = cache / f"parquet-{digest_of(VERSION, states, columns)}"
        with one_at_a_time(folder):
            missing = [each for each in every if not _target(folder, *each[1:]).exists()]
            if missing:
                folder.mkdir(parents=True, exist_ok=True)
                needed, free = sum(os.path.getsize(path) for path, *_ in missing), shutil.disk_usage(folder).free
                note(f"importing {counted(len(missing), 'Parquet file')}, once, into {folder}: about"
                     f" {needed / 1e9:.3g} GB; {free / 1e9:.3g} GB are free")
                if columns.names:
                    write_classes(folder, [*map(plain, columns.names)])
                with ThreadPoolExecutor(available_cores()) as pool:  # pyarrow has threads, which no fork survives
                    for _ in pool.map(partial(_import, folder, columns), missing):
                        pass
    except OSError as error:
        raise UserError(f"--data {root}: {error.filename or cache}: {error.strerror or error}; set LOCKSTEP_CACHE to a"
                        " folder with room", Exit.IO) from None
    return str(folder)


def choose_columns(root: str, paths: list[str], image: str, label: str) -> Columns:
    """The columns that are read, by the first file; all must have them. Raises UserError (64, 65)."""
    schemas = [schema_of(path) for path in paths]
    from pyarrow import types

    # the image
    schema, named = schemas[0], class_names(schemas[0])
    images = [each.name for each in schema if types.is_struct(each.type) and each.type.get_field_index("bytes") >= 0
              and str(each.type.field("bytes").type) in ("binary", "large_binary", "binary_view", "null")]
    chosen = image if image != "auto" else next((name for name in (*USUAL, *images[:1]) if name in images), "")
    if chosen not in images:
        texts = "; texts have tasks of their own (--task)" * (not images)
        raise UserError(f"--data {root}: its columns are {some(schema.names)}; an image is a struct with bytes, and"
                        f" {some(images)} is one{texts}", Exit.BAD_DATA)

    # the label
    label = next(iter(named)) if label not in schema.names and label == "label" and len(named) == 1 else label
    kind = schema.field(label).type if label in schema.names else None
    kind = kind.value_type if kind is not None and types.is_dictionary(kind) else kind
    if kind is None or not (types.is_integer(kind) or str(kind) in WORD_TYPES):
        found = f"is {kind}, and a class is a whole number or a word" if kind else "is not there"
        raise UserError(f"--data {root}: the column {label} {found}; give --label-column one of"
                        f" {some([*named] or [name for name in schema.names if name not in images])}", Exit.BAD_DATA)
    for path, other in zip(paths, schemas, strict=True):
        if any(name not in other.names or other.field(name).type != schema.field(name).type for name in (chosen, label)
               ) or class_names(other).get(label) != named.get(label):
            raise UserError(f"--data {root}: {path} has other columns {chosen} and {label}, or other classes, than"
                            f" {paths[0]}", Exit.BAD_DATA)
    return Columns(chosen, label, named.get(label, ()))


def _target(folder: Path, split: str, number: int) -> Path:
    return folder / split / f"{number:05}{ENDING}"


def _import(folder: Path, columns: Columns, wanted: tuple[str, str, int]) -> None:
    """Write the tar file of a Parquet file. Raises UserError (65), OSError."""
    path, split, number = wanted
    target = _target(folder, split, number)
    target.parent.mkdir(exist_ok=True)
    write_shard(target, ((f"{number:05}-{row:09}.{ending}", content, label)
                         for row, (ending, content, label) in enumerate(_rows(path, columns, split == "test"))))


def _rows(path: str, columns: Columns, is_test: bool) -> Iterator[tuple[str, bytes, str]]:
    """(ending, file, label) of each row; of a test, whose labels the hub often withholds, of those with a label.

    Raises UserError (65).
    """
    for place, (image, label) in enumerate(rows_of(path, [columns.image, columns.label], IMAGES_AT_ONCE)):
        content = (image or {}).get("bytes")
        has_label = label not in (None, "", -1)  # the hub's word for no label is -1
        if is_test and not has_label:
            continue
        if not content or not has_label:
            raise UserError(f"{path}: row {place}, counted from 0, has no"
                            f" {columns.label if content else f'bytes in {columns.image}'}; "
                            f"{'embed its file, or ' if (image or {}).get('path') else ''}remove it", Exit.BAD_DATA)
        yield next((kind for magic, kind in KINDS.items() if content.startswith(magic)), "jpg"), content, str(label)
