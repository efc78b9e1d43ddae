"""Splits and classes: names and order, what is refused, and how val is held out of train where there is none.

Legend: N samples, C classes.
"""

import math
import re
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from pathlib import Path
from typing import ClassVar, Protocol

import numpy as np
import torch

from utils.array_folder import kept_arrays
from utils.errors import Exit, UserError, counted, some
from utils.numerics.seed import derive_seed

VAL_NAMES = ("val", "valid", "validation", "test")  # the first that exists
SPLIT_NAMES = ("train", "training", "eval", *VAL_NAMES)
FEW_CLASSES = 10  # up to here numbers are taken for classes
SURELY_CLASSES = 1000  # up to here labels are taken for classes, however few samples each has
MAX_SINGLE = 0.9  # above: the share of the classes that may have one sample


def splits_in(names: Collection[str], vals: Sequence[str] = VAL_NAMES) -> dict[str, str]:
    """{split: what the data call it} of data with these names: train and, if they are there, val and test.

    vals: names of val, the first that exists.
    """
    val = next((name for name in vals if name in names), None)
    found = {"train": "train", "val": val, "test": "test" if "test" in names and val != "test" else None}
    return {split: name for split, name in found.items() if name}


class Table(Protocol):
    """The samples of a split: a dataclass of arrays."""

    per_sample: ClassVar[tuple[str, ...]]  # names of the arrays with one entry per sample
    labels: np.ndarray  # [N] integers

    def __len__(self) -> int: ...


@dataclass(frozen=True)
class ValSplit:
    """How val is taken out of train where the data has none."""

    fraction: float  # --val-fraction
    seed: int
    only: str = ""  # the split that is evaluated, where nothing is trained: the data need no other

    def folder(self, index: Path) -> Path:
        """Where the new splits of the data with this index are kept."""
        return index.with_name(f"{index.name}-val-{self.fraction}-{self.seed}")


def require_classes(counts: np.ndarray, place: str, way_out: str) -> None:
    """Raise UserError (65) where the labels are not classes but ids: nearly every sample has one of its own.

    counts: [C] training samples of each class, held-out ones included. place: what has these labels, for the message.
    """
    num_single = int((counts == 1).sum())
    if len(counts) > SURELY_CLASSES and num_single > MAX_SINGLE * len(counts):
        raise UserError(f"{place} has {len(counts)} classes that look like ids: {num_single} have a single training"
                        f" sample, and of more than {SURELY_CLASSES} classes at most {MAX_SINGLE:.0%} may have a single"
                        f" one; {way_out}", Exit.BAD_DATA)


def require_no_targets(counts: Mapping[str, int], place: str, way_out: str) -> None:
    """Raise UserError (65) where the labels are measurements: numbers, nearly all different.

    counts: {label: training samples}. place: what has these labels, for the message.
    """
    num_single = sum(count == 1 for count in counts.values())
    are_numbers = all(math.isfinite(number(name)) for name in counts)
    if len(counts) > FEW_CLASSES and num_single > MAX_SINGLE * len(counts) and are_numbers:
        raise UserError(f"{place} holds {len(counts)} different numbers (for example {some(counts)}), {num_single} of"
                        f" them once: this looks like regression, not classes; {way_out}", Exit.BAD_DATA)


_NO_WIDTH = dict.fromkeys(map(ord, "\u200b\u200e\u200f\u2060\ufeff"))
_OUTER = re.compile(r"^[\s\u200c\u200d]+|[\s\u200c\u200d]+$")  # within a word joiners have a meaning
_VARIANTS = "case, spaces or how a number or a character is written"


def plain(name: str) -> str:
    """The name of a class without what nobody can see: its Unicode form, outer spaces, characters without width."""
    return _OUTER.sub("", unicodedata.normalize("NFC", name.translate(_NO_WIDTH)))


class ClassNames:
    """The names of classes: those that nobody can tell apart are one, and those that look alike are noted."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}  # {as the data write it: name}

    def name_of(self, written: str) -> str:
        """What the data's `written` is called."""
        if written not in self._names:
            self._names[written] = plain(written)
        return self._names[written]

    @property
    def notes(self) -> list[str]:
        """For the user: which spellings are one name, and which names look alike."""
        spellings, looks = defaultdict(set), defaultdict(set)
        for written, name in self._names.items():
            spellings[name].add(ascii(written))
            looks[_look(name)].add(repr(name))
        one, alike = ([" and ".join(sorted(each)) for each in groups.values() if len(each) > 1]
                      for groups in (spellings, looks))
        return [note for note, found in (
            ("names that differ only in Unicode form, outer spaces or characters without width are one class:"
             f" {some(one)}", one),
            (f"names that differ only in {_VARIANTS} are different classes: {some(alike)}; if two of them mean the"
             " same, write only one of them", alike)) if found]


def hint_at(name: str, others: Iterable[str]) -> str:
    """The end of a message about a name that is not among the others: which of them looks like it; else ""."""
    twin = next((other for other in others if _look(other) == _look(name)), None)
    return "" if twin is None else f"; {name!r} and {twin!r} differ only in {_VARIANTS}"


@lru_cache(2**16)  # every class is asked about for each row whose label is unknown
def _look(name: str) -> str | Decimal:
    """What is the same for names that look alike: 0 and 0.0, cat and Cat."""
    visible = "".join(char for char in unicodedata.normalize("NFKC", name) if unicodedata.category(char) != "Cf")
    word = " ".join(visible.casefold().split())
    with suppress(InvalidOperation):  # a float's exponent may be too long for it
        return Decimal(word) if math.isfinite(number(word)) else word
    return word


def number(word: str) -> float:
    """`word` read as a number; NaN if it cannot be read as one."""
    try:
        return math.nan if "_" in word else float(word)  # float reads 1_0 as 10
    except ValueError:
        return math.nan


def require_split(name: str, splits: Iterable[str], root: str) -> None:
    """Raise UserError (66) if --split names a split that the data lacks."""
    if name not in splits:
        raise UserError(f"--split {name}: {root} has no such split; it has {', '.join(splits)}", Exit.NO_INPUT)


def sort_classes(labels: Iterable[str]) -> list[str]:
    """Numerically if all are numbers, else as words."""
    try:
        return sorted(labels, key=lambda label: (Decimal(label), label))
    except InvalidOperation:
        return sorted(labels)


def hold_out(
    splits: dict[str, Table], val: ValSplit, root: str, folder: Path, groups: np.ndarray | None = None
) -> tuple[dict[str, Table], str]:
    """The splits with val taken out of train, and a note for the user. Raises UserError (64, 65).

    root: of the data, for messages. folder: where the new ones are kept. groups: [N] integers, what each sample of
    train belongs to (the text that it is cut from, a patient): whole groups are held out, whatever their labels.
    """
    if val.fraction <= 0:
        raise UserError(f"--val-fraction {val.fraction}: {root} has no val (nor {', '.join(VAL_NAMES[1:])}), so a share"
                        " of train must be held out; give more than 0, or add val")
    train = splits["train"]

    has_classes = train.labels.ndim == 1

    def choose() -> dict[str, np.ndarray]:
        units = train.labels if has_classes else np.zeros(len(train), int)  # samples
        if groups is not None:
            units = np.zeros(groups.max() + 1, int)
        held = held_out(units, val.fraction, val.seed)
        held = held if groups is None else held[groups]
        if not held.any() or held.all():
            found = ("all samples of train belong to one text or group" if groups is not None else
                     "every class has one sample" if has_classes else "there is one sample")
            raise UserError(f"--data {root}: {found}: none can be held out; add samples, or val", Exit.BAD_DATA)
        return {"train": ~held, "val": held}

    found = select(train, choose, folder)
    counts = f"{len(found['val'])} of the {len(train)} training samples"
    note = f"there is no val: {counts} are held out (--val-fraction {val.fraction})"
    if has_classes and groups is not None:  # else some samples of each class stay in train
        lost = np.setdiff1d(found["val"].labels, found["train"].labels)
        note += f"; train has no sample of {counted(len(lost), 'class')} of them" if len(lost) else ""
    return splits | found, note


def select(table: Table, choose: Callable[[], dict[str, np.ndarray]], folder: Path) -> dict[str, Table]:
    """Tables of chosen samples, by name. Their arrays are kept in `folder`, so that the processes of a node share them.

    choose: gives {name: a mask ([N] bool), or indices in the order wanted}; called if `folder` is not there yet.
    """
    arrays = kept_arrays(folder, lambda: {f"{name}.{array}": getattr(table, array)[chosen]
                                          for name, chosen in choose().items() for array in table.per_sample})
    names = dict.fromkeys(key.partition(".")[0] for key in arrays)
    return {name: replace(table, **{array: arrays[f"{name}.{array}"] for array in table.per_sample}) for name in names}


def held_out(labels: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """[N] bool: `fraction` of each class, at least one of two samples, never all. A pure function of its arguments.

    labels: [N] integers >= 0.
    """
    generator = torch.Generator().manual_seed(derive_seed(seed, "val-split"))
    held = np.zeros(len(labels), dtype=bool)
    by_label, counts = labels.argsort(kind="stable"), np.bincount(labels)
    for start, count in zip(np.cumsum(counts) - counts, counts, strict=True):
        num_held = min(max(1, round(count * fraction)), count - 1)
        if count:
            chosen = torch.randperm(int(count), generator=generator)[:num_held].numpy()
            held[by_label[start + chosen]] = True
    return held
