"""Agreement: all ranks act on a small fact after the same step.

A rank that stopped alone would leave the others in a collective; asking all ranks at each step would make them wait.

Tests: tests/distributed/test_world.py
"""

import socket
from collections.abc import Callable

import torch
import torch.distributed as dist

from utils.distributed.world import World
from utils.errors import Exit, RankError


class Agreement:
    """Flags that any rank may raise and that all ranks see after the same exchange.

    The all-reduce of one exchange is read at the next, or at wait(), so no rank waits for it. The constructor takes a
    function per flag; each exchange calls it and raises the flag if it returns True (`bool()` never does):

    stop: this rank wants to stop. save: a checkpoint is due. error: its last save failed. bad_sample: it read a sample
    that stops the run. wrong: it saw something of a step that all ranks must judge. `save` and `wrong` are those of the
    last exchange that was read; the others stay raised.
    """

    def __init__(self, world: World, stop: Callable[[], bool] = bool, save: Callable[[], bool] = bool,
                 error: Callable[[], bool] = bool, bad_sample: Callable[[], bool] = bool,
                 wrong: Callable[[], bool] = bool):
        # some rank raised it, and all ranks know
        self.stop = self.save = self.error = self.bad_sample = self.wrong = False
        self._world, self._questions = world, (stop, save, error, bad_sample, wrong)
        self._pending: dist.Work | None = None

    def exchange(self) -> None:
        """Read the flags of the exchange before, and start the next one. Collective.

        Raises RankError (71) on a rank that received something else than the sum: it must not act on that alone.
        """
        self.wait()
        raised = [bool(question()) for question in self._questions]
        self._counts = torch.tensor([*raised, sum(raised)], dtype=torch.int32)
        self._pending = dist.all_reduce(self._counts, group=self._world.cpu_group, async_op=True)

    def wait(self) -> None:
        """Finish the pending exchange: before an evaluation, a save and the end. Collective. Raises as exchange()."""
        self.save = self.wrong = False
        if self._pending is None:
            return
        self._pending.wait()
        self._pending = None
        *counts, total = self._counts.tolist()
        if sum(counts) != total:
            raise RankError(f"rank {self._world.rank} on {socket.gethostname()} received flags that are not the sum of"
                            " what the ranks sent: a link, a device or memory has changed them; the same command"
                            " continues the run; if it happens again, leave out this host", Exit.HARDWARE)
        stop, self.save, error, bad_sample, self.wrong = map(bool, counts)
        self.stop, self.error, self.bad_sample = self.stop or stop, self.error or error, self.bad_sample or bad_sample
