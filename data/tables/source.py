"""Where the samples of tables come from: files, columns, splits; and the groups that belong together.

    source = TableSource("reviews", TEXTS, "auto", ("label",))
    for path, row in source.rows("train"): ...

The splits are files (data/tables/files.py), or the values of a column named split.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from data.labels import CLASSES, LabelReader, require_labels
from data.splits import VAL_NAMES, splits_in
from data.tables.files import find_tables
from data.tables.table import SPLIT, Columns, Inputs, Row, choose_columns, read_rows
from utils.array_folder import digest_of
from utils.errors import Exit, UserError, counted, some

_SPLITS = {"train": "train", "training": "train", "dev": "val", "eval": "val",  # values of the column
           **{name: name for name in VAL_NAMES}}


@dataclass(frozen=True)
class TableSource:
    """What is read, and how."""

    root: str  # see data/tables/files.py: find_tables
    inputs: Inputs
    input_column: str  # the value of inputs.flag
    label_columns: tuple[str, ...]  # empty: there are no labels
    label_kind: str = CLASSES
    group_column: str | None = None
    skip_bad: bool = False  # a row that cannot be a sample is left out, with a note; False: it is an error
    split: str = "val"  # read besides train and val: test needs no labels until it is evaluated
    as_written: bool = False  # see data.splits.ClassNames

    @cached_property
    def _files(self) -> tuple[dict[str, list[Path]], list[str]]:
        return find_tables(self.root, self.label_columns)

    @cached_property
    def columns(self) -> Columns:
        """Those that are read. Raises UserError (65)."""
        files, _ = self._files
        found, *_ = [  # of train; a text file among the others has no labels
            choose_columns(paths[0], self.inputs, self.input_column, self.label_columns, self.group_column)
            for split, paths in files.items() if split == "train" or paths[0].suffix == ".txt"]
        return found if len(files) == 1 else found._replace(split=None)

    @cached_property
    def _named(self) -> dict[str, str]:
        """{split: what the column of splits calls it}. Reads all rows."""
        found = {_split_of(path, row) for path, row in self._all_rows()}
        if "train" not in found:
            raise UserError(f"--data {self.root}: the column {SPLIT} has {some(sorted(found))}, but no train",
                            Exit.BAD_DATA)
        return splits_in(found)

    @cached_property
    def splits(self) -> tuple[str, ...]:
        """Train and, where they are there, val and the split that is evaluated."""
        found = self._named if self.columns.split else self._files[0]
        return tuple(split for split in found if split in ("train", "val", self.split))

    @property
    def notes(self) -> list[str]:
        """For the user, a line each."""
        val = self._named.get("val", "val") if self.columns.split else "val"
        by_column = [f"no row has {SPLIT} val, so those of {val} are used for validation"] if val != "val" else []
        return [*self._files[1], *by_column]

    def rows(self, split: str) -> Iterator[tuple[Path, Row]]:
        """The rows of a split in their order, with their files. Raises UserError (65) with file, line and rule."""
        if not self.columns.split:
            return self._all_rows(split)
        return ((path, row) for path, row in self._all_rows() if _split_of(path, row) == self._named[split])

    def place(self, split: str) -> str:
        """Where the rows of a split stand, for messages."""
        files, _ = self._files
        return some(map(str, files["train"])) + f" ({SPLIT} {split})" if self.columns.split else some(
            map(str, files[split]))

    def _all_rows(self, split: str = "train") -> Iterator[tuple[Path, Row]]:
        columns, is_one = self.columns, len(self._files[0]) == 1
        unwanted = SPLIT if is_one and SPLIT not in (*columns.texts, *columns.labels, *columns[2:]) else ""
        return ((path, row) for path in self._files[0][split] for row in read_rows(path, columns, unwanted=unwanted))

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
        self.labels = LabelReader(source.label_kind, source.label_columns, as_written=source.as_written)

    def rows(self, split: str, problem_of: Callable[[Path, Row], str] = lambda table, row: "") -> Iterator[Row]:
        """Those of a split. problem_of: what else keeps a row of a table from being a sample; "" for nothing.

        Raises UserError (65) for a row that cannot be one, unless such rows are skipped.
        """
        source = self._source
        for table, row in source.rows(split):
            problem = source.problem(row, self.labels, is_train=split == "train") or problem_of(table, row)
            if problem and not source.skip_bad:
                raise UserError(f"{table} line {row.line}: {problem}; correct or remove the row, or pass --bad-samples"
                                " skip", Exit.BAD_DATA)
            if problem:
                self._first_bad = self._first_bad or f"{table} line {row.line}: {problem}"
                self._num_bad += 1
                continue
            if row.labels:
                self.labels.add(split, row.labels)
            yield row

    @property
    def notes(self) -> list[str]:
        """For the user: what was left out, and which labels are one, or look alike."""
        found = f"left out {counted(self._num_bad, 'sample')}, for example {self._first_bad}"
        return ([found] if self._num_bad else []) + self.labels.names.notes

    def no_samples(self, split: str) -> UserError:
        """What to raise if a split has none."""
        found = f"{self._source.place(split)}: there are no {self._source.inputs.word}s in it"
        return UserError("; ".join([found, *self.notes]), Exit.BAD_DATA)


class Groups:
    """Numbers the groups of train, whose samples are held out together."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._rows: list[int] = []
        self._shared: set[str] = set()  # groups of train with samples in another split

    def add(self, split: str, row: Row) -> None:
        """Rows of train come first."""
        if split == "train":
            self._rows.append(self._numbers.setdefault(row.group, len(self._numbers)))
        elif row.group in self._numbers:
            self._shared.add(row.group)

    @property
    def array(self) -> np.ndarray:
        """[N] int32: the group of each sample of train."""
        return np.array(self._rows, np.int32)

    def notes(self, column: str) -> list[str]:
        """For the user: whether other splits share groups with train."""
        if not self._shared:
            return []
        return [f"{len(self._shared)} of the {len(self._numbers)} groups of train ({column}) occur in another split,"
                f" too, for example {min(self._shared)}: what is measured there is partly known from training"]


def _split_of(path: Path, row: Row) -> str:
    if row.split.lower() not in _SPLITS:
        raise UserError(f"{path} line {row.line}: {SPLIT} is {row.split or 'empty'}; it must be one of"
                        f" {', '.join(_SPLITS)}; if the column is about something else, rename it", Exit.BAD_DATA)
    return _SPLITS[row.split.lower()]
