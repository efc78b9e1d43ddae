"""torch's DistributedDataParallel: gradients are summed over ranks while the last backward still runs.

Tests: tests/distributed/test_world.py
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from inspect import signature

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from utils.strategies.replicated import Replicated

STRIDE = 1009  # between values that are looked at before the sum; a prime, so that all columns of a weight are


class DDP(Replicated):
    """DistributedDataParallel with a hook that sums; a process that is alone needs neither."""

    finds_unused, can_audit, _fills = True, True, False

    def setup(self, num_micro_batches: int) -> None:
        """Wrap the model. Collective: DDP sends rank 0's parameters to all ranks."""
        if self.world.world_size == 1:
            return
        self.needs_every_grad, self.least_forwards = not self.config.find_unused_parameters, 1
        self.model = DistributedDataParallel(  # without device_ids: accumulate brings each micro-batch to its device
            self.module, gradient_as_bucket_view=True, find_unused_parameters=self.config.find_unused_parameters,
            **{_SYNC_BUFFERS: False})  # see buffers.py
        self._numbers = {param: number for number, param in enumerate(self.trainable)}
        self.model.register_comm_hook(self, self.sum_bucket)

    def require_all_grads(self) -> None:
        """DDP does it, or fails; with find_unused_parameters it leaves out what no rank has used in a step."""
        self._fills = self.config.find_unused_parameters

    def finish(self, scale: Tensor) -> None:
        """DDP has waited for the sums, at the end of the backward pass; zeros for the gradients that it left out."""
        self.communication.stop()
        for param in self.trainable if self._fills else ():
            if param.grad is None:
                param.grad = torch.zeros_like(param)

    @contextmanager
    def grad_sync(self, is_last: bool, scale: Tensor) -> Iterator[None]:
        """DDP's no_sync for all but the last micro-batch."""
        with nullcontext() if is_last or self.model is self.module else self.model.no_sync():
            yield
        if not is_last:  # the gradient of the first micro-batch alone: what follows is added to it
            self.add_entered((number, param.grad) for number, param in enumerate(self.trainable))

    @staticmethod
    def sum_bucket(strategy: "DDP", bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Sum a bucket over ranks; DDP calls it in the last backward. Collective."""
        # In the bucket a gradient has its parameter's strides; torch's own view of it is contiguous.
        strategy.add_entered((strategy._numbers[param], grad.as_strided(param.shape, param.stride()))
                             for param, grad in zip(bucket.parameters(), bucket.gradients(), strict=True))
        # A few values show what comes through a layer. Of 11.7 million they take 0.09 ms, and all of them 6 to 12 ms (a
        # core of an AMD EPYC), which is 2 to 3 % of a step of the built-in digits.
        is_finite = bucket.buffer()[::STRIDE].sum().isfinite()
        strategy.is_own_finite = strategy.is_own_finite & is_finite.to(strategy.world.device, non_blocking=True)
        strategy.communication.start()  # the last bucket's start counts: before, the backward pass still computes
        # DDP's own hook divides by the world size: a mean of means, wrong if shares are uneven. Our losses are already
        # divided by the normalizer of the whole global batch.
        future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return future.then(lambda done: done.value()[0])


_OPTIONS = signature(DistributedDataParallel).parameters
# torch 2.15 renamed it.
_SYNC_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _OPTIONS else "broadcast_buffers"
