"""The arithmetic of cross-validation: which fold a sample is in, intervals of figures, and labels that are doubtful.

Legend: N samples, J runs.
"""

import bisect
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from utils.numerics.seed import derive_seed

TENTHS = 10


def partition(labels: np.ndarray, num_folds: int, seed: int, groups: np.ndarray | None = None) -> np.ndarray:
    """The fold of each sample, [N] int64: as many of each class as scikit-learn's StratifiedKFold puts there.

    Strata are classes, sets of labels, or tenths of the first target. Whole groups are dealt out instead of samples,
    the largest first, each to the fold that has the smallest part of the group's strata so far, as in scikit-learn's
    StratifiedGroupKFold. The seed shuffles samples, and groups of about the same size.
    labels: see data.labels.LabelReader.encoded. groups: [N] integers.
    """
    if labels.dtype.kind == "f":
        labels = labels[:, 0].argsort(kind="stable").argsort() * TENTHS // len(labels)
    _, first, strata = np.unique(labels, axis=0, return_index=True, return_inverse=True)
    strata = first.argsort().argsort()[strata.reshape(-1)]  # counted in the order in which they appear
    _, first, units, sizes = np.unique(np.arange(len(labels)) if groups is None else groups, return_index=True,
                                       return_inverse=True, return_counts=True)
    generator = torch.Generator().manual_seed(derive_seed(seed, "folds"))
    random = torch.randperm(len(first), generator=generator).numpy()
    members = np.split(units.argsort(kind="stable"), sizes.cumsum()[:-1])
    folds, parts, totals = np.zeros_like(units), np.zeros((num_folds, strata.max() + 1)), np.zeros(num_folds)
    weights = 1.0 / np.bincount(strata) ** 2  # a class's parts count in shares, by the sum of their squares
    for unit in np.lexsort((random, strata[first], -np.log2(sizes).round())):
        own = strata[members[unit]]
        fold = np.lexsort((totals, (parts[:, own] * weights[own]).sum(axis=1)))[0]  # not BLAS: ties are exact
        np.add.at(parts[fold], own, 1)
        totals[fold] += len(own)
        folds[members[unit]] = fold
    return folds


def estimate(figures: Sequence[float], test_share: float) -> dict[str, float]:
    """Of the mean of J figures: mean; their std; low and high, the ends of its 95 % interval; p.

    p is two-sided: the probability of a mean as far from 0, if the true one is 0. The runs share training samples, so
    the variance of the mean is more than s^2 / J: (1 / J + test_share) s^2.
    Source: C. Nadeau and Y. Bengio, Inference for the Generalization Error, Machine Learning 52, 2003 (the corrected
    resampled t-test). figures: at least 2. test_share: test samples / training samples of a run.
    """
    mean, std, freedom = statistics.fmean(figures), statistics.stdev(figures), len(figures) - 1
    error = std * math.sqrt(1 / len(figures) + test_share)
    half = bisect.bisect(range(10**7), 0.95, key=lambda t: within(t / 1e5, freedom)) / 1e5 * error
    p = 1 - within(abs(mean) / error, freedom) if error else float(mean == 0)
    return {"mean": mean, "std": std, "low": mean - half, "high": mean + half, "p": p}


def within(t: float, freedom: int) -> float:
    """P(|T| < t) of Student's t. Source: M. Abramowitz and I. Stegun, 26.7.3 and 26.7.4. freedom: its degrees, > 0."""
    angle, is_odd = math.atan(t / math.sqrt(freedom)), freedom % 2
    term, total = math.cos(angle) ** is_odd, 0.0
    for power in range(is_odd, freedom - 1, 2):
        total += term
        term *= (power + 1) / (power + 2) * math.cos(angle) ** 2
    return (angle + math.sin(angle) * total) * 2 / math.pi if is_odd else math.sin(angle) * total


def mislabelled(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The samples whose label is probably wrong, the least probable label first.

    The threshold of a class is its mean probability over the samples that are labelled so. A label is doubted if
    another class is predicted with at least the threshold of that class. With several rows of a sample, most must doubt
    it. Source: C. Northcutt, L. Jiang and I. Chuang, Confident Learning, Journal of Artificial Intelligence Research
    70, 2021; ranked by self-confidence, so the loss must be the cross-entropy.
    rows: of RUN/eval/samples.csv, by models that have not seen the sample, with its number as `sample`; without a
    prediction if it could not be read.
    """
    of_label, of_sample = defaultdict(list), defaultdict(list)
    for row in rows:
        if row["prediction"]:
            of_sample[row["sample"]].append(row | {"confidence": math.exp(-float(row["loss"]))})
            of_label[row["label"]].append(of_sample[row["sample"]][-1]["confidence"])
    thresholds = {label: statistics.fmean(found) for label, found in of_label.items()}
    doubtful = []
    for found in of_sample.values():
        doubts = [row for row in found if row["prediction"] != row["label"]
                  and float(row["probability"]) >= thresholds.get(row["prediction"], math.inf)]
        if 2 * len(doubts) > len(found):
            kept = {name: doubts[0][name] for name in ("sample", "input", "label", "prediction")}
            doubtful.append(kept | {"confidence": statistics.fmean(row["confidence"] for row in found)})
    return sorted(doubtful, key=itemgetter("confidence"))
