"""Metrics of regression, in the units of the targets.

Legend: B samples of a batch, N of the evaluation set, T targets.

Tests: tests/unit/models/test_objectives.py
"""

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from models.metrics.metric import HIGHER, LOSS, LOWER, Losses, Metric, output_rows

TARGET_COLUMNS = ("mae", "rmse", "r2", "pearson", "spearman")


def regression_metrics(
    targets: np.ndarray, mean: np.ndarray, std: np.ndarray, losses: Losses
) -> tuple[Metric, ...]:
    """loss; mae, rmse, r2, pearson and spearman, means over the targets; tensors for files.

    targets: [N, T] float64 of the evaluation set, in its order. mean, std: [T] float64; a model predicts
    (target - mean) / std. losses, and rows of the values: see output_rows. targets of the values: [T, 5] float64, see
    TARGET_COLUMNS. r2 and the correlations are left out where a target is the same in all samples.
    """
    values = partial(_sample_values, targets=targets, mean=mean, std=std)
    names = {"mae": LOWER, "rmse": LOWER}
    if np.ptp(targets, axis=0).all():
        names |= {"r2": HIGHER, "pearson": HIGHER, "spearman": HIGHER}
    return LOSS, Metric(partial(output_rows, losses), values, is_count=False, names=names, is_per_sample=True)


def figures_of(targets: np.ndarray, predictions: np.ndarray) -> np.ndarray:
    """[T, 5] float64, see TARGET_COLUMNS. Both: [N, T] float64. NaN where a target is the same in all samples.

    The correlations of predictions that are all equal are 0. r2 as scikit-learn's, spearman with mean ranks of ties.
    """
    errors = predictions - targets
    centred = targets - targets.mean(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        r2 = 1 - (errors**2).sum(axis=0) / (centred**2).sum(axis=0)
    r2 = np.where(np.ptp(targets, axis=0) == 0, np.nan, r2)
    columns = list(zip(targets.T, predictions.T, strict=True))
    return np.stack([np.abs(errors).mean(axis=0), np.sqrt((errors**2).mean(axis=0)), r2,
                     [_correlation(*column) for column in columns],
                     [_correlation(*map(_ranks, column)) for column in columns]], axis=1)


def _correlation(target: np.ndarray, prediction: np.ndarray) -> float:
    """Pearson's, of [N] float64 each."""
    if np.ptp(target) == 0:
        return np.nan
    if np.ptp(prediction) == 0:
        return 0.0
    x, y = target - target.mean(), prediction - prediction.mean()
    return float((x / np.linalg.norm(x)) @ (y / np.linalg.norm(y)))


def _ranks(values: np.ndarray) -> np.ndarray:
    """[N] float64: 1 for the smallest; equal values share the mean of their ranks."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[place]


def _sample_values(rows: Tensor, targets: np.ndarray, mean: np.ndarray, std: np.ndarray) -> dict[str, Any]:
    counts = (rows[:, 0] > 0).numpy()
    figures = figures_of(np.asarray(targets)[counts], rows[counts, 1:-1].double().numpy() * std + mean)
    means = {name: float(column.mean()) for name, column in zip(TARGET_COLUMNS, figures.T, strict=True)}
    is_diverged = not np.isfinite(figures[:, :2]).all()
    return {name: value for name, value in means.items() if is_diverged or np.isfinite(value)} | {
        "targets": torch.from_numpy(figures), "rows": rows}
