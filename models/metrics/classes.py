"""Metrics of classification, each sample of one class.

Legend: B samples of a batch, N of the evaluation set, C classes, S sums of a metric.
"""

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.batch import Batch
from models.losses import ClassificationLoss
from models.metrics.metric import HIGHER, LOSS, MAX_SCORES, Metric, ratio
from models.output import Output

SAMPLE_COLUMNS = ("counts", "label", "prediction", "probability", "loss")  # counts: 0 if it could not be read
_AVERAGES = ("macro_precision", "macro_recall", "weighted_precision", "weighted_recall", "weighted_f1")


def classification_metrics(num_classes: int, labels: np.ndarray, losses: ClassificationLoss) -> tuple[Metric, ...]:
    """loss; top1 and top5, shares of the samples; averages over the classes; auroc; tensors for files.

    labels: [N] integers, those of the evaluation set, in its order. losses: of the task. The last metric alone needs
    every sample (auroc, rows).

    macro_... and weighted_precision, _recall and _f1 are those of scikit-learn with zero_division=0: means over the
    classes that occur or are predicted, plain or weighted by how often a class occurs. classes: [C, 4] float64, their
    precision, recall, f1 and support; a class that neither occurs nor is predicted has zeros. never_predicted: the
    number of classes that occur and are not predicted.
    auroc: one class against the rest, by probability, exact with ties; the mean over the classes that have samples and
    are not the only one. class_auroc: [C] float64, NaN for the others. Of two classes it is that of the second.
    Left out: top5 up to five classes; auroc where samples x classes are more than MAX_SCORES, or only one class occurs.
    rows: [N, 5] float32, a row for each sample, see SAMPLE_COLUMNS.
    """

    def class_sums(output: Output, batch: Batch) -> Tensor:
        predicted = output.logits.argmax(dim=1)                                             # [B]
        counts = (batch.sample_weight > 0).long()                                           # [B]
        sums = torch.zeros(3, num_classes, dtype=torch.int64, device=counts.device)         # [3, C]
        sums[0].index_add_(0, predicted, counts * (predicted == batch.labels))  # right
        sums[1].index_add_(0, batch.labels, counts)                             # true
        sums[2].index_add_(0, predicted, counts)                                # predicted
        return sums

    def top5_sums(output: Output, batch: Batch) -> Tensor:
        hit = (output.logits.topk(5, dim=1).indices == batch.labels[:, None]).any(dim=1)    # [B]
        counts = batch.sample_weight > 0
        return torch.stack([(hit & counts).sum(), counts.sum()])

    metrics = [
        LOSS,
        Metric(class_sums, class_values, is_count=True, percentages=("top1",),
               names=dict.fromkeys(("top1", "macro_f1", *_AVERAGES), HIGHER),
               quiet=(*_AVERAGES, "never_predicted")),
    ]
    if num_classes > 5:
        metrics.append(Metric(top5_sums, lambda sums: {"top5": ratio(sums[0], sums[1])}, is_count=True,
                              percentages=("top5",), names={"top5": HIGHER}))
    has_auroc = len(labels) * num_classes <= MAX_SCORES and labels.min() < labels.max()
    rows, values = partial(_sample_rows, losses, has_auroc), partial(_sample_values, losses)
    names = {"auroc": HIGHER} if has_auroc else {}
    return (*metrics, Metric(rows, values, is_count=False, names=names, is_per_sample=True))


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


def _sample_rows(losses: ClassificationLoss, has_scores: bool, output: Output, batch: Batch) -> Tensor:
    """[B, 5] float32, or [B, 5 + C] with the logits."""
    logits, predicted = output.logits.float(), output.logits.argmax(dim=1)                  # [B, C], [B]
    probability = losses.probabilities(logits).gather(1, predicted[:, None])[:, 0]          # [B]
    rows = torch.stack([(batch.sample_weight > 0).float(), batch.labels.float(), predicted.float(), probability,
                        losses(logits, batch.labels, False)], dim=1)                        # [B, 5]
    return torch.cat([rows, logits], dim=1) if has_scores else rows


def _sample_values(losses: ClassificationLoss, rows: Tensor) -> dict[str, Any]:
    samples, logits = rows.split([len(SAMPLE_COLUMNS), rows.shape[1] - len(SAMPLE_COLUMNS)], dim=1)
    values: dict[str, Any] = {"rows": samples}
    if logits.shape[1]:
        counts = samples[:, 0] > 0
        aurocs = auroc_by_class(losses.probabilities(logits[counts].double()), samples[counts, 1].long())
        is_known = ~aurocs.isnan()
        values |= {"class_auroc": aurocs} | ({"auroc": float(aurocs[is_known].mean())} if is_known.any() else {})
    return values


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
