"""What a model gives: in training a sum of losses, and to a user a prediction.

Legend: B samples in a batch, C classes, P predicted tokens, V vocabulary.

Tests: tests/unit/models/test_objectives.py
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Output:
    """What a forward gives."""

    losses: Tensor  # [B] or [P] float32: what each sample or predicted token adds to the loss; times its sample_weight
    logits: Tensor  # [B, C] or [P, V] float32

    @property
    def loss_sum(self) -> Tensor:
        """Scalar float32: a sum, not a mean, so that micro-batches and ranks add."""
        return self.losses.sum()


def widened(logits: Tensor) -> Tensor:
    """In float32 or wider: no loss is computed in bf16 or fp16."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


@dataclass(frozen=True)
class Prediction:
    """What models.predict writes for one input."""

    input: str  # a path, or a text
    values: np.ndarray | None  # [C] float64, see models.objectives.values_of; None if the input cannot be read
    bad: str = ""  # the reason


class Predictions(NamedTuple):
    """What a task's predict() returns."""

    description: dict[str, Any]  # of the model
    batches: Iterator[list[Prediction]]  # in the order of the inputs; those that nobody wants are empty
    model: nn.Module
    num_batches: int | None  # None: of standard input, which can be read only once
