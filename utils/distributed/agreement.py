"""Agreement: all ranks act on a small fact after the same step.

A rank that stopped alone would leave the others in a collective; asking all ranks at each step would make them wait.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from utils.distributed.world import World


class Agreement:
    """Flags that any rank may raise and that all ranks see after the same exchange.

    The all-reduce of one exchange is read at the next, or at wait(), so no rank waits for it. The constructor takes a
    function per flag; each exchange calls it and raises the flag if it returns True (`bool()` never does):

    stop: this rank wants to stop. save: a checkpoint is due. error: its last save failed. bad_sample: it read a sample
    that stops the run. corrupted: a sum has changed on its way to this rank. `save` is that of the last exchange that
    was read; the others stay raised.
    """

    def __init__(self, world: World, stop: Callable[[], bool] = bool, save: Callable[[], bool] = bool,
                 error: Callable[[], bool] = bool, bad_sample: Callable[[], bool] = bool,
                 corrupted: Callable[[], object] = bool):
        # some rank raised it, and all ranks know
        self.stop = self.save = self.error = self.bad_sample = self.corrupted = False
        self._group, self._questions = world.cpu_group, (stop, save, error, bad_sample, corrupted)
        self._pending: dist.Work | None = None

    def exchange(self) -> None:
        """Read the flags of the exchange before, and start the next one. Collective."""
        self.wait()
        self._flags = torch.tensor([bool(question()) for question in self._questions], dtype=torch.int32)
        self._pending = dist.all_reduce(self._flags, op=dist.ReduceOp.MAX, group=self._group, async_op=True)

    def wait(self) -> None:
        """Finish the pending exchange: before an evaluation, a save and the end. Collective."""
        self.save = False
        if self._pending is None:
            return
        self._pending.wait()
        self._pending = None
        stop, self.save, error, bad_sample, corrupted = map(bool, self._flags.tolist())
        self.stop, self.error, self.bad_sample = self.stop or stop, self.error or error, self.bad_sample or bad_sample
        self.corrupted = self.corrupted or corrupted
