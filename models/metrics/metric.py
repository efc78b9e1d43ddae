"""Metrics as sums: the same figures on any number of processes.

A metric gives a vector of sums per batch. Integer sums add in any order. Float sums are kept in a table with a row for
each batch: one rank owns a row, the others hold zeros. It is all-reduced once, and its rows are added in batch order.
A metric that needs every sample (AUROC) has a table with a row for each sample, in the order of the data set.
Legend: B samples of a batch, N of the evaluation set, C classes, S sums of a metric.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from data.batch import Batch
from models.output import Output
from utils.distributed.world import World
from utils.errors import Exit, UserError
from utils.hardware.devices import Arriving

LOWER, HIGHER = False, True  # which value of a metric is better
MAX_SCORES = 10**7  # samples x classes: above, the scores that auroc needs take too much memory and time


@dataclass(frozen=True)
class Metric:
    """Two pure functions. sums(output, batch) -> [S] float64 or int64; values(sums) -> {name: number or tensor}.

    Tensors stand in files alone (engine/records/evaluation_files.py).
    """

    sums: Callable[[Output, Batch], Tensor]
    values: Callable[[Tensor], dict[str, Any]]
    is_count: bool  # the sums are int64, which add exactly in any order
    percentages: tuple[str, ...] = ()  # names of values that are shown in percent
    # of the values that are numbers: what --best may name, and whether LOWER or HIGHER is better
    names: Mapping[str, bool] = field(default_factory=dict)
    quiet: tuple[str, ...] = ()  # names of values that the console does not show
    is_per_sample: bool = False  # sums gives rows, [B, S], and values gets the rows of all samples, [N, S]


class Totals:
    """The sums of one evaluation: of this rank's batches, and in values() of all ranks' together."""

    def __init__(self, metrics: Sequence[Metric], num_batches: int, num_in_set: int = 0):
        self._metrics, self._num_batches, self._num_in_set = metrics, num_batches, num_in_set
        self._num_samples: Tensor | int = 0  # an int before the first batch
        self._sums: list[Tensor | None] = [None] * len(metrics)

    def add(self, index: int, output: Output, batch: Batch) -> None:
        """Add batch `index`, which one rank owns; a surplus one (index >= num_batches) adds nothing."""
        self._num_samples = self._num_samples + (batch.sample_weight > 0).sum()
        for i, metric in enumerate(self._metrics):
            sums = metric.sums(output, batch)
            if self._sums[i] is None:
                shape = (self._num_in_set, *sums.shape[1:]) if metric.is_per_sample else (
                    sums.shape if metric.is_count else (self._num_batches, *sums.shape))
                self._sums[i] = torch.zeros(shape, dtype=sums.dtype, device=sums.device)
            if metric.is_per_sample:
                if batch.indices:  # consecutive ones; a surplus batch has none
                    self._sums[i][batch.indices[0]:batch.indices[-1] + 1] = sums
            elif metric.is_count:
                self._sums[i] += sums
            elif index < self._num_batches:
                self._sums[i][index] = sums

    def values(self, world: World) -> dict[str, Any]:
        """The metrics over all batches of all ranks; every rank must have added at least one batch. Collective.

        Raises UserError: 65 if no sample counts, 80 if a metric is not finite.
        """
        # sums of all ranks
        arriving = Arriving(self._num_samples, *self._sums)
        num_samples, *all_sums = map(world.all_reduce_sum, arriving.wait())  # one wait for the device
        if not num_samples:
            raise UserError("no sample of the evaluation set could be read; repair or restore its files, and start the"
                            " same command again", Exit.BAD_DATA)

        # values
        values: dict[str, Any] = {}
        for metric, sums in zip(self._metrics, all_sums, strict=True):
            is_whole = metric.is_count or metric.is_per_sample
            values |= metric.values(sums if is_whole else sum(sums))  # a table's rows, in batch order
        if wrong := [f"{name} is {value}" for name, value in values.items()
                     if isinstance(value, float) and not math.isfinite(value)]:
            raise UserError(f"in this evaluation {', '.join(wrong)}: the model diverged; continue with --precision"
                            " fp32, or start over (--fresh) with a smaller --lr or --max-grad-norm 1", Exit.DIVERGED)
        return values


NORMAL = 1.959964  # standard deviations of a 95 % interval
Losses = Callable[[Tensor, Tensor, bool], Tensor]  # logits [B, C], labels, is_training -> [B]


def output_rows(losses: Losses, output: Output, batch: Batch) -> Tensor:
    """[B, 1 + C + 1] float32 for a metric per sample: whether it counts, its outputs, its loss."""
    counts, found = batch.sample_weight > 0, losses(output.logits, batch.labels, False)
    return torch.cat([counts[:, None], output.logits, found[:, None]], dim=1).float()


def _loss_sums(output: Output, batch: Batch) -> Tensor:
    return torch.stack([output.loss_sum.double(), batch.sample_weight.double().sum()])


LOSS = Metric(_loss_sums, lambda sums: {"loss": ratio(sums[0], sums[1])}, is_count=False, names={"loss": LOWER})


def ratio(part: Tensor, whole: Tensor) -> float:
    """part / whole, or NaN if there is nothing."""
    return float(part) / float(whole) if float(whole) else float("nan")


def share_interval(share: float, count: int) -> tuple[float, float]:
    """Wilson's, of a share of `count` samples: also where all or none belong to it, and a bootstrap draws no other."""
    square = NORMAL**2 / count
    middle, reach = share + square / 2, math.sqrt(square * (share * (1 - share) + square / 4))
    return (middle - reach) / (1 + square), (middle + reach) / (1 + square)
