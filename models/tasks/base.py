"""What a task is: its data, its model, its loss and its metrics. It never wraps, moves, saves or reduces, and knows no strategy.

Legend: B samples in a batch, C classes, P predicted tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from data.batch import Batch

if TYPE_CHECKING:
    from models.metrics import Metric  # which imports Output



@dataclass(frozen=True)
class Output:
    """What a forward gives: a sum, not a mean, so that micro-batches and ranks add."""

    loss_sum: Tensor  # scalar float32: the weighted losses of the samples, added
    logits: Tensor  # [B, C] or [P, V] float32


def widened(logits: Tensor) -> Tensor:
    """In float32 at least: no loss is computed in bf16 or fp16."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


@dataclass(frozen=True)
class Prediction:
    """What models.predict writes of one input."""

    input: str  # a path, or a text
    probabilities: np.ndarray | None  # [C] float64; None where the input cannot be read
    bad: str = ""  # why it cannot


class Task(Protocol):
    """The contract. Built alike on every rank, from (config, run, world); `Collective.`, for ranks meet (an index, a download).

    What it learns from the data outside the optimizer (a vocabulary, say) is made once and kept in its run.
    """

    train_set: Any  # map-style; items are asked for as (epoch, index), for workers persist and see no changed attribute ...
    eval_set: Any  # map-style, likewise with epoch 0. Both have name(index), a path for one, for messages
    metrics: tuple[Metric, ...]
    best: str  # the metric that decides which model is best ...
    best_is_high: bool  # ... and whether more of it is better
    unit: str  # what a sample is called ("img")
    lengths: Tensor | None  # [N] tokens of train_set's samples: batches are made of similar ones; None where all are alike
    classes: tuple[str, ...]  # in label order
    fingerprint: str  # of the data set; a run continues on the same one only
    notes: tuple[str, ...]  # for the user, a line each

    def collate(self, samples: Sequence[Any]) -> Batch:
        """Samples of train_set or eval_set as one batch."""

    def normalizer(self, indices: Tensor) -> float:
        """What the losses of a global batch (indices [n] into train_set) are divided by: its samples or predicted tokens. Arithmetic, no communication."""

    def example(self, size: int) -> Batch:
        """A synthetic batch of `size` samples of the largest shape that training or evaluation meets."""

    def build_model(self, initial_weights: bool) -> nn.Module:
        """The model on the CPU, drawn from torch's default generator. Collective.

        initial_weights: False where a checkpoint will replace them.
        """

    def forward(self, model: nn.Module, batch: Batch) -> Output:
        """Loss and logits of a batch that lies on the model's device. Label smoothing only where model.training."""

    def save_model(self, weights: dict[str, Tensor], folder: Path) -> None:
        """Write a ready-to-use model into the existing `folder`: RUN/model."""

    def baselines(self) -> dict[str, float]:
        """What trivial methods reach on eval_set, by name, in the unit of `best`. For the closing lines."""

    def next_steps(self, run: str, python: str) -> dict[str, str]:
        """For the closing lines: {what to do with the finished run: the command for it}. python: as the user can type it."""

    @staticmethod
    def predict(
        folder: Path, inputs: Sequence[str], device: torch.device, batch_size: int
    ) -> tuple[Sequence[str], Iterator[list[Prediction]]]:
        """The classes of the model in `folder`, and batches of predictions, in the order of `inputs`.

        At most `batch_size` inputs are classified at once, on `device`. Raises UserError (64, 65, 66).
        """
