"""What a model learns to say of a sample, whatever the sample is: one class, several labels, or numbers.

    objective = build_objective(config, names, train_labels, eval_labels)

Legend: B samples in a batch, N of a data set, C outputs: classes, labels or targets.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from data.labels import CLASSES, LABELS, NUMBERS, SEPARATOR, lacking, outputs_for
from models.losses import binary_cross_entropies, class_weights, cross_entropies, loss_of, meaning_of, weight_notes
from models.metrics.classes import classification_metrics
from models.metrics.labels import LABEL_COLUMNS, multi_label_metrics
from models.metrics.metric import Metric
from models.metrics.targets import TARGET_COLUMNS, regression_metrics
from utils.errors import Exit, UserError, some
from utils.settings.run_options import ClassLossOptions, LabelOptions, TargetLossOptions, TargetOptions


class Objective(Protocol):
    """Labels as the loss takes them, loss, metrics, and what stands in files about a sample."""

    names: tuple[str, ...]  # of the model's outputs
    metrics: tuple[Metric, ...]
    best: str
    figures: str  # the metric that is a table with a row for each name: "classes" or "targets" ...
    columns: tuple[str, ...]  # ... and what its columns are; the last one may be missing
    given: tuple[str, ...]  # what sample() takes from the data alone
    notes: tuple[str, ...] = ()  # for the user, a line each
    weights: Tensor | None = None  # [C], of the classes or labels in training

    def weights_at(self, logits: Tensor) -> Tensor | None:
        """`weights` where the logits are, from the first call on: the host would wait for each copy."""
        self.weights = None if self.weights is None else self.weights.to(logits)
        return self.weights

    def encode(self, labels: Sequence[Any]) -> Tensor:
        """The labels of B samples, as in the index of the data."""

    def normalizer(self, indices: Tensor) -> float:
        """Of a global batch: the number of its samples, where these have no weights. indices: [N] int64, of train."""
        return float(len(indices))

    def losses(self, logits: Tensor, labels: Tensor, is_training: bool) -> Tensor:
        """[B] of logits [B, C] and encoded labels."""

    def label_words(self, label: Tensor) -> str:
        """An encoded label, as it stands in the data: scalar int64, or [C] float32."""

    def described(self) -> dict[str, Any]:
        """For config.json of RUN/model: what answer() needs."""

    def baselines(self) -> dict[str, float]:
        """What trivial methods reach on the evaluation set, in the unit of `best`."""

    def sample(self, index: int, row: Sequence[float]) -> dict[str, str]:
        """What RUN/eval/samples.csv says of sample `index` of the evaluation set. row: its row of the metrics."""


def kind_of(labels: LabelOptions | TargetOptions) -> str:
    """The kind of labels, see data.labels."""
    return NUMBERS if isinstance(labels, TargetOptions) else LABELS if labels.multi_label else CLASSES


def label_columns_of(labels: LabelOptions | TargetOptions) -> tuple[str, ...]:
    """--label-column, which may name several targets."""
    if isinstance(labels, LabelOptions):
        return (labels.label_column,)
    names = tuple(name.strip() for name in labels.label_column.split(","))
    if len(set(names)) < len(names) or "" in names:
        raise UserError(f"--label-column {labels.label_column}: give each column once, with commas between them")
    if taken := {"input", "loss", *(f"{name}_prediction" for name in names)} & set(names):
        raise UserError(f"--label-column {labels.label_column}: RUN/eval/samples.csv has a column {some(taken)} of its"
                        " own; rename the column of the table")
    return names


def build_objective(
    config: Any, names: tuple[str, ...], train: np.ndarray, evaluated: np.ndarray,
    model: Mapping[str, Any] | None = None, left_out: Collection[int] = ()
) -> Objective:
    """What the config of a task with labels asks for.

    train, evaluated: the labels of both sets, see LabelReader.encoded. model: the description (config.json) of a model
    that is evaluated as it is. left_out: indices of train, of which nothing is learnt. Raises UserError: 64 for
    settings that do not fit, 65 for a model of another kind, and targets that cannot be learnt.
    """
    kind, learnt_from = kind_of(config.labels), np.delete(train, sorted(left_out), axis=0) if left_out else train
    if model is not None and (found := _kind_of_model(model)) not in (kind, ""):
        raise UserError(f"--eval-only: --model {config.model.model} predicts {_WORDS[found]}, and this command asks for"
                        f" {_WORDS[kind]}; give the --task and --multi-label that it was trained with", Exit.BAD_DATA)
    if kind == NUMBERS:
        return Numbers(config.loss, names, learnt_from, evaluated, model)
    loss = config.loss
    if model is not None and loss.loss == "auto" and loss_of(model) == "bce":
        loss = replace(loss, loss="bce")
    objective = (Classes(loss, names, train, evaluated, left_out) if kind == CLASSES else
                 Labels(loss, names, learnt_from, evaluated))
    objective.notes = (*lacking(names, evaluated, config.run.split),
                       *weight_notes(loss.class_weights, names, objective.weights))
    return objective


DESCRIBED = ("multi_label", "target_mean", "target_std")  # what described() may give, besides the loss
_WORDS = {CLASSES: "one class of each sample", LABELS: "several labels of each sample", NUMBERS: "numbers"}


def _kind_of_model(description: Mapping[str, Any]) -> str:
    """The kind of labels of a model folder; "" where it does not say it."""
    if "target_mean" in description or description.get("problem_type") == "regression":
        return NUMBERS
    if description.get("multi_label"):
        return LABELS
    return CLASSES if str(description.get("task")).endswith("-classification") else ""


class Classes(Objective):
    """One class of each sample. A loss is linear in its target: that of a mixed label is the labels' losses, mixed."""

    best, figures, given = "top1", "classes", ("label",)
    columns = ("precision", "recall", "f1", "support", "auroc")

    def __init__(self, config: ClassLossOptions, names: tuple[str, ...], train: np.ndarray, evaluated: np.ndarray,
                 left_out: Collection[int] = ()):
        self.names, self._config, self._train, self._left_out = names, config, train, sorted(left_out)
        learnt_from = np.delete(train, self._left_out) if left_out else train
        self.class_counts, self.eval_counts = (
            np.bincount(labels, minlength=len(names)) for labels in (learnt_from, evaluated))  # [C] each
        self.weights = class_weights(config.class_weights, names, learnt_from)  # [C] float32, or None
        self._wide_weights = None if self.weights is None else self.weights.double().numpy()
        self.metrics = classification_metrics(len(names), evaluated, self.losses, config.loss)

    def normalizer(self, indices: Tensor) -> float:
        """The number of samples, or the sum of their class weights; a skipped bad one counts, too, a left out one 1."""
        if self._wide_weights is None:
            return super().normalizer(indices)
        weights = self._wide_weights[self._train[indices.numpy()]]
        weights[np.isin(indices.numpy(), self._left_out)] = 1
        return float(torch.from_numpy(weights).sum())

    def losses(self, logits: Tensor, labels: Tensor, is_training: bool) -> Tensor:
        """In the dtype of logits, each times the weight of its class; smoothed and weighted in training alone."""
        loss = binary_cross_entropies if self._config.loss == "bce" else cross_entropies
        return loss(logits, labels, self._config, is_training, self.weights_at(logits) if is_training else None)

    def encode(self, labels: Sequence[int]) -> Tensor:
        """[B] int64."""
        return torch.tensor(labels)

    def label_words(self, label: Tensor) -> str:
        """The name of the class."""
        return self.names[int(label)]

    def described(self) -> dict[str, Any]:
        """See Objective."""
        return {"loss": "bce" if self._config.loss == "bce" else "cross-entropy"}

    def baselines(self) -> dict[str, float]:
        """Always the most frequent class of train."""
        share = self.eval_counts[self.class_counts.argmax()] / self.eval_counts.sum()
        return {"always the most frequent class": float(share)}

    def sample(self, index: int, row: Sequence[float]) -> dict[str, str]:
        """The row is that of models.metrics.classes.SAMPLE_COLUMNS."""
        _, label, predicted, _, probability, loss = row
        return {"label": self.names[int(label)], "prediction": self.names[int(predicted)],
                "probability": f"{probability:.6f}", "loss": f"{loss:.6f}"}


class Labels(Objective):
    """Any number of labels of each sample, each yes or no."""

    figures, columns, given = "classes", LABEL_COLUMNS, ("label",)

    def __init__(self, config: ClassLossOptions, names: tuple[str, ...], train: np.ndarray, evaluated: np.ndarray):
        if config.loss == "cross-entropy":
            raise UserError("--loss cross-entropy is for one class of each sample; with --multi-label use --loss bce")
        self.names, self._config, self._evaluated = names, config, evaluated
        self.weights = class_weights(config.class_weights, names, train)  # [C], or None
        self.metrics = multi_label_metrics(evaluated, self.losses)
        self.best = "map" if "map" in self.metrics[-1].names else "micro_f1"

    def encode(self, labels: Sequence[np.ndarray]) -> Tensor:
        """[B, C] float32, 1 where a sample has the label."""
        return torch.from_numpy(np.stack(labels)).float()

    def label_words(self, label: Tensor) -> str:
        """The names of the labels."""
        return SEPARATOR.join(name for name, has in zip(self.names, label.tolist(), strict=True) if has)

    def losses(self, logits: Tensor, labels: Tensor, is_training: bool) -> Tensor:
        """Binary cross-entropy, the mean over the labels; smoothed towards 1/2 and weighted in training alone."""
        if is_training:
            smoothing = self._config.label_smoothing
            labels = labels * (1 - smoothing) + smoothing / 2
        weights = self.weights_at(logits) if is_training else None
        return F.binary_cross_entropy_with_logits(
            logits, labels.to(logits), pos_weight=weights, reduction="none").mean(dim=1)

    def described(self) -> dict[str, Any]:
        """See Objective."""
        return {"loss": "bce", "multi_label": True}

    def baselines(self) -> dict[str, float]:
        """The mean average precision of a random order, where that is the metric."""
        shares = self._evaluated.mean(axis=0)
        return {"a random order": float(shares[shares > 0].mean())} if self.best == "map" and shares.any() else {}

    def sample(self, index: int, row: Sequence[float]) -> dict[str, str]:
        """Its labels and those predicted, with their probabilities in the same order."""
        _, *logits, loss = row
        probabilities = torch.tensor(logits, dtype=torch.float64).sigmoid().tolist()
        has = [name for name, is_there in zip(self.names, self._evaluated[index], strict=True) if is_there]
        said, by_name = answer(self.described(), self.names, probabilities)
        probability = SEPARATOR.join(by_name[name] for name in said["prediction"].split(SEPARATOR) if name)
        return {"label": SEPARATOR.join(has), **said, "probability": probability, "loss": f"{loss:.6f}"}


class Numbers(Objective):
    """One or several numbers of each sample; the model predicts them less the mean of train, in standard deviations."""

    best, figures, columns = "loss", "targets", TARGET_COLUMNS
    _LOSSES: ClassVar = {"l1": F.l1_loss, "l2": F.mse_loss, "huber": F.huber_loss}

    def __init__(self, config: TargetLossOptions, names: tuple[str, ...], train: np.ndarray, evaluated: np.ndarray,
                 model: Mapping[str, Any] | None = None):
        """model: see build_objective; one that does not say what its outputs mean gives the targets as they are."""
        self.names = self.given = names
        self._evaluated, self._loss = evaluated, self._LOSSES[config.loss]
        with np.errstate(over="ignore", invalid="ignore"):
            self._mean, self._std = train.mean(axis=0), train.std(axis=0)                   # [T] float64 each
        if model is not None:
            known = model.get("classes") or [name for _, name in sorted((model.get("id2label") or {}).items())]
            outputs = outputs_for(known, names) or range(len(names))
            self._mean, self._std = (np.array([model.get(key, [usual] * len(names))[index] for index in outputs])
                                     for key, usual in (("target_mean", 0.0), ("target_std", 1.0)))
        elif constant := [name for name, column in zip(names, train.T, strict=True) if np.ptp(column) == 0]:
            raise UserError(f"--label-column: {some(constant)} is the same number in all training samples, so there is"
                            " nothing to learn; leave it out", Exit.BAD_DATA)
        elif not np.isfinite(self._std).all():
            raise UserError(f"--label-column {','.join(names)}: the numbers are too large for a standard deviation;"
                            " divide them, or take their logarithm", Exit.BAD_DATA)
        self.metrics = regression_metrics(evaluated, self._mean, self._std, self.losses)

    def encode(self, labels: Sequence[np.ndarray]) -> Tensor:
        """[B, T] float32, as the model predicts them."""
        return torch.from_numpy((np.stack(labels) - self._mean) / self._std).float()

    def label_words(self, label: Tensor) -> str:
        """The targets in their units, to the digits of a float32."""
        return ",".join(f"{value:.7g}" for value in values_of(self.described(), label))

    def losses(self, logits: Tensor, labels: Tensor, is_training: bool) -> Tensor:
        """The mean over the targets; the same in training and evaluation."""
        return self._loss(logits, labels.to(logits), reduction="none").mean(dim=1)

    def described(self) -> dict[str, Any]:
        """See Objective."""
        return {"target_mean": self._mean.tolist(), "target_std": self._std.tolist()}

    def baselines(self) -> dict[str, float]:
        """Always the mean of train."""
        targets = self.encode(list(self._evaluated)).double()
        return {"always the mean": float(self.losses(torch.zeros_like(targets), targets, False).mean())}

    def sample(self, index: int, row: Sequence[float]) -> dict[str, str]:
        """Each target as it is in the data, and as predicted."""
        _, *outputs, loss = row
        values = {}
        for name, target, value in zip(
                self.names, self._evaluated[index], values_of(self.described(), torch.tensor(outputs)), strict=True):
            values |= {name: f"{target:.9g}", f"{name}_prediction": f"{value:.7g}"}
        return values | {"loss": f"{loss:.6f}"}


def values_of(description: Mapping[str, Any], logits: Tensor) -> np.ndarray:
    """meaning_of() in float64, on the host."""
    return meaning_of(description, logits.double().cpu()).numpy()


def answer(
    description: Mapping[str, Any], names: Sequence[str], values: Sequence[float]
) -> tuple[dict[str, str], dict[str, str]]:
    """What a model says of one input, in words, and by name. values: [C] of values_of()."""
    if "target_mean" in description:
        return {}, {name: f"{value:.7g}" for name, value in zip(names, values, strict=True)}  # the digits of a float32
    by_name = {name: f"{value:.6f}" for name, value in zip(names, values, strict=True)}
    if description.get("multi_label"):
        has = [name for name, value in zip(names, values, strict=True) if value >= 0.5]
        return {"prediction": SEPARATOR.join(has)}, by_name
    most = max(range(len(values)), key=values.__getitem__)
    return {"prediction": names[most], "probability": f"{values[most]:.6f}"}, by_name
