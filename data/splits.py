"""Splits: what their folders and files are called, and the share of train that is held out where there is none for validation."""

from typing import Any

import numpy as np
import torch

from utils.errors import Exit, UserError
from utils.seed import derive_seed

VAL_NAMES = ("val", "valid", "validation", "test")  # the first that exists
SPLIT_NAMES = ("train", "training", "eval", *VAL_NAMES)


def hold_out(
    splits: dict[str, Any], root: str, fraction: float, seed: int, texts: np.ndarray | None = None
) -> tuple[dict[str, Any], str]:
    """The splits with val taken out of train, and a note for the user. Raises UserError (64, 65).

    A split has `labels` ([N] integers) and select(chosen: [N] bool). root: of the data, for messages. texts: [N] integers, the
    text that each sample of train is cut from: whole texts are held out, whatever the labels.
    """
    if fraction <= 0:
        raise UserError(f"--val-fraction {fraction}: {root} has no val (nor {', '.join(VAL_NAMES[1:])}), so a share of train must be held"
                        " out; give more than 0, or add val")
    train = splits["train"]
    held = held_out(train.labels, fraction, seed) if texts is None else held_out(np.zeros(texts.max() + 1, int), fraction, seed)[texts]
    if not held.any() or held.all():
        found = "every class has one sample" if texts is None else "there are too few texts"
        raise UserError(f"--data {root}: {found}, so none can be held out for validation; add samples, or val", Exit.BAD_DATA)
    note = f"there is no val: {held.sum()} of the {len(held)} training samples are held out (--val-fraction {fraction})"
    return splits | {"train": train.select(~held), "val": train.select(held)}, note


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
