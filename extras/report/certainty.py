"""How sure the figures of an evaluation are, by its samples: 95 % intervals, calibration. Every draw has one seed.

Legend: N samples.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from models.metrics.metric import NORMAL

LEVELS = (0.025, 0.975)  # of a 95 % interval
FEWEST, MOST, MOST_DRAWS = 30, 1000, 10**7  # resamples; samples drawn in all: it takes a second, seldom a few
FEWEST_OF_QUANTILES = 200  # resamples: below, there are so many samples that the figures are normal
BINS, FEWEST_IN_BIN = 15, 5  # of the calibration; a bin with fewer samples is not drawn


def num_resamples(count: int, cost: int = 1) -> int:
    """How many resamples of `count` samples an interval takes. cost: the work of a sample, 1 in a classification."""
    return min(MOST, max(FEWEST, MOST_DRAWS // (count * cost)))


def intervals(count: int, figures: Callable[[np.ndarray], Mapping[str, Any]], cost: int = 1,
              groups: np.ndarray | None = None) -> dict[str, Any]:
    """Of the bootstrap: (low, high) by name. figures: of how often each sample is drawn, [N] int64, N = `count`.

    groups: [N] integers from 0; then whole groups are drawn, since the samples of one are alike.
    """
    rng, units = np.random.default_rng(0), count if groups is None else int(groups.max()) + 1

    def drawn() -> np.ndarray:
        times = np.bincount(rng.integers(units, size=units), minlength=units)
        return times if groups is None else times[groups]

    found = [figures(drawn()) for _ in range(num_resamples(count, cost))]
    return {name: _ends(np.array([each.get(name, np.nan) for each in found]))
            for name, value in found[0].items() if isinstance(value, float) and math.isfinite(value)}


def _ends(values: np.ndarray) -> tuple[float, float]:
    if len(values) >= FEWEST_OF_QUANTILES:
        return tuple(np.nanquantile(values, LEVELS).tolist())
    middle, reach = float(np.nanmean(values)), NORMAL * float(np.nanstd(values, ddof=1))
    return middle - reach, middle + reach


def calibration(probabilities: np.ndarray, is_right: np.ndarray) -> dict[str, Any]:
    """The expected calibration error of predictions, and its bins.

    perfect: the mean error of as many predictions whose probabilities are right, which is not 0: the bins have few
    samples. probabilities: [N], of the predicted class. is_right: [N] bool.
    """
    rng, draws = np.random.default_rng(0), max(FEWEST, min(MOST, MOST_DRAWS // (10 * len(probabilities))))
    perfect = [_bins(probabilities, rng.random(len(probabilities)) < probabilities)["error"] for _ in range(draws)]
    return _bins(probabilities, is_right) | {"perfect": float(np.mean(perfect))}


def _bins(probabilities: np.ndarray, is_right: np.ndarray) -> dict[str, Any]:
    """The expected calibration error; (mean probability, accuracy) of each bin with enough samples."""
    places = (probabilities * BINS).astype(int).clip(0, BINS - 1)
    counts, sums, right = (np.bincount(places, each, BINS) for each in (None, probabilities, is_right))
    points = np.stack([sums, right], axis=1) / counts.clip(1)[:, None]                      # [BINS, 2]
    error = float(np.abs(sums - right).sum()) / len(places)
    return {"error": error, "points": points[counts >= FEWEST_IN_BIN].tolist()}
