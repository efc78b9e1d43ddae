"""Metrics as sums: the same figures on any number of processes.

A metric gives a vector of sums per batch. Integer sums add in any order. Float sums are kept in a table with a row for
each batch: one rank owns a row, the others hold zeros. It is all-reduced once, and its rows are added in batch order.
Legend: B samples, C classes, S sums of a metric.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from data.batch import Batch
from models.tasks.base import Output
from utils.distributed.world import World
from utils.errors import Exit, UserError
from utils.hardware.devices import Arriving

MAX_CONFUSION = 1000  # classes: above, a confusion matrix is too large to keep and to read


@dataclass(frozen=True)
class Metric:
    """Two pure functions. sums(output, batch) -> [S] float64 or int64; values(sums) -> {name: number}."""

    sums: Callable[[Output, Batch], Tensor]
    values: Callable[[Tensor], dict[str, float]]
    is_count: bool  # the sums are int64, which add exactly in any order
    percentages: tuple[str, ...] = ()  # names of values that are shown in percent


class Totals:
    """The sums of one evaluation: of this rank's batches, and in values() of all ranks' together."""

    def __init__(self, metrics: Sequence[Metric], num_batches: int):
        self._metrics, self._num_batches = metrics, num_batches
        self._num_samples: Tensor | None = None
        self._sums: list[Tensor | None] = [None] * len(metrics)

    def add(self, index: int, output: Output, batch: Batch) -> None:
        """Add batch `index`, which one rank owns; a surplus one (index >= num_batches) adds nothing."""
        num_samples = (batch.sample_weight > 0).sum()
        self._num_samples = num_samples if self._num_samples is None else self._num_samples + num_samples
        for i, metric in enumerate(self._metrics):
            sums = metric.sums(output, batch)
            if self._sums[i] is None:
                rows = () if metric.is_count else (self._num_batches,)
                self._sums[i] = torch.zeros(*rows, *sums.shape, dtype=sums.dtype, device=sums.device)
            if metric.is_count:
                self._sums[i] += sums
            elif index < self._num_batches:
                self._sums[i][index] = sums

    def values(self, world: World) -> dict[str, Any]:
        """The metrics over all batches of all ranks; every rank must have added at least one batch. Collective.

        Raises UserError: 65 if no sample counts, 80 if a metric is NaN.
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
            values |= metric.values(sums if metric.is_count else sum(sums))  # a table's rows, in batch order
        if wrong := [name for name, value in values.items() if isinstance(value, float) and math.isnan(value)]:
            raise UserError(f"{', '.join(wrong)} of the evaluation is NaN: the model diverged; continue with"
                            " --precision fp32, or start over (--fresh) with a smaller --lr or --max-grad-norm 1",
                            Exit.DIVERGED)
        return values


def classification_metrics(num_classes: int) -> tuple[Metric, ...]:
    """loss; top1, macro_f1; above five classes top5 (shares of the samples); up to MAX_CONFUSION confusion.

    confusion: [C, C] int64, a row per true class.
    """

    def loss_sums(output: Output, batch: Batch) -> Tensor:
        return torch.stack([output.loss_sum.double(), batch.sample_weight.double().sum()])

    def class_sums(output: Output, batch: Batch) -> Tensor:
        predicted = output.logits.argmax(dim=1)                                             # [B]
        counts = (batch.sample_weight > 0).long()                                           # [B]
        sums = torch.zeros(3, num_classes, dtype=torch.int64, device=counts.device)         # [3, C]
        sums[0].index_add_(0, predicted, counts * (predicted == batch.labels))  # right
        sums[1].index_add_(0, batch.labels, counts)                             # true
        sums[2].index_add_(0, predicted, counts)                                # predicted
        return sums

    def confusion_sums(output: Output, batch: Batch) -> Tensor:
        cells = batch.labels * num_classes + output.logits.argmax(dim=1)                    # [B]
        sums = torch.zeros(num_classes * num_classes, dtype=torch.int64, device=cells.device)
        return sums.index_add_(0, cells, (batch.sample_weight > 0).long())

    def top5_sums(output: Output, batch: Batch) -> Tensor:
        hit = (output.logits.topk(5, dim=1).indices == batch.labels[:, None]).any(dim=1)    # [B]
        counts = batch.sample_weight > 0
        return torch.stack([(hit & counts).sum(), counts.sum()])

    metrics = [
        Metric(loss_sums, lambda sums: {"loss": _ratio(sums[0], sums[1])}, is_count=False),
        Metric(class_sums, _class_values, is_count=True, percentages=("top1",)),
    ]
    if num_classes > 5:
        metrics.append(Metric(top5_sums, lambda sums: {"top5": _ratio(sums[0], sums[1])}, is_count=True,
                              percentages=("top5",)))
    if num_classes <= MAX_CONFUSION:
        metrics.append(Metric(
            confusion_sums, lambda sums: {"confusion": sums.view(num_classes, num_classes)}, is_count=True))
    return tuple(metrics)


def _class_values(sums: Tensor) -> dict[str, float]:
    right, true, predicted = sums.double()
    seen = (true + predicted) > 0  # F1 is defined for classes that occur or are predicted
    f1 = 2 * right[seen] / (true + predicted)[seen]
    return {"top1": _ratio(right.sum(), true.sum()), "macro_f1": _ratio(f1.sum(), seen.sum())}


def _ratio(part: Tensor, whole: Tensor) -> float:
    return float(part) / float(whole) if float(whole) else float("nan")
