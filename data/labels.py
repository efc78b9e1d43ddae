"""The labels of a table's rows: a class, several labels separated by |, or numbers; checked, then encoded as arrays.

    reader = LabelReader(CLASSES, ("label",))
    reader.problem(("cat",), is_train=True)                     # "", or why a row cannot be a sample
    reader.add("train", ("cat",))
    names, arrays = reader.encoded()                            # ("cat", "dog"), {"train": [N] int32}

Legend: N samples, C classes or labels, T targets.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from data.splits import ClassNames, hint_at, number, plain, require_classes, require_no_targets, sort_classes
from utils.errors import Exit, UserError, counted, some

CLASSES, LABELS, NUMBERS = "classes", "labels", "numbers"  # kinds of labels
SEPARATOR = "|"  # of the labels of one sample


class LabelReader:
    """Collects the labels of all splits. Those of train come first: they decide which names there are."""

    def __init__(self, kind: str, columns: Sequence[str], known: Iterable[str] = ()):
        """columns: one; several of NUMBERS; none if there are no labels. known: names of train, if they are known.
        """
        self._kind, self._columns = kind, tuple(columns)
        self._codes = {name: code for code, name in enumerate(known)}  # of train, in the order in which they appear
        self._rows: dict[str, list] = {}  # by split: a code, a tuple of codes, or a tuple of numbers
        self.names = ClassNames()

    def problem(self, cells: Sequence[str], is_train: bool) -> str:
        """Why a row with these labels cannot be a sample; "" if it can."""
        if self._kind == NUMBERS:
            wrong = [f"{column} is {cell or 'empty'}, which is not a finite number"
                     for column, cell in zip(self._columns, cells, strict=True) if not math.isfinite(number(cell))]
            return "; ".join(wrong)
        if self._kind == CLASSES and "" in self._names_in(cells):
            return f"{self._columns[0]} is empty"
        if not is_train and (unknown := [name for name in self._names_in(cells) if name not in self._codes]):
            return (f"the label {unknown[0]} does not occur in train, which has {some(sort_classes(self._codes))}"
                    f"{hint_at(unknown[0], self._codes)}")
        return ""

    def add(self, split: str, cells: Sequence[str]) -> None:
        """Add a row without a problem."""
        rows = self._rows.setdefault(split, [])
        if self._kind == NUMBERS:
            rows.append(tuple(map(float, cells)))
        else:
            codes = tuple(self._codes.setdefault(name, len(self._codes)) for name in self._names_in(cells))
            rows.append(codes if self._kind == LABELS else codes[0])

    def encoded(self) -> tuple[tuple[str, ...], dict[str, np.ndarray]]:
        """Names of the model's outputs in their order, and the labels of each split.

        CLASSES: [N] int32. LABELS: [N, C] uint8, 1 where a sample has the label. NUMBERS: [N, T] float64.
        """
        if self._kind == NUMBERS:
            return self._columns, {split: np.array(rows, np.float64) for split, rows in self._rows.items()}
        names = sort_classes(self._codes)
        place = {name: index for index, name in enumerate(names)}
        new = np.array([place[name] for name in self._codes], np.int32)
        if self._kind == CLASSES:
            return tuple(names), {split: new[np.array(rows, np.int32)] for split, rows in self._rows.items()}
        arrays = {}
        for split, rows in self._rows.items():
            arrays[split] = np.zeros((len(rows), len(names)), np.uint8)
            codes = np.array([code for row in rows for code in row], np.int32)
            arrays[split][np.repeat(np.arange(len(rows)), [len(row) for row in rows]), new[codes]] = 1
        return tuple(names), arrays

    def _names_in(self, cells: Sequence[str]) -> list[str]:
        if self._kind == CLASSES:
            return [*map(self.names.name_of, cells)]
        return [*filter(None, map(self.names.name_of, map(str.strip, cells[0].split(SEPARATOR))))]


def require_labels(kind: str, labels: Iterable[tuple[str, ...]], place: str) -> None:
    """Raise UserError (65) where the labels of train are not of this kind.

    labels: those of each row. place: what has them, for the message.
    """
    if kind == NUMBERS:
        return  # LabelReader.problem says it, with the row
    counts = Counter(name for cells in labels for name in (cells[0].split(SEPARATOR) if kind == LABELS else cells))
    way_out = "give --label-column the column with classes; for numbers use --task image-regression or text-regression"
    if kind == CLASSES:
        if joined := [name for name in counts if SEPARATOR in name]:
            raise UserError(f"{place} holds {some(joined)}: {SEPARATOR} separates the labels of a sample that has"
                            f" several; give --multi-label, or write the classes without {SEPARATOR}", Exit.BAD_DATA)
        require_no_targets(counts, place, way_out)
    require_classes(np.array(list(counts.values())), place, way_out)


def require_several(kind: str, names: Collection[str], root: str, columns: Collection[str]) -> None:
    """Raise UserError (65) if there are not enough names. root: the value of --data. columns: that have the labels."""
    if len(names) == 1 and kind == CLASSES:
        raise UserError(f"--data {root}: {some(columns)} has only one class, {some(names)}; add another", Exit.BAD_DATA)
    if not names and kind == LABELS:
        raise UserError(f"--data {root}: {some(columns)} is empty in all rows of train: add labels", Exit.BAD_DATA)


def counts_of(names: Sequence[str], labels: np.ndarray) -> dict[str, int]:
    """{class or label: its samples}; {} of numbers. labels: see LabelReader.encoded."""
    if labels.dtype.kind == "f" or not names:
        return {}
    counts = np.bincount(labels, minlength=len(names)) if labels.ndim == 1 else np.count_nonzero(labels, axis=0)
    return dict(zip(names, counts.tolist(), strict=True))


def lacking(names: Sequence[str], labels: np.ndarray, split: str) -> list[str]:
    """For the user: classes or labels without a sample in a split. labels: see LabelReader.encoded."""
    found = [name for name, count in counts_of(names, labels).items() if not count]
    if not found:
        return []
    many = counted(len(found), "class" if labels.ndim == 1 else "label")
    return [f"{split} has no sample of {some(found)}, so its figures say nothing about {many}"]


def label_at(labels: np.ndarray, index: int) -> int | np.ndarray:
    """The label of a sample: its class, or its row. labels: see LabelReader.encoded."""
    return int(labels[index]) if labels.ndim == 1 else labels[index]


def outputs_for(labels: Sequence[str], classes: Sequence[str]) -> list[int] | None:
    """For each of `classes`, the output of a model with these labels: the same names in any order, and in any case if
    they still differ. None if they are others.
    """
    for spelled in (str, lambda name: plain(name).casefold()):
        outputs = {spelled(label): index for index, label in enumerate(labels)}
        wanted = [spelled(name) for name in classes]
        if sorted(outputs) == sorted(wanted) and len(outputs) == len(labels):
            return [outputs[name] for name in wanted]
    return None
