"""torch's DistributedDataParallel: gradients are summed over ranks while the last backward still runs."""

from contextlib import AbstractContextManager, nullcontext
from inspect import signature

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from utils.hardware.devices import Stopwatch
from utils.strategies.replicated import Replicated


class DDP(Replicated):
    """DistributedDataParallel with a hook that sums; a process that is alone needs neither."""

    finds_unused, _fills = True, False

    def setup(self, num_micro_batches: int) -> None:
        """Wrap the model. Collective: DDP sends rank 0's parameters to all ranks."""
        if self.world.world_size == 1:
            return
        self.needs_every_grad = not self.config.find_unused_parameters
        self.model = DistributedDataParallel(  # without device_ids: accumulate brings each micro-batch to its device
            self.module, gradient_as_bucket_view=True, find_unused_parameters=self.config.find_unused_parameters,
            **{_SYNC_BUFFERS: False})  # see buffers.py
        self.model.register_comm_hook(self.communication, self.sum_bucket)

    def require_all_grads(self) -> None:
        """DDP does it, or fails; with find_unused_parameters it leaves out what no rank has used in a step."""
        self._fills = self.config.find_unused_parameters

    def finish(self, scale: Tensor) -> None:
        """DDP has waited for the sums, at the end of the backward pass; zeros for the gradients that it left out."""
        self.communication.stop()
        for param in self.module.parameters() if self._fills else ():
            if param.requires_grad and param.grad is None:
                param.grad = torch.zeros_like(param)

    def grad_sync(self, is_last: bool, scale: Tensor) -> AbstractContextManager:
        """DDP's no_sync for all but the last micro-batch."""
        return nullcontext() if is_last or self.model is self.module else self.model.no_sync()

    @staticmethod
    def sum_bucket(communication: Stopwatch, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Sum a bucket over ranks; DDP calls it in the last backward. Collective."""
        communication.start()  # the last bucket's start counts: before, the backward pass still computes
        # DDP's own hook divides by the world size: a mean of means, wrong if shares are uneven. Our losses are already
        # divided by the normalizer of the whole global batch.
        future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return future.then(lambda done: done.value()[0])


_OPTIONS = signature(DistributedDataParallel).parameters
# torch 2.15 renamed it.
_SYNC_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _OPTIONS else "broadcast_buffers"
