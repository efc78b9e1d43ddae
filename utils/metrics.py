"""Metrics as sums: digits that do not depend on how many processes computed them.

A metric gives a vector of sums per batch. Integer sums add in any order; float sums are kept as one row per batch in a
table that has one owner per row, is all-reduced once (every other rank holds zeros) and is added in batch order.
Legend: B samples, C classes, S sums of a metric.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from utils.distributed import World


@dataclass(frozen=True)
class Metric:
    """Two pure functions. sums(output, batch) -> [S] float64 or int64; values(sums) -> {name: number}."""

    sums: Callable[[Any, Any], Tensor]
    values: Callable[[Tensor], dict[str, float]]
    is_count: bool  # the sums are int64: they add exactly, in any order


class Totals:
    """The sums of one evaluation, first of this rank's batches, then of all."""

    def __init__(self, metrics: Sequence[Metric], num_batches: int):
        self._metrics, self._num_batches = metrics, num_batches
        self._sums: list[Tensor | None] = [None] * len(metrics)

    def add(self, number: int, output: Any, batch: Any) -> None:
        """Count batch `number`, each on one rank only; a surplus one (number >= num_batches) has weight 0 and adds nothing."""
        for i, metric in enumerate(self._metrics):
            sums = metric.sums(output, batch)
            if self._sums[i] is None:
                rows = () if metric.is_count else (self._num_batches,)
                self._sums[i] = torch.zeros(*rows, *sums.shape, dtype=sums.dtype, device=sums.device)
            if metric.is_count:
                self._sums[i] += sums
            elif number < self._num_batches:
                self._sums[i][number] = sums

    def values(self, world: World) -> dict[str, Any]:
        """The metrics over all batches of all ranks; every rank must have added at least one batch. Collective."""
        values: dict[str, Any] = {}
        for metric, sums in zip(self._metrics, self._sums, strict=True):
            world.all_reduce_sum(sums)
            values |= metric.values((sums if metric.is_count else _added_in_order(sums)).cpu())
        return values


def _added_in_order(table: Tensor) -> Tensor:
    total = torch.zeros_like(table[0], device="cpu")
    for row in table.cpu():
        total += row
    return total


def classification_metrics(num_classes: int) -> tuple[Metric, ...]:
    """loss; top1 and, above five classes, top5 (fractions of the samples); macro_f1; confusion ([C, C] int64, a row per true class)."""

    def loss_sums(output: Any, batch: Any) -> Tensor:
        return torch.stack([output.loss_sum.double(), batch.weight.double().sum()])

    def confusion_sums(output: Any, batch: Any) -> Tensor:
        cells = batch.labels * num_classes + output.logits.argmax(dim=1)  # [B]
        return torch.bincount(cells[batch.weight > 0], minlength=num_classes * num_classes)

    def top5_sums(output: Any, batch: Any) -> Tensor:
        hit = (output.logits.topk(5, dim=1).indices == batch.labels[:, None]).any(dim=1)
        counts = batch.weight > 0
        return torch.stack([(hit & counts).sum(), counts.sum()])

    metrics = [
        Metric(loss_sums, lambda sums: {"loss": _ratio(sums[0], sums[1])}, is_count=False),
        Metric(confusion_sums, lambda sums: _confusion_values(sums.view(num_classes, num_classes)), is_count=True),
    ]
    if num_classes > 5:
        metrics.append(Metric(top5_sums, lambda sums: {"top5": _ratio(sums[0], sums[1])}, is_count=True))
    return tuple(metrics)


def _confusion_values(confusion: Tensor) -> dict[str, Any]:
    right, true, predicted = confusion.diag().double(), confusion.sum(1).double(), confusion.sum(0).double()
    seen = (true + predicted) > 0  # a class that neither occurs nor is predicted has no F1
    f1 = 2 * right[seen] / (true + predicted)[seen]
    return {"top1": _ratio(right.sum(), true.sum()), "macro_f1": _ratio(f1.sum(), seen.sum()), "confusion": confusion}


def _ratio(part: Tensor, whole: Tensor) -> float:
    return float(part) / float(whole) if float(whole) else float("nan")
