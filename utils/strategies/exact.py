"""The same bits on any number of processes: gradients are added as integers, whose sums know no order.

Each micro-batch's gradient is rounded to a fixed-point grid (int64 in units of 2^-50), added over micro-batches and ranks,
and turned back into floats once. NaN, inf and wrap-around would vanish in an integer sum (x86 turns all three into
INT64_MIN, and two of them add to 0): a chunk that holds a NaN or a value beyond 2^12 / M is counted in one more slot of its
bucket, and a count above 0 makes the gradient inf, whatever the other slots say. Where it is 0, no sum can have wrapped.
Source: reproducible summation (Demmel and Nguyen, 2013) over logical workers (EasyScale, SC'23). Sends twice DDP's bytes.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn

from utils.distributed.world import World
from utils.strategies.base import Strategy

GRID = 2.0**50  # values per unit
LIMIT = 2.0**12  # of a sum: 2^62 in grid units
BUCKET = 3 * 2**20  # int64 values: 24 MiB are sent at a time
CHUNK = 2**17  # values handled at once on the CPU, so that the steps of the arithmetic stay in its cache


class Exact(Strategy):
    """Order-free sums of gradients; `model` is the plain module."""

    bytes_per_param = 8  # its int64 sum
    is_invariant = True
    not_finite = "is not finite, or beyond 2^12 / micro-batches (--strategy exact)"

    def __init__(self, module: nn.Module, world: World):
        super().__init__(module, world)
        self._buckets: list[_Bucket] = []
        self._hooks: list = []
        self._is_last, self._scale = False, torch.ones(())

    def setup(self, num_micro_batches: int) -> None:
        """Put a hook on every trainable weight, and rank 0's weights on every rank. Collective."""
        self.largest = LIMIT / num_micro_batches
        for hook in self._hooks:
            hook.remove()
        with torch.no_grad():
            for weight in self.module.parameters():
                self.world.broadcast(weight)
        groups: list[list[nn.Parameter]] = []
        for weight in reversed([weight for weight in self.module.parameters() if weight.requires_grad]):  # about backward's order
            if not groups or sum(map(nn.Parameter.numel, groups[-1])) + weight.numel() > BUCKET:
                groups.append([])
            groups[-1].append(weight)
        self._buckets = [_Bucket(weights, self.largest) for weights in groups]
        self._hooks = [
            weight.register_post_accumulate_grad_hook(lambda weight, bucket=bucket, place=place: self._add(bucket, place, weight))
            for bucket in self._buckets
            for place, weight in enumerate(bucket.weights)
        ]

    def grad_sync(self, is_last: bool, scale: Tensor) -> AbstractContextManager:
        """Tell the hooks which micro-batch this is."""
        self._is_last, self._scale = is_last, scale
        return nullcontext()

    def _add(self, bucket: "_Bucket", place: int, weight: nn.Parameter) -> None:
        bucket.add(place, self._scale)
        if not self._is_last:
            weight.grad = None  # the next micro-batch's gradient starts from nothing; the last one's memory takes the sum
            return
        bucket.missing -= 1
        self._send(only_full=True)

    def _send(self, only_full: bool) -> None:
        for bucket in self._buckets:  # one fixed order, the same on every rank
            if bucket.work is None:
                if only_full and bucket.missing:
                    return
                bucket.send()

    def expect_all(self) -> None:
        """Else a rank that skipped a layer, in this start so far, would not take the other ranks' sum for it."""
        for bucket in self._buckets:
            bucket.used = set(range(len(bucket.weights)))

    def finish(self) -> None:
        """Wait for the sums and turn them into gradients. Collective."""
        self._send(only_full=False)  # a weight that got no gradient leaves its bucket waiting
        for bucket in self._buckets:
            bucket.finish(self._scale)


class _Bucket:
    """Weights whose gradients are sent together, and the int64 sums of these."""

    def __init__(self, weights: list[nn.Parameter], limit: float):
        self.weights, self._limit = weights, limit
        sizes = [weight.numel() for weight in weights]
        device = weights[0].device
        self._sums = torch.zeros(sum(sizes) + 1, dtype=torch.int64, device=device)  # the last counts what was kept out
        self._parts, self._chunk = self._sums[:-1].split(sizes), CHUNK if device.type == "cpu" else max(sizes)
        # Gradients have their weight's strides (channels_last, say); in memory order they are flat without a copy.
        self._memory_orders = [sorted(range(weight.ndim), key=lambda d, w=weight: -w.stride(d)) for weight in weights]
        self._added: set[int] = set()  # places that have a sum in this step ...
        self.used: set[int] = set()  # ... and in any, or those that are expected to
        self.missing, self.work = len(weights), None

    def add(self, place: int, scale: Tensor) -> None:
        """Add the gradient of weight `place` to the sums. Factors are powers of two: only round_ rounds."""
        factor, limit = GRID / scale, self._limit * scale
        for values, sums in zip(self._flat_grad(place).split(self._chunk), self._parts[place].split(self._chunk), strict=True):
            low, high = values.aminmax()  # NaN if any value is
            self._sums[-1] += ~((low >= -limit) & (high <= limit))
            rounded = (values * factor).round_()
            if place in self._added:
                sums += rounded.long()
            else:
                sums.copy_(rounded)
        self._added.add(place)

    def send(self) -> None:
        """Start to sum over ranks. Collective."""
        for place in set(range(len(self.weights))) - self._added:
            self._parts[place].zero_()
        self.work = dist.all_reduce(self._sums, async_op=True)

    def finish(self, scale: Tensor) -> None:
        """Once the sums of all ranks are here: write them into the weights' gradients, and be ready for the next step."""
        self.work.wait()
        factor, guard = scale / GRID, torch.where(self._sums[-1] > 0, torch.inf, 0.0)
        self.used |= self._added
        for place in sorted(self.used):
            if self.weights[place].grad is None:
                self.weights[place].grad = torch.empty_like(self.weights[place])
            flat = self._flat_grad(place)
            for values, sums in zip(flat.split(self._chunk), self._parts[place].split(self._chunk), strict=True):
                values.copy_(sums).mul_(factor)
            flat[:1] += guard
        self._sums[-1] = 0
        self._added.clear()
        self.missing, self.work = len(self.weights), None

    def _flat_grad(self, place: int) -> Tensor:
        weight, order = self.weights[place], self._memory_orders[place]
        if not weight.grad.permute(order).is_contiguous():
            weight.grad = torch.empty_like(weight).copy_(weight.grad)
        return weight.grad.detach().permute(order).view(-1)
