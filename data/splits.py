"""Splits: what their folders and files are called, and the share of train that is held out where there is none for validation."""

import numpy as np
import torch

from utils.seed import derive_seed

VAL_NAMES = ("val", "valid", "validation", "test")  # the first that exists
SPLIT_NAMES = ("train", "training", "eval", *VAL_NAMES)


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
