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
        live = list(module.buffers())
        self.alike = [buffer for buffer in live if id(buffer) not in statistics]  # on all ranks at a step's start
        # The next forward reads a spectral norm's vectors, say; only the next evaluation reads BatchNorm's statistics.
        self.stepwise = [buffer for buffer in self.alike if buffer.is_floating_point()]
        # A GPU copies all of one kind at once: one by one, BatchNorm's would be most kernels of a step.
        kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for buffer in live:
            kinds.setdefault((buffer.device, buffer.dtype), []).append(buffer)
        self._kinds = [(live, _Copy(live), _Copy(live)) for live in kinds.values()]  # of the step's start; kept
        self._has_kept = False

    def begin(self) -> None:
        """Begin a step: remember the buffers as they are."""
        self._has_kept = False
        for live, start, _ in self._kinds:
            torch._foreach_copy_(start.parts, live)

    def keep(self) -> None:
        """Remember the buffers as those that the run has after this step."""
        self._has_kept = True
        for live, _, kept in self._kinds:
            torch._foreach_copy_(kept.parts, live)

    def restore(self) -> None:
        """Set the buffers to their values at the step's start."""
        for live, start, _ in self._kinds:
            torch._foreach_copy_(live, start.parts)

    def commit(self, is_finite: Tensor) -> None:
        """End a step: take the kept buffers if is_finite (scalar bool on the device), else those of its start."""
        if not self._has_kept:  # another rank has micro-batch 0; here they are those of the start
            return
        for live, start, kept in self._kinds:
            torch.where(is_finite.to(start.whole.device), kept.whole, start.whole, out=kept.whole)
            torch._foreach_copy_(live, kept.parts)


class _Copy:
    """Room for a copy of `tensors`, of one device and dtype. whole: [total number of elements]; parts: as tensors."""

    def __init__(self, tensors: list[Tensor]):
        self.whole = torch.empty(sum(map(Tensor.numel, tensors)), dtype=tensors[0].dtype, device=tensors[0].device)
        sizes = [tensor.numel() for tensor in tensors]
        self.parts = [part.view_as(tensor) for part, tensor in zip(self.whole.split(sizes), tensors, strict=True)]
