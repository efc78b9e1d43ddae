"""Splits and classes: names and order, what is refused, and what is held out of train where there is no val."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import numpy as np
import torch

from utils.array_folder import kept_arrays
from utils.errors import Exit, UserError
from utils.numerics.seed import derive_seed

VAL_NAMES = ("val", "valid", "validation", "test")  # the first that exists
SPLIT_NAMES = ("train", "training", "eval", *VAL_NAMES)
SURELY_CLASSES = 1000  # however few samples each has
MOST_WITH_ONE = 0.9  # of more classes: the share of them that may have one sample


def require_classes(counts: np.ndarray, place: str, way_out: str) -> None:
    """Raise UserError (65) where labels are ids, one for each sample or nearly so, rather than classes.

    counts: [C] training samples of each class, held-out ones included. place: what has these labels, for the message.
    """
    num_single = int((counts == 1).sum())
    if len(counts) > SURELY_CLASSES and num_single > MOST_WITH_ONE * len(counts):
        raise UserError(f"{place} has {len(counts)} classes, and {num_single} of them have a single training sample, as"
                        f" ids do; of more than {SURELY_CLASSES} classes at most {MOST_WITH_ONE:.0%} may; {way_out}",
                        Exit.BAD_DATA)


def sort_classes(labels: Iterable[str]) -> list[str]:
    """Numbers numerically, if all are; words by their characters."""
    try:
        return sorted(labels, key=lambda label: (Decimal(label), label))
    except InvalidOperation:
        return sorted(labels)


def hold_out(
    splits: dict[str, Any], root: str, fraction: float, seed: int, folder: Path, texts: np.ndarray | None = None
) -> tuple[dict[str, Any], str]:
    """The splits with val taken out of train, and a note for the user. Raises UserError (64, 65).

    Splits are tables, see `select`, with `labels` ([N] integers). root: of the data, for messages. folder: where the
    new ones are kept; data, fraction and seed decide its name. texts: [N] integers, the text that each sample of train
    is cut from: whole texts are held out, whatever the labels.
    """
    if fraction <= 0:
        raise UserError(f"--val-fraction {fraction}: {root} has no val (nor {', '.join(VAL_NAMES[1:])}), so a share of train must be held"
                        " out; give more than 0, or add val")
    train = splits["train"]

    def choose() -> dict[str, np.ndarray]:
        held = held_out(train.labels if texts is None else np.zeros(texts.max() + 1, int), fraction, seed)
        held = held if texts is None else held[texts]
        if not held.any() or held.all():
            found = "every class has one sample" if texts is None else "there are too few texts"
            raise UserError(f"--data {root}: {found}, so none can be held out for validation; add samples, or val",
                            Exit.BAD_DATA)
        return {"train": ~held, "val": held}

    found = select(train, choose, folder)
    counts = f"{len(found['val'])} of the {len(train)} training samples"
    return splits | found, f"there is no val: {counts} are held out (--val-fraction {fraction})"


def select(table: Any, choose: Callable[[], dict[str, np.ndarray]], folder: Path) -> dict[str, Any]:
    """Tables of chosen samples, by name, whose arrays are kept in `folder`, so that the processes of a node share them.

    table: a dataclass; its `per_sample` names the arrays with an entry per sample, the others stay as they are.
    choose: gives {name: a mask ([N] bool), or indices in the order wanted}; called where nothing is kept yet.
    """
    arrays = kept_arrays(folder, lambda: {f"{name}.{array}": getattr(table, array)[chosen]
                                          for name, chosen in choose().items() for array in table.per_sample})
    names = dict.fromkeys(key.partition(".")[0] for key in arrays)
    return {name: replace(table, **{array: arrays[f"{name}.{array}"] for array in table.per_sample}) for name in names}


def held_out(labels: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """[N] bool: `fraction` of each class, at least one sample where there are two, never all. A pure function of its arguments.

    labels: [N] integers >= 0.
    """
    generator = torch.Generator().manual_seed(derive_seed(seed, "val-split"))
    held = np.zeros(len(labels), dtype=bool)
    by_label, counts = labels.argsort(kind="stable"), np.bincount(labels)
    for start, count in zip(np.cumsum(counts) - counts, counts, strict=True):
        share = min(max(1, round(count * fraction)), count - 1)
        if count:
            held[by_label[start + torch.randperm(int(count), generator=generator)[:share].numpy()]] = True
    return held
