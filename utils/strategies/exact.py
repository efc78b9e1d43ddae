"""The same bits on any number of processes: gradients are added as integers, so the order of the sum does not matter.

Floating-point sums are rounded after each addition, so another number of processes, which adds in another order, ends
with other weights. Nobody can then tell a bug in a restart from rounding, or compare two runs bit by bit.

Each micro-batch's gradient is rounded to a fixed-point grid (int64 in units of 2^-50), added over micro-batches and
ranks, and converted back to floats once. Integers cannot show NaN, inf or overflow (x86 converts all three to
INT64_MIN, and two of them add to 0). So each bucket has one more slot: the number of chunks with a NaN or a value
larger than 2^12 / num_micro_batches. If it is above 0, the gradient becomes inf; if it is 0, no sum has overflowed.

Source: reproducible summation (Demmel and Nguyen, 2013) over logical workers (EasyScale, SC'23).
It sends twice the bytes of DDP.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from utils.distributed.world import World
from utils.settings.run_options import DeviceOptions
from utils.strategies.base import DEFAULTS, BlocksOf, no_blocks
from utils.strategies.replicated import Replicated

GRID = 2.0**50  # grid units per 1.0
LIMIT = 2.0**12  # of the absolute value of a sum: 2^62 grid units
BUCKET = 3 * 2**20  # int64 values in a bucket: 24 MiB are sent at a time
CHUNK = 2**17  # values handled at a time on the CPU, so that they stay in its cache


class Exact(Replicated):
    """Sums of gradients that do not depend on the order; `model` is the plain module."""

    is_invariant = True
    bytes_per_param = 8  # its int64 sum
    not_finite = "is not finite, or is larger than 2^12 / micro-batches (--strategy exact)"

    def __init__(self, module: nn.Module, world: World, blocks_of: BlocksOf = no_blocks,
                 config: DeviceOptions = DEFAULTS):
        super().__init__(module, world, blocks_of, config)
        self._buckets: list[_Bucket] = []
        self._hooks: list[RemovableHandle] = []
        self._is_last, self._scale = False, torch.ones(())

    def setup(self, num_micro_batches: int) -> None:
        """Send rank 0's parameters to all ranks, and hook every trainable one. Collective."""
        self.largest = LIMIT / num_micro_batches
        for hook in self._hooks:
            hook.remove()
        with torch.no_grad():
            for param in self.module.parameters():
                self.world.broadcast(param)
        groups: list[list[nn.Parameter]] = []
        for param in reversed([param for param in self.module.parameters() if param.requires_grad]):  # as backward does
            if not groups or sum(map(nn.Parameter.numel, groups[-1])) + param.numel() > BUCKET:
                groups.append([])
            groups[-1].append(param)
        self._buckets = [_Bucket(params, self.largest) for params in groups]
        self._hooks = [
            param.register_post_accumulate_grad_hook(
                lambda param, bucket=bucket, index=index: self._add(bucket, index, param))
            for bucket in self._buckets
            for index, param in enumerate(bucket.params)
        ]

    def require_all_grads(self) -> None:
        """From now on every parameter takes the sum over ranks, even if this rank has always skipped its layer."""
        for bucket in self._buckets:
            bucket.used = set(range(len(bucket.params)))

    def grad_sync(self, is_last: bool, scale: Tensor) -> AbstractContextManager:
        """Set what the hooks must know about this micro-batch."""
        self._is_last, self._scale = is_last, scale
        return nullcontext()

    def finish(self) -> None:
        """Wait for the sums and convert them to gradients. Collective."""
        self._send(only_full=False)  # a bucket with a parameter that got no gradient is still here
        for bucket in self._buckets:
            self.communication.start()
            bucket.work.wait()
            self.communication.stop()
            bucket.finish(self._scale)

    def _add(self, bucket: "_Bucket", index: int, param: nn.Parameter) -> None:
        bucket.add(index, self._scale)
        if not self._is_last:
            param.grad = None  # the next micro-batch's gradient starts from nothing; the last one's memory gets the sum
            return
        bucket.num_missing -= 1
        self._send(only_full=True)

    def _send(self, only_full: bool) -> None:
        for bucket in self._buckets:  # in the same order on every rank
            if bucket.work is None:
                if only_full and bucket.num_missing:
                    return
                bucket.send()


class _Bucket:
    """Parameters whose gradients are sent together, and the int64 sums of these."""

    def __init__(self, params: list[nn.Parameter], limit: float):
        self.params, self._limit = params, limit
        sizes, device = [param.numel() for param in params], params[0].device
        self._sums = torch.zeros(sum(sizes) + 1, dtype=torch.int64, device=device)  # last: the number of bad chunks
        self._parts, self._chunk = self._sums[:-1].split(sizes), CHUNK if device.type == "cpu" else max(sizes)
        # A gradient has the strides of its parameter (channels_last, say); in memory order it is flat without a copy.
        self._memory_orders = [sorted(range(param.ndim), key=lambda dim, p=param: -p.stride(dim)) for param in params]
        self._added: set[int] = set()  # indices of params that have a sum in this step
        self.used: set[int] = set()  # ... and in any step, or that must have one
        self.num_missing, self.work = len(params), None

    def add(self, index: int, scale: Tensor) -> None:
        """Add the gradient of params[index] to its sum. Factors are powers of two: only round_ rounds."""
        factor, limit = GRID / scale, self._limit * scale
        for values, sums in self._chunks(index):
            low, high = values.aminmax()  # NaN if any value is
            self._sums[-1] += ~((low >= -limit) & (high <= limit))
            rounded = (values * factor).round_()
            if index in self._added:
                sums += rounded.long()
            else:
                sums.copy_(rounded)
        self._added.add(index)

    def send(self) -> None:
        """Start to sum over ranks. Collective."""
        for index in set(range(len(self.params))) - self._added:
            self._parts[index].zero_()
        self.work = dist.all_reduce(self._sums, async_op=True)

    def finish(self, scale: Tensor) -> None:
        """Write the sums over ranks into the gradients, and prepare for the next step."""
        factor, guard = scale / GRID, torch.where(self._sums[-1] > 0, torch.inf, 0.0)
        self.used |= self._added
        for index in sorted(self.used):
            if self.params[index].grad is None:
                self.params[index].grad = torch.empty_like(self.params[index])
            for values, sums in self._chunks(index):
                values.copy_(sums).mul_(factor)
            self._flat_grad(index)[:1] += guard
        self._sums[-1] = 0
        self._added.clear()
        self.num_missing, self.work = len(self.params), None

    def _chunks(self, index: int) -> Iterator[tuple[Tensor, Tensor]]:
        """(gradient, sums) of params[index], flat, at most `_chunk` values at a time."""
        return zip(self._flat_grad(index).split(self._chunk), self._parts[index].split(self._chunk), strict=True)

    def _flat_grad(self, index: int) -> Tensor:
        param, order = self.params[index], self._memory_orders[index]
        if not param.grad.permute(order).is_contiguous():
            param.grad = torch.empty_like(param).copy_(param.grad)
        return param.grad.detach().permute(order).view(-1)
