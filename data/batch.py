"""Batches: samples collated for one forward, and the global batch that one optimizer step learns from.

Legend: B samples in a batch, P predicted tokens, R rows of packed texts.

Tests: tests/unit/engine/test_feed.py
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from utils.hardware.devices import copied_beside
from utils.rundir.digests import UNKNOWN


class SampleSet(Protocol):
    """A map-style data set. A sample is whatever the task's `collate` takes."""

    def __len__(self) -> int: ...

    def __getitem__(self, item: tuple[int, int]) -> Any:
        """Sample `item` = (epoch, index): loading processes live for many epochs and see no changed attribute."""

    def name(self, index: int) -> str:
        """What a sample is called in messages: a path, for example."""

    def digest(self, index: int) -> bytes:
        """What a sample is now, as sample_digest says it; UNKNOWN if it cannot be read."""


def sample_digest(name: bytes, label: int | np.ndarray, contents: Iterable[bytes]) -> bytes:
    """sha256 of what a sample is. name: its place in the data set, wherever that lies. contents: its files, hashed."""
    digest = hashlib.sha256()
    for part in (name, np.asarray(label).tobytes(), *contents):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


@dataclass(frozen=True)
class Batch:
    """Samples collated for one forward."""

    inputs: dict[str, Tensor]  # what `forward` needs, [B, ...], [R, ...] or [P]
    labels: Tensor  # int64, [B] or, of predicted tokens, [P]; float32 [B, C] of several labels or numbers
    # [B] float32: 1, or 0 for a sample that must not count: a stand-in, or an unreadable one that is skipped.
    # NaN makes the step void (BadSamples).
    sample_weight: Tensor
    index: int = 0  # of this micro-batch in its global batch, or of this batch in its evaluation
    indices: tuple[int, ...] = ()  # of its samples in the data set; empty for a stand-in
    bad: tuple[str, ...] = ()  # of the samples that could not be read: "path: reason"; of those that changed: the name
    digests: tuple[bytes, ...] = ()  # of its samples: sample_digest; empty where a task knows none

    def to(self, device: torch.device) -> Batch:
        """The same batch on `device`. Copies from pinned memory wait for nothing, and the host waits for none."""
        return self._of(copied_beside(self.tensors, device))

    def pin_memory(self) -> Batch:
        """The same batch in pinned memory (the DataLoader calls this)."""
        return self._of([tensor.pin_memory() for tensor in self.tensors])

    def stand_in(self) -> Batch:
        """The same samples with sample weight 0, for a rank that must compute when it has nothing to compute."""
        return replace(self, sample_weight=torch.zeros_like(self.sample_weight), indices=(), bad=())

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        return self.sample_weight.device

    @property
    def counted(self) -> dict[int, bytes]:
        """Those of `indices` that count, all but unreadable samples, with their digests. For a batch on the host."""
        weights, digests = self.sample_weight.tolist(), self.digests or len(self.indices) * (UNKNOWN,)
        return {index: digest for index, digest, weight in zip(self.indices, digests, weights, strict=False)
                if weight > 0}

    @property
    def tensors(self) -> list[Tensor]:
        """All that it holds."""
        return [*self.inputs.values(), self.labels, self.sample_weight]

    def _of(self, tensors: list[Tensor]) -> Batch:
        *inputs, labels, weight = tensors
        return replace(self, inputs=dict(zip(self.inputs, inputs, strict=True)), labels=labels, sample_weight=weight)


@dataclass(eq=False)
class GlobalBatch(Iterator[Batch]):
    """What one optimizer step learns from: an iterator of this rank's micro-batches, and what all know of the whole.

    Each micro-batch is taken once, as soon as it is loaded. len() is how many this rank has in all, 0 if there are more
    ranks than micro-batches.
    """

    micro_batches: Iterator[Batch]
    num_own: int
    num_micro_batches: int  # of all ranks, like all that follows
    num_samples: int
    num_tokens: int  # 0 for samples without tokens
    normalizer: float  # samples or predicted tokens: losses are divided by it
    epoch: int
    end: tuple[int, int]  # the position after it: epoch, and how many samples of its order are done
    # of the micro-batches that were taken so far
    counted: dict[int, bytes] = field(default_factory=dict)  # the samples that count, with their digests
    bad: list[str] = field(default_factory=list)  # those that could not be read, as in Batch

    def __next__(self) -> Batch:
        micro_batch = next(self.micro_batches)
        self.counted |= micro_batch.counted
        self.bad += micro_batch.bad
        return micro_batch

    def __len__(self) -> int:
        return self.num_own
