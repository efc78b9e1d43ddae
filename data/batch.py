"""Batches: samples collated for one forward, and the global batch that one optimizer step learns from.

Legend: B samples in a batch, P predicted tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Samples collated for one forward. `sample_weight` is 0 for a sample that must not count (a stand-in, a skipped bad one)."""

    inputs: dict[str, Tensor]  # what `forward` needs, [B, ...] or [P]
    labels: Tensor  # int64, [B] or, of predicted tokens, [P]
    sample_weight: Tensor  # [B] float32, 0 or 1; NaN where the step must be void (BadSamples)
    index: int = 0  # of the micro-batch in its global batch, or of the batch in its evaluation
    indices: tuple[int, ...] = ()  # of its samples in their set; none of a stand-in
    bad: tuple[str, ...] = ()  # "path: reason" of the samples that could not be read

    def to(self, device: torch.device) -> Batch:
        """The same batch on `device`; copies from pinned memory do not wait."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """The same batch in pinned memory (the DataLoader calls this)."""
        return self._map(Tensor.pin_memory)

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.nbytes for tensor in (*self.inputs.values(), self.labels, self.sample_weight))

    def _map(self, move: Callable[[Tensor], Tensor]) -> Batch:
        inputs = {name: move(tensor) for name, tensor in self.inputs.items()}
        return replace(self, inputs=inputs, labels=move(self.labels), sample_weight=move(self.sample_weight))


@dataclass(frozen=True)
class GlobalBatch:
    """What one optimizer step learns from: this rank's micro-batches, and what every rank knows about the whole."""

    micro_batches: Iterator[Batch]  # this rank's, one by one as they are loaded; to go through once
    share: int  # how many of them; 0 where there are more ranks than micro-batches
    num_micro_batches: int  # of all ranks, as all that follows
    num_samples: int
    num_tokens: int  # 0 where samples have none
    normalizer: float  # samples or predicted tokens: what losses are divided by
    epoch: int
    end: tuple[int, int]  # the position after it: epoch, and samples of its order that are done
    taken: list[tuple[int, tuple[int, ...]]]  # (index, samples) of the micro-batches that this rank has gone through
