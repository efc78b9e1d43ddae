"""Metrics of multi-label classification: each label is yes or no, yes from a probability of 0.5 on.

Legend: B samples of a batch, N of the evaluation set, C labels.

Tests: tests/unit/models/test_objectives.py
"""

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.batch import Batch
from models.metrics.classes import by_class
from models.metrics.metric import HIGHER, LOSS, MAX_SCORES, Losses, Metric, output_rows
from models.output import Output

LABEL_COLUMNS = ("precision", "recall", "f1", "support", "average_precision")


def multi_label_metrics(labels: np.ndarray, losses: Losses) -> tuple[Metric, ...]:
    """loss; micro_f1, macro_f1; map, the mean average precision; tensors for files.

    labels: [N, C] of the evaluation set, in its order. losses: see output_rows. As scikit-learn with zero_division=0:
    macro_f1 is the mean over all labels, map over those that a sample has. classes: [C, 4] float64, the first of
    LABEL_COLUMNS; class_average_precision: [C] float64, the last; rows: see output_rows. These two and map are left out
    where samples x labels are more than MAX_SCORES.
    """
    sums = Metric(_label_sums, label_values, is_count=True, names=dict.fromkeys(("micro_f1", "macro_f1"), HIGHER))
    if labels.size > MAX_SCORES:
        return LOSS, sums
    values = partial(_sample_values, labels=labels)
    names = {"map": HIGHER} if labels.any() else {}
    return LOSS, sums, Metric(partial(output_rows, losses), values, is_count=False, names=names, is_per_sample=True)


def average_precisions(scores: Tensor, labels: Tensor) -> Tensor:
    """[C] float64: the mean of the precision at each sample that has the label, in order of score; equal scores as one.

    scores: [N, C]. labels: [N, C], 1 or 0. NaN for a label that no sample has.
    """
    found = torch.full([scores.shape[1]], torch.nan, dtype=torch.float64)
    for index in torch.nonzero(labels.any(dim=0))[:, 0].tolist():
        order = scores[:, index].argsort(descending=True, stable=True)
        score, hit = scores[order, index], labels[order, index].double()                    # [N] each
        is_last = torch.cat([score[1:] != score[:-1], torch.ones(1, dtype=torch.bool)])  # of equal scores
        hits = hit.cumsum(0)[is_last]
        precision = hits / (torch.nonzero(is_last)[:, 0] + 1)
        found[index] = (precision * hits.diff(prepend=hits.new_zeros(1))).sum() / hit.sum()
    return found


def _label_sums(output: Output, batch: Batch) -> Tensor:
    counts = (batch.sample_weight > 0)[:, None]                                             # [B, 1]
    predicted, true = (output.logits >= 0) & counts, (batch.labels > 0) & counts            # [B, C]
    return torch.stack([(predicted & true).sum(0), true.sum(0), predicted.sum(0)])          # [3, C]


def label_values(sums: Tensor) -> dict[str, Any]:
    """The values of sums [3, C]: how often each label was right, true, predicted. See multi_label_metrics."""
    right, true, predicted = sums.double()                                                  # [C] each
    figures, whole = by_class(right, true, predicted), [each.sum()[None] for each in (right, true, predicted)]
    return {"micro_f1": float(by_class(*whole)["f1"]), "macro_f1": float(figures["f1"].mean()),
            "classes": torch.stack([*figures.values(), true], dim=1)}


def _sample_values(rows: Tensor, labels: np.ndarray) -> dict[str, Any]:
    counts = rows[:, 0] > 0
    found = average_precisions(rows[counts, 1:-1], torch.from_numpy(np.array(labels))[counts])
    known = found[~found.isnan()]
    return {"rows": rows, "class_average_precision": found} | ({"map": float(known.mean())} if len(known) else {})
