"""Where the samples of tables come from: files, columns, splits; and the groups that belong together.

    source = TableSource("reviews", TEXTS, "auto", ("label",))
    for path, row in source.rows("train"): ...

The splits are files (.csv, .tsv, .jsonl, .txt), or the values of a column named split.

Tests: tests/unit/data/tables/test_table.py
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from data.labels import CLASSES, LabelReader, require_labels
from data.shards.files import files_by_split, used_splits
from data.splits import SPLIT_NAMES, VAL_NAMES, splits_in
from data.tables.table import PARQUET, SPLIT, TEXTS, Columns, Inputs, Row, choose_columns, column_names, read_rows
from utils.array_folder import digest_of
from utils.errors import Exit, UserError, counted, some
from utils.files import is_users

MANY = 10_000  # files that are looked at to find out what a folder holds
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff")
_SPLITS = {"train": "train", "training": "train", "dev": "val", "eval": "val", **{name: name for name in VAL_NAMES}}


@dataclass(frozen=True)
class TableSource:
    """What is read, and how."""

    root: str  # see find_tables
    inputs: Inputs
    input_column: str  # the value of inputs.flag
    label_columns: tuple[str, ...]  # empty: there are no labels
    label_kind: str = CLASSES
    group_column: str | None = None
    skip_bad: bool = False  # a row that cannot be a sample is left out, with a note; False: it is an error
    split: str = "val"  # read besides train and val: test needs no labels until it is evaluated

    @cached_property
    def _files(self) -> tuple[dict[str, list[Path]], list[str]]:
        return find_tables(self.root, self.label_columns, self.inputs.suffixes)

    @cached_property
    def columns(self) -> Columns:
        """Those that are read. Raises UserError (65)."""
        files, _ = self._files
        found, *_ = [  # of train; a text file among the others has no labels
            choose_columns(paths[0], self.inputs, self.input_column, self.label_columns, self.group_column)
            for split, paths in files.items() if split == "train" or paths[0].suffix == ".txt"]
        return found if len(files) == 1 else found._replace(split=None)

    @cached_property
    def _parts(self) -> dict[str, tuple[list[Path], str]]:
        """By split: its files; and what the column of splits calls it, "" without such a column. It needs all rows."""
        files, _ = self._files
        if not self.columns.split:
            return {split: (paths, "") for split, paths in files.items()}
        found = {_split_of(path, row) for path, row in self._rows_of(files["train"])}
        if "train" not in found:
            raise UserError(f"--data {self.root}: {SPLIT} is {some(sorted(found))}, and never train", Exit.BAD_DATA)
        return {split: (files["train"], name) for split, name in splits_in(found).items()}

    @cached_property
    def splits(self) -> tuple[str, ...]:
        """Train and, where they are there, val and the split that is evaluated."""
        return tuple(split for split in self._parts if split in ("train", "val", self.split))

    @property
    def notes(self) -> list[str]:
        """For the user, a line each."""
        _, val = self._parts.get("val", ([], ""))
        by_column = f"no row has {SPLIT} val, so those of {val} are used for validation"
        return [*self._files[1], *([by_column] if val not in ("", "val") else [])]

    def rows(self, split: str) -> Iterator[tuple[Path, Row]]:
        """The rows of a split in their order, with their files. Raises UserError (65) with file, line and rule."""
        paths, name = self._parts[split]
        return ((path, row) for path, row in self._rows_of(paths) if not name or _split_of(path, row) == name)

    def samples(self, split: str, classes: Sequence[str],
                problem_of: Callable[[Path, Row], str] = lambda table, row: "") -> Iterator[Row]:
        """The rows of a split that are samples, read again. classes: of train. problem_of: see RowReader.rows."""
        labels = LabelReader(self.label_kind, self.label_columns, classes)
        return (row for table, row in self.rows(split)
                if not (self.problem(row, labels, is_train=False) or problem_of(table, row)))

    def place(self, split: str) -> str:
        """Where the rows of a split stand, for messages."""
        paths, name = self._parts[split]
        return some(map(str, paths)) + (f" ({SPLIT} {split})" if name else "")

    def _rows_of(self, paths: list[Path]) -> Iterator[tuple[Path, Row]]:
        columns, is_one = self.columns, len(self._files[0]) == 1
        unwanted = SPLIT if is_one and SPLIT not in (*columns.texts, *columns.labels, *columns[2:]) else ""
        return ((path, row) for path in paths for row in read_rows(path, columns, unwanted=unwanted))

    def problem(self, row: Row, labels: LabelReader, is_train: bool) -> str:
        """Why a row cannot be a sample; "" if it can."""
        if empty := [name for name, text in zip(self.columns.texts, row.texts, strict=True) if not text.strip()]:
            return f"{some(empty)} is empty"
        if self.columns.group and not row.group:
            return f"{self.columns.group} is empty, so the row belongs to no group"
        return labels.problem(row.labels, is_train)

    def require_labels(self) -> None:
        """Raise UserError (65) if the labels of train are not of label_kind: before work that takes long."""
        if self.label_columns:
            place = f"--data {self.root}: the column {some(self.label_columns)}"
            require_labels(self.label_kind, (row.labels for _, row in self.rows("train")), place)

    def digest(self, version: int) -> str:
        """A part of the name of what is made of these files: all that decides it."""
        files = [(split, str(path.absolute()), path.stat().st_size, path.stat().st_mtime_ns)
                 for split, paths in self._files[0].items() if split in ("train", "val", self.split) for path in paths]
        settings: dict[str, Any] = asdict(self if self.columns.split else replace(self, split=""))
        return digest_of(version, files, settings | {"inputs": self.inputs.word})


class RowReader:
    """Reads the rows of a source that can be samples. Train comes first: it decides which labels there are."""

    def __init__(self, source: TableSource):
        """Raises UserError (65) if the labels are of another kind."""
        source.require_labels()
        self._source, self._num_bad, self._first_bad = source, 0, ""
        self.labels = LabelReader(source.label_kind, source.label_columns)
        self._numbers: dict[str, int] = {}  # of the groups of train
        self._groups: list[int] = []  # the number of each row's, of train
        self._shared: set[str] = set()  # groups of train with rows in another split

    def rows(self, split: str, problem_of: Callable[[Path, Row], str] = lambda table, row: "") -> Iterator[Row]:
        """Those of a split. problem_of: what else keeps a row of a table from being a sample; "" for nothing.

        Raises UserError (65) for a row that cannot be one, unless such rows are skipped.
        """
        source = self._source
        for table, row in source.rows(split):
            place = f"{table} line {row.line}"
            problem = source.problem(row, self.labels, is_train=split == "train") or problem_of(table, row)
            if problem and not source.skip_bad:
                way_out = "correct or remove the row, or pass --bad-samples skip"
                raise UserError(f"{place}: {problem}; {way_out}", Exit.BAD_DATA)
            if problem:
                self._first_bad = self._first_bad or f"{place}: {problem}"
                self._num_bad += 1
                continue
            if row.labels:
                self.labels.add(split, row.labels)
            if split == "train":
                self._groups.append(self._numbers.setdefault(row.group, len(self._numbers)))
            elif row.group in self._numbers:
                self._shared.add(row.group)
            yield row

    @property
    def groups(self) -> np.ndarray | None:
        """[N] int32: the group of each row of train, whose samples are held out together; None without groups."""
        return np.array(self._groups, np.int32) if self._source.columns.group else None

    @property
    def notes(self) -> list[str]:
        """For the user: what was left out, which labels are one, or look alike, and which groups splits share."""
        found = [f"left out {counted(self._num_bad, 'sample')}, for example {self._first_bad}"] if self._num_bad else []
        if (column := self._source.columns.group) and self._shared:
            found.append(f"{len(self._shared)} of the {len(self._numbers)} groups of train ({column}) occur in another"
                         f" split, too, for example {min(self._shared)}: what is measured there is partly known from"
                         " training; give each group to one split")
        return found + self.labels.names.notes

    def no_samples(self, split: str) -> UserError:
        """What to raise if a split has none."""
        found = f"{self._source.place(split)}: there are no {self._source.inputs.word}s in it"
        return UserError("; ".join([found, *self.notes]), Exit.BAD_DATA)


def _split_of(path: Path, row: Row) -> str:
    if row.split.lower() not in _SPLITS:
        raise UserError(f"{path} line {row.line}: {SPLIT} is {row.split or 'empty'}; it must be one of"
                        f" {', '.join(_SPLITS)}; if the column is about something else, rename it", Exit.BAD_DATA)
    return _SPLITS[row.split.lower()]


def find_tables(
    root: str, labels: Sequence[str] = (), suffixes: tuple[str, ...] = TEXTS.suffixes
) -> tuple[dict[str, list[Path]], list[str]]:
    """The files of each split (train and, if there are such, val and test), and notes for the user.

    root: a file; or a folder with train.csv, val.csv, ... (any of TEXTS.suffixes) or with train/, val/, ... that hold
    files with `suffixes`; or a folder that holds such files directly, all for training. labels: columns without which
    test is not used for validation. Raises UserError (65, 66).
    """
    # Parquet files
    usual = [name for name in TEXTS.suffixes if name != PARQUET and [*Path(root).glob(f"*{name}")]]
    if found := {} if usual else files_by_split(root, PARQUET):
        files, notes = used_splits(root, found)
        return {split: [*map(Path, paths)] for split, paths in files.items()}, notes

    # a file
    top = Path(root)
    if not top.exists():
        raise UserError(f"--data {root}: there is no such file or folder", Exit.NO_INPUT)
    if not top.is_dir():
        return {"train": [table_at(root)]}, []

    # a folder with splits
    if train := _files_of(top, "train", suffixes):
        vals = (*VAL_NAMES[:-1], "dev", "eval", "test")
        val = next((name for name in vals if _files_of(top, name, suffixes)), "test")
        files = {"train": train} | {name: found for name in (val, "test") if (found := _files_of(top, name, suffixes))}
        named, notes = splits_in(files, vals), []
        if named.get("val") == "test" and (lacking := [
                name for name in labels if name not in (column_names(files["test"][0]) or labels)]):
            named = {"train": "train", "test": "test"}
            notes.append(f"{files['test'][0].name} has no column {some(lacking)}, so it is not used for validation")
        if (val := named.get("val", "val")) != "val":
            notes.append(f"there is no val, so {val} is used for validation")
        return {split: files[name] for split, name in named.items()}, notes

    # a folder without splits
    names = sorted(path.name for path in top.iterdir() if is_users(path.name))
    tables = [top / name for name in names if _is_table(top / name)]
    files = islice(top.rglob("*"), 0 if tables else MANY)
    if image := next((path for path in files if path.suffix.lower() in IMAGE_SUFFIXES), None):
        raise UserError(f"--data {root}: it holds no texts for training, but images ({image.relative_to(top)}); for"
                        " images give --task image-classification", Exit.BAD_DATA)
    if similar := [name for name in names if Path(name).stem.lower() in SPLIT_NAMES
                   and (top / name in tables or (top / name).is_dir())]:
        raise UserError(f"--data {root}: has {some(similar)} but no texts for training; name the training file"
                        " train.csv (or .tsv, .jsonl, .txt), or put such files into train/", Exit.BAD_DATA)
    if not tables:
        raise UserError(f"--data {root}: it holds {some(names)}, and no table or text file; put train.csv (or .tsv,"
                        " .jsonl, .txt) into this folder", Exit.BAD_DATA)
    return {"train": tables}, [f"there is no train, so all of --data is training data ({counted(len(tables), 'file')})"]


def table_at(name: str) -> Path:
    """The file of texts with this name. Raises UserError: 66 without such a file, 65 for another suffix."""
    path = Path(name)
    if not path.is_file():
        raise UserError(f"{name}: there is no such file", Exit.NO_INPUT)
    if not _is_table(path):
        way_out = "; for images give --task image-classification" if path.suffix.lower() in IMAGE_SUFFIXES else ""
        raise UserError(f"{name}: a file of texts ends in {', '.join(TEXTS.suffixes)}{way_out}", Exit.BAD_DATA)
    return path


def _files_of(top: Path, split: str, suffixes: tuple[str, ...]) -> list[Path]:
    """The files of a split: top/split.csv, or those in top/split/. Raises UserError if there are several kinds."""
    inside = sorted(path for path in (top / split).rglob("*") if _is_table(path, suffixes)
                    and all(map(is_users, path.relative_to(top).parts)))
    found = [path for suffix in TEXTS.suffixes if _is_table(path := top / f"{split}{suffix}")]
    if len(kinds := found + ([top / split] if inside else [])) > 1:
        raise UserError(f"--data {top}: {some(path.name for path in kinds)} each hold {split}; keep one", Exit.BAD_DATA)
    return inside or found


def _is_table(path: Path, suffixes: tuple[str, ...] = TEXTS.suffixes) -> bool:
    return path.suffix in suffixes and path.is_file()
