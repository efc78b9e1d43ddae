"""Buffers in a step: every micro-batch starts from the same ones, and the run keeps what micro-batch 0 leaves.

Stock DDP hands on rank 0's buffers after all micro-batches of its share: BatchNorm's running statistics then depend on
the number of processes. Rank 0 computes micro-batch 0 on any number of processes.
"""

import torch
from torch import Tensor, nn


class Buffers:
    """The buffers of `module`, and copies of them within a step."""

    def __init__(self, module: nn.Module):
        batch_norms = [part for part in module.modules() if isinstance(part, nn.modules.batchnorm._NormBase)]
        statistics = {id(buffer) for part in batch_norms for buffer in part.buffers(recurse=False)}
        self._live = list(module.buffers())
        # The next forward reads a spectral norm's vectors, say; only the next evaluation reads BatchNorm's statistics.
        self.stepwise = [buffer for buffer in self._live if id(buffer) not in statistics and buffer.is_floating_point()]
        self._start: list[Tensor] = []
        self._kept: list[Tensor] = []

    def begin(self) -> None:
        """Begin a step: remember the buffers as they are."""
        self._start = self._kept = [buffer.clone() for buffer in self._live]

    def keep(self) -> None:
        """Remember the buffers as those that the run has after this step."""
        self._kept = [buffer.clone() for buffer in self._live]

    def restore(self) -> None:
        """Set the buffers to their values at the step's start."""
        self._copy(self._start)

    def commit(self, is_finite: Tensor) -> None:
        """End a step: take the kept buffers if is_finite (scalar bool on the device), else those of its start."""
        self._copy([torch.where(is_finite.to(kept.device), kept, start)
                    for kept, start in zip(self._kept, self._start, strict=True)])

    def _copy(self, source: list[Tensor]) -> None:
        if source:
            torch._foreach_copy_(self._live, source)
