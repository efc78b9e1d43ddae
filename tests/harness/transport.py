"""A transport that changes what it carries: faults in the sums of --strategy exact, planted in real processes."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

Change = Callable[[Tensor], None]  # of what is sent, in place: int64 sums, the number of bad ranks, the checksum


class Changed:
    """A sum that is changed as it arrives."""

    def __init__(self, work: dist.Work, sums: Tensor, change: Change):
        self._work, self._sums, self._change = work, sums, change

    def wait(self) -> None:
        """Wait for the sum, and change it."""
        self._work.wait()
        self._change(self._sums)


def plant(sent: Change, received: Change) -> None:
    """From here on change what this process sends of each bucket, and the sums that it receives."""
    all_reduce = dist.all_reduce

    def changed(tensor: Tensor, *args: object, **options: object) -> dist.Work | Changed | None:
        if tensor.dtype != torch.int64 or not options.get("async_op"):
            return all_reduce(tensor, *args, **options)
        sent(tensor)
        return Changed(all_reduce(tensor, *args, **options), tensor, received)

    dist.all_reduce = changed


def flip(tensor: Tensor, at: int, bit: int) -> None:
    """Flip one bit, 0 to 63, of one int64 value."""
    tensor[at] ^= torch.ones((), dtype=torch.int64) << bit
