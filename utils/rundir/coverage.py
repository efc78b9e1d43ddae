"""Which samples were used: noted where they are used, a bit for each; joined over the ranks when somebody asks."""

from collections.abc import Iterable

import torch
from torch import Tensor

from utils.distributed.world import World


class Coverage:
    """The samples of one epoch that reached a backward, or of one evaluation, on any rank.

    To add one takes less than a microsecond of the host, and each call copies N / 8 bytes. What is added again counts
    once.
    """

    def __init__(self, num_samples: int = 0):
        self._bits, self._epoch = bytearray(1 + num_samples // 8), 0
        self._before = bytes(self._bits), 0  # the last call of add()

    def add(self, indices: Iterable[int], epoch: int = 0) -> None:
        """Samples that this rank used in `epoch`; those of another epoch are forgotten."""
        self._before = bytes(self._bits), self._epoch
        if epoch != self._epoch:
            self._bits[:], self._epoch = bytes(len(self._bits)), epoch
        for index in indices:
            self._bits[index >> 3] |= 1 << (index & 7)

    def undo(self) -> None:
        """Forget what was added last: the step changed nothing, and is taken again."""
        self._bits[:], self._epoch = self._before

    def count(self, world: World) -> int:
        """How many different samples all ranks used. Collective."""
        return int.from_bytes(self._joined(world).numpy().tobytes()).bit_count()

    def state_dict(self, world: World) -> dict[str, int | Tensor]:
        """The epoch and the samples of all ranks, [1 + N // 8] uint8. Collective."""
        return {"epoch": self._epoch, "samples": self._joined(world)}

    def load(self, state: dict[str, int | Tensor]) -> None:
        """Continue what state_dict returned."""
        self._epoch, self._bits[:] = state["epoch"], state["samples"].cpu().numpy().tobytes()

    def _joined(self, world: World) -> Tensor:
        """This rank's bits, which become those of all ranks. Collective: N / 8 bytes."""
        return world.all_reduce_or(torch.frombuffer(self._bits, dtype=torch.uint8))  # the same memory
