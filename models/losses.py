"""Losses: one per sample or predicted token, never a mean. The task adds them; the loop divides by the normalizer.

Legend: B samples or predicted tokens, C classes, N training samples.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from data.splits import number, plain
from utils.errors import UserError, some
from utils.settings.run_options import LossOptions


def probabilities(loss: str | None, logits: Tensor) -> Tensor:
    """What outputs mean, [..., C] of logits [..., C]: with "bce" each stands alone; with any other loss they add to 1.
    """
    return logits.sigmoid() if loss == "bce" else logits.softmax(dim=-1)


def loss_of(description: Mapping[str, Any]) -> str | None:
    """The loss that a model's outputs are meant for, by its config.json; an encoder's says it as its problem_type."""
    return "bce" if description.get("problem_type") == "multi_label_classification" else description.get("loss")


def meaning_of(description: Mapping[str, Any], logits: Tensor) -> Tensor:
    """What outputs mean, [..., C]: probabilities in their dtype, or float64 numbers in the units of the targets.

    description: of the model, with what Objective.described() gave. logits: [..., C], of numbers in host memory.
    """
    if "target_mean" not in description:
        return probabilities(loss_of(description), logits)
    mean, std = (torch.tensor(description[name], dtype=torch.float64) for name in ("target_mean", "target_std"))
    return logits.double() * std + mean


def cross_entropies(
    logits: Tensor, labels: Tensor, config: LossOptions, is_training: bool, weights: Tensor | None = None
) -> Tensor:
    """[B] cross-entropies of logits [B, C]. labels: [B] int64; smoothed in training only. weights: [C], as torch's."""
    smoothing = config.label_smoothing if is_training else 0.0
    return F.cross_entropy(logits, labels, weights, reduction="none", label_smoothing=smoothing)


def binary_cross_entropies(
    logits: Tensor, labels: Tensor, config: LossOptions, is_training: bool, weights: Tensor | None = None
) -> Tensor:
    """[B]: the mean over the classes of the loss of each against the rest, times the weight of the true class.

    Source: timm's BinaryCrossEntropy, also for what smoothing is; used by DeiT III (Touvron et al., 2022).
    """
    smoothing = config.label_smoothing if is_training else 0.0
    low = smoothing / logits.shape[1]
    targets = torch.full_like(logits, low).scatter_(1, labels[:, None], 1 - smoothing + low)  # [B, C]
    losses = F.binary_cross_entropy_with_logits(logits, targets, reduction="none").mean(dim=1)
    return losses if weights is None else losses * weights[labels]


_PAIR = re.compile(r"(.+?)=([^,=]+)(?:,|$)")  # A=1


def class_weights(words: str, classes: tuple[str, ...], labels: np.ndarray) -> Tensor | None:
    """The value of --class-weights as [C] float32; None without weights. labels: of the training set.

    labels: [N], or [N, C] that are yes or no: then a weight is that of a yes against a no.
    A=1,B=2 in any order, or 1,2 in label order. A name may hold commas and equals signs. Raises UserError (64).
    """
    # none, balanced (the formula of scikit-learn's compute_class_weight)
    if words == "none":
        return None
    if words == "balanced" and labels.ndim == 2:
        counts = labels.sum(axis=0, dtype=np.int64)
        return torch.from_numpy((len(labels) - counts).clip(1) / counts.clip(1)).float()
    if words == "balanced":
        counts = np.bincount(labels, minlength=len(classes))
        if missing := [name for name, count in zip(classes, counts, strict=True) if not count]:
            raise UserError(f"--class-weights balanced: the training set has no sample of {some(missing)}; add some, or"
                            " give a weight for each class: --class-weights A=1,B=2,...")
        return torch.from_numpy(len(labels) / (len(classes) * counts)).float()

    # given
    rule = (f"give each of {len(classes)} classes a positive number in the order {some(classes)}, or"
            f" {classes[0]}=1,...; or balanced, or none")
    numbers = words.split(",")
    if "=" in words:
        pairs = [(plain(name), weight) for name, weight in _PAIR.findall(words)]
        names = [name for name, _ in pairs]
        wrong = {"unknown": set(names) - set(classes), "without a weight": set(classes) - set(names),
                 "twice there": {name for name in names if names.count(name) > 1},
                 "without a name or a number": {_PAIR.sub("", words)} - {""}}
        if found := "; ".join(f"{what}: {some(sorted(which))}" for what, which in wrong.items() if which):
            raise UserError(f"--class-weights {words}: {found}; {rule}")
        numbers = [dict(pairs)[name] for name in classes]
    weights = torch.tensor([number(word) for word in numbers])
    if not (weights.isfinite() & (weights > 0)).all():
        raise UserError(f"--class-weights {words}: a weight is not a positive number; {rule}")
    if len(weights) != len(classes):
        raise UserError(f"--class-weights {words}: there are {len(weights)} weights; {rule}")
    return weights


def weight_notes(words: str, classes: Sequence[str], weights: Tensor | None) -> list[str]:
    """For the user: the `weights` that --class-weights gives in `words`, by name, with all their digits."""
    if weights is None or words == "balanced":
        return []
    pairs = (f"{name}={np.format_float_positional(weight, trim='-')}"
             for name, weight in zip(classes, weights.numpy(), strict=True))
    return [f"the weights of the classes: --class-weights {shlex.quote(','.join(pairs))}"]
