"""Images that a table lists: paths relative to the table, with classes, several labels, or numbers.

    found = build_table_index(source, ValSplit(fraction=0.1, seed=0), cache)      # a FolderIndex

    image,label                    photo,mask,weight,patient
    cats/1.jpg,cat                 1.jpg,1_mask.png,71.5,A
"""

import hashlib
import json
import os
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from data.images.index import ARRAYS, FolderIndex, Found, ImageIndex, kept_index
from data.images.scan import EXTENSIONS
from data.labels import require_several
from data.shards.shard import names_in
from data.splits import ValSplit, hint_at
from data.tables.source import RowReader, TableSource
from data.tables.table import PARQUET, TABLES, Row
from utils.errors import Exit, UserError

CACHE_VERSION = 2


def is_table(root: str) -> bool:
    """Whether --data names a table, or a folder with tables (train.csv, ...)."""
    path = Path(root)
    usual = {*TABLES} - {PARQUET}  # which holds the images themselves
    return path.suffix in usual if path.is_file() else any((path / f"train{suffix}").is_file() for suffix in usual)


def build_table_index(source: TableSource, val: ValSplit, cache: Path) -> FolderIndex:
    """The index of the images in `source`. See kept_index()."""
    file = cache / f"image-table-{source.digest(CACHE_VERSION)}.json"
    return kept_index(file, lambda: _read(source), val, source.root)


def _read(source: TableSource) -> Found:
    """For kept_index(). Raises UserError."""
    # rows
    root = Path(source.root).resolve()
    root = str(root.parent if root.is_file() else root)
    reader, files = RowReader(source), TableFiles()
    paths: dict[str, list[bytes]] = {split: [] for split in source.splits}
    for split, found in paths.items():
        for _ in reader.rows(split, files.problem):
            if len(files.paths) > 1 and (wrong := [path for path in files.paths if "," in path]):
                raise UserError(f"--data {source.root}: {wrong[0]} has a comma, and commas divide the paths of a sample"
                                " of several images; rename it", Exit.BAD_DATA)
            found.append(b"\0".join(os.fsencode(os.path.relpath(path, root)) for path in files.paths))
        if not found:
            raise reader.no_samples(split)

    # splits
    names, encoded = reader.labels.encoded()
    require_several(source.label_kind, names, source.root, source.label_columns)
    splits = {split: ImageIndex.of(root, found, encoded[split]) for split, found in paths.items()}

    # fingerprint: of what training and validation read, without test
    digest = hashlib.sha256(json.dumps(names).encode())
    for split in [split for split in splits if split != "test"]:
        for name in ARRAYS:
            digest.update(getattr(splits[split], name))

    if reader.groups is not None:
        digest.update(reader.groups)  # they decide what is held out
    about = {"root": root, "classes": names, "fingerprint": digest.hexdigest(), "notes": source.notes + reader.notes,
             "columns": source.columns.texts, "directories": files.times}
    return about, splits, reader.groups


class TableFiles:
    """Which files there are: a directory is listed once, as asking for each file is slow on network file systems."""

    def __init__(self) -> None:
        self.times: dict[str, int] = {}  # {directory: st_mtime_ns} of those that are there
        self._names: dict[str, frozenset[str]] = {}
        self._root_of = lru_cache(maxsize=None)(lambda table: table.parent.resolve())
        self.paths: list[str] = []  # absolute ones of the row that was asked about last

    def problem(self, table: Path, row: Row) -> str:
        """Which file of a row of a table is missing; "" if none is."""
        self.paths = [os.path.join(self._root_of(table), name.strip()) for name in row.texts]
        for path in self.paths:
            folder, name = os.path.split(path)
            if folder not in self._names:
                self._names[folder] = frozenset()
                with suppress(OSError):
                    try:
                        self.times[folder] = os.stat(folder).st_mtime_ns  # before listing: a later change outdates it
                        with os.scandir(folder) as entries:
                            self._names[folder] = frozenset(entry.name for entry in entries if not entry.is_dir())
                    except NotADirectoryError:
                        shard, self._names[folder] = names_in(folder)
                        self.times[shard] = os.stat(shard).st_mtime_ns
            if name not in self._names[folder]:
                return f"there is no file {path}{self._hint(path, folder, name)}"
        return ""

    def _hint(self, path: str, folder: str, name: str) -> str:
        """Why, if that can be seen."""
        if os.path.isdir(path):
            return ": it is a folder"
        if os.path.isfile(path.replace("\\", "/")):
            return ": it is there with slashes; replace each backslash by / (the table was written on Windows)"
        if " " in name and not name.lower().endswith(EXTENSIONS):
            return "; if the column holds texts, give --task text-classification"
        return hint_at(name, self._names[folder]) or " (paths are relative to the folder of the table)"
