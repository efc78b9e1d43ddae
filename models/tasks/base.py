"""What a task is: its data, its model, its loss and its metrics.

It never wraps, moves, saves or reduces, and knows no strategy.

Tests: tests/end_to_end/test_changing.py
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from data.batch import Batch, SampleSet
from data.sampler import Lengths
from models.metrics.metric import Metric
from models.objectives import Objective
from models.output import Output, Predictions
from utils.errors import UserError


class Task(ABC):
    """The contract. Built on every rank in the same way, from (config, run, world). Collective: an index, a download.

    What it learns from the data before training (a vocabulary, for example) is made once and kept in its run.
    What has a value here may stay as it is.
    """

    train_set: SampleSet
    unaugmented: SampleSet  # train_set as an evaluation sees it; of a task with an objective
    eval_set: SampleSet  # always of epoch 0
    objective: Objective | None = None  # what is predicted, with its metrics and normalizer; None without labels
    metrics: tuple[Metric, ...]
    best: str  # the metric that decides which model is best: among the names of `metrics`
    unit: str  # what a sample is called ("img")
    origin: str  # where the initial weights come from, in words: "from scratch"
    has_weights: bool = False  # whether the initial weights are pretrained
    base_lr: Mapping[str, float]  # by optimizer: what `--lr auto` is at the task's default --global-batch-size
    has_new_head: bool = False  # once the model is built: there are weights, and the head is not of them
    head_lr_factor: float = 1.0  # of the learning rate of a new head that begins at random, by --lr auto (with SGD: 1)
    lengths: Lengths | None = None  # of train_set's samples, once the model is built; None if all are alike
    classes: tuple[str, ...]  # names of the outputs: classes in label order, labels, or targets
    fingerprint: str  # of the data set; a run continues only on the same one
    notes: tuple[str, ...] = ()  # for the user, a line each

    @abstractmethod
    def collate(self, samples: Sequence[Any]) -> Batch:
        """Samples of train_set or eval_set as one batch."""

    def normalizer(self, indices: Tensor) -> float:
        """What the losses of a global batch are divided by, without communication.

        Its samples, the sum of their class weights, or its predicted tokens.
        indices: [N] int64 into train_set, those of all ranks.
        """
        return self.objective.normalizer(indices)

    @abstractmethod
    def example(self, size: int) -> Batch:
        """A synthetic batch of `size` samples of the largest shape that training or evaluation meets."""

    @abstractmethod
    def build_model(self, initial_weights: bool) -> nn.Module:
        """The model on the CPU, drawn from torch's default generator. Collective.

        initial_weights: False if a checkpoint will replace them.
        """

    @abstractmethod
    def forward(self, model: nn.Module, batch: Batch) -> Output:
        """Loss and logits of a batch on the model's device.

        Smoothing, class weights and mixing only while model.training. What is mixed follows from the seed of torch's
        default CPU generator, which is that of the micro-batch.
        """

    def sample_losses(self, output: Output, batch: Batch) -> Tensor:
        """[B] float32: what each sample adds to the loss of its batch."""
        return output.losses

    def as_seen(self, batch: Batch) -> Batch:
        """The batch as forward shows it to the model in training, for preview(). Draws as forward does."""
        return batch

    def preview(self, batch: Batch) -> Sequence[np.ndarray] | Sequence[str]:
        """What the model sees of each sample, for TensorBoard: [H, W, 3] uint8, or a text."""
        return ()

    def inputs(self) -> Iterable[tuple[int, str]]:
        """(index in eval_set, path or text) of each sample, in the order of the data; where a metric is per sample."""
        return ()

    def groups(self, of_train: bool = False) -> list[str] | None:
        """The group of each sample of eval_set (--group-column), read again; None without groups. Raises UserError.

        of_train: of train_set.
        """
        return None

    def listing(self) -> Iterable[tuple[str, str]]:
        """(path or text, label) of each sample of the data, in their order, wherever they lie; without test."""
        return ()

    @abstractmethod
    def save_model(self, weights: dict[str, Tensor], folder: Path) -> None:
        """Write a ready-to-use model into the existing `folder`: RUN/model."""

    def baselines(self) -> dict[str, float]:
        """What trivial methods reach on eval_set, by name, in the unit of `best`. For the closing lines."""
        return self.objective.baselines() if self.objective else {}

    def next_steps(self, run: str, python: str) -> dict[str, str]:
        """For the closing lines: {what to do with the finished run: its command, for a shell}. Both are quoted."""
        return {}

    @staticmethod
    def predict(folder: Path, inputs: Sequence[str], device: torch.device, batch_size: int,
                is_wanted: Callable[[int], bool] = lambda number: True) -> Predictions:
        """Predictions of the model in `folder` for `inputs`, computed on `device`.

        The description has `classes`, the names of the outputs, and what models.objectives.answer needs. A batch has
        `batch_size` inputs, the last one what is left; what is computed of it depends on these alone. is_wanted: asked
        about the number of each batch, once the first one is computed. Raises UserError (64, 65, 66).
        """
        raise UserError(f"{folder}: models.predict is not written for the task of this model")
