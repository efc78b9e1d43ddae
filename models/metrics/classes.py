"""Metrics of classification, each sample of one class.

Legend: B samples of a batch, N of the evaluation set, C classes, S sums of a metric.
"""

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.batch import Batch
from models.losses import probabilities
from models.metrics.metric import HIGHER, LOSS, MAX_SCORES, Losses, Metric, ratio
from models.output import Output

# counts: 0 if it could not be read; top5: whether the label is among the five most probable classes
SAMPLE_COLUMNS = ("counts", "label", "prediction", "top5", "probability", "loss")
_AVERAGES = ("macro_precision", "macro_recall", "weighted_precision", "weighted_recall", "weighted_f1")


def classification_metrics(num_classes: int, labels: np.ndarray, losses: Losses, loss: str) -> tuple[Metric, ...]:
    """loss; all else needs a row for each sample: top1 and top5, averages over the classes, auroc, tensors for files.

    labels: [N] integers, those of the evaluation set, in its order. losses: of the task. loss: see probabilities.

    top1, top5: shares of the samples.
    macro_... and weighted_precision, _recall and _f1 are those of scikit-learn with zero_division=0: means over the
    classes that occur or are predicted, plain or weighted by how often a class occurs. classes: [C, 4] float64, their
    precision, recall, f1 and support; a class that neither occurs nor is predicted has zeros. never_predicted: the
    number of classes that occur and are not predicted.
    auroc: one class against the rest, by probability, exact with ties; the mean over the classes that have samples and
    are not the only one. class_auroc: [C] float64, NaN for the others. Of two classes it is that of the second.
    Left out: top5 up to five classes; auroc where samples x classes are more than MAX_SCORES, or only one class occurs.
    rows: [N, 6] float32, a row for each sample, see SAMPLE_COLUMNS.
    """
    has_auroc = len(labels) * num_classes <= MAX_SCORES and labels.min() < labels.max()
    names = ["top1", "macro_f1", *_AVERAGES] + ["top5"] * (num_classes > 5) + ["auroc"] * int(has_auroc)
    return LOSS, Metric(
        partial(_sample_rows, losses, loss, has_auroc), partial(_sample_values, num_classes, loss), is_count=False,
        percentages=("top1", "top5"), names=dict.fromkeys(names, HIGHER), quiet=(*_AVERAGES, "never_predicted"),
        is_per_sample=True)


def by_class(right: Tensor, true: Tensor, predicted: Tensor) -> dict[str, Tensor]:
    """Precision, recall and F1 of each class, [C] float64; 0 for 0 / 0. The arguments: [C] float64 counts."""
    return {"precision": right / predicted.clamp(min=1), "recall": right / true.clamp(min=1),
            "f1": 2 * right / (true + predicted).clamp(min=1)}


def class_values(sums: Tensor) -> dict[str, Any]:
    """The values of sums [3, C]: how often each class was right, true, predicted. See classification_metrics."""
    right, true, predicted = sums.double()                                                  # [C] each
    seen, share, figures = (true + predicted) > 0, true / true.sum(), by_class(right, true, predicted)
    macro = {name: ratio(each[seen].sum(), seen.sum()) for name, each in figures.items()}
    values = {"top1": ratio(right.sum(), true.sum()), "macro_f1": macro["f1"]}
    for name, each in figures.items():
        values |= {f"macro_{name}": macro[name], f"weighted_{name}": float((each * share).sum())}
    values["never_predicted"] = int(((predicted == 0) & (true > 0)).sum())
    return values | {"classes": torch.stack([*figures.values(), true], dim=1)}


def _sample_rows(losses: Losses, loss: str, has_auroc: bool, output: Output, batch: Batch) -> Tensor:
    """[B, 6] float32, see SAMPLE_COLUMNS; or [B, 6 + C] with the logits."""
    logits, predicted = output.logits.float(), output.logits.argmax(dim=1)                  # [B, C], [B]
    highest = output.logits.topk(min(5, logits.shape[1]), dim=1).indices                    # [B, 5]
    probability = probabilities(loss, logits).gather(1, predicted[:, None])[:, 0]           # [B]
    rows = torch.stack([batch.sample_weight > 0, batch.labels, predicted, (highest == batch.labels[:, None]).any(dim=1),
                        probability, losses(logits, batch.labels, False)], dim=1)           # [B, 6]
    return torch.cat([rows, logits], dim=1) if has_auroc else rows


def _sample_values(num_classes: int, loss: str, rows: Tensor) -> dict[str, Any]:
    """See classification_metrics. rows: [N, 6] or [N, 6 + C], of _sample_rows."""
    counted, num_columns = rows[rows[:, 0] > 0], len(SAMPLE_COLUMNS)
    label, predicted, top5 = counted[:, 1:4].long().T                                       # [N] each
    values = class_values(torch.stack([
        each.bincount(minlength=num_classes) for each in (label[label == predicted], label, predicted)]))
    if num_classes > 5:
        values["top5"] = ratio(top5.sum(), len(top5))
    if rows.shape[1] > num_columns:
        aurocs = auroc_by_class(probabilities(loss, counted[:, num_columns:].double()), label)
        is_known = ~aurocs.isnan()
        values |= {"class_auroc": aurocs} | ({"auroc": float(aurocs[is_known].mean())} if is_known.any() else {})
    return values | {"rows": rows[:, :num_columns]}


def auroc_by_class(probabilities: Tensor, labels: Tensor) -> Tensor:
    """[C] float64: the chance that a sample of the class has a higher probability of it than one of another class.

    A tie counts half. probabilities: [N, C]. labels: [N] int64. NaN for a class without such samples, or without
    others.
    """
    num_classes = probabilities.shape[1]
    aurocs = torch.full([num_classes], torch.nan, dtype=torch.float64)
    for index in labels.unique().tolist():
        of = index if num_classes > 2 else 1
        scores, is_positive = probabilities[:, of], labels == of
        positive, negative = scores[is_positive].contiguous(), scores[~is_positive].sort().values
        if len(positive) and len(negative):
            wins = torch.searchsorted(negative, positive) + torch.searchsorted(negative, positive, right=True)  # twice
            aurocs[index] = int(wins.sum()) / (2 * len(positive) * len(negative))
    return aurocs
