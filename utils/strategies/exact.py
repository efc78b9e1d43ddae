"""The same bits on any number of processes: gradients are added as integers, so the order of the sum does not matter.

Floating-point sums are rounded after each addition, so another number of processes, which adds in another order, ends
with other weights. Nobody can then tell a bug in a restart from rounding, or compare two runs bit by bit.

Each micro-batch's gradient is rounded to a fixed-point grid (int64 in units of 2^-50), added over micro-batches and
ranks, and converted back to floats once. Integers cannot show NaN, inf or overflow (x86 converts all three to
INT64_MIN, and two of them add to 0). So beside the sums stands the number of chunks with a NaN or a value larger
than 2^12 / num_micro_batches. If it is above 0, the gradient becomes inf or NaN; if it is 0, no sum has overflowed.

Source: reproducible summation (Demmel and Nguyen, 2013) over logical workers (EasyScale, SC'23).
It sends twice the bytes of DDP.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from utils.strategies.replicated import Replicated

GRID = 2.0**50  # grid units per 1.0
LIMIT = 2.0**12  # of the absolute value of a sum: 2^62 grid units
BUCKET = 3 * 2**20  # int64 values in a bucket: 24 MiB are sent at a time
CHUNK = 2**17  # values handled at a time on the CPU, so that they stay in its cache; elsewhere BUCKET


class Exact(Replicated):
    """Sums of gradients that do not depend on the order; `model` is the plain module."""

    is_invariant = can_audit = True
    bytes_per_param = 8  # its int64 sum
    not_finite = "is not finite, or is larger than 2^12 / micro-batches (--strategy exact)"

    _buckets: "Sequence[_Bucket]" = ()
    _groups: "Mapping[_Group, int]"  # all of all buckets, with a number
    _hooks: Sequence[RemovableHandle] = ()

    def setup(self, num_micro_batches: int) -> None:
        """Send rank 0's parameters to all ranks, and hook every trainable one. Collective."""
        self.largest = LIMIT / num_micro_batches
        for hook in self._hooks:
            hook.remove()
        self._buckets, self._groups = [], {}  # frees their memory
        with torch.no_grad():
            for param in self.module.parameters():
                self.world.broadcast(param)
        params = [param for param in self.module.parameters() if param.requires_grad]
        self._buckets = [_Bucket(part, self.largest) for part in _cut(params[::-1], BUCKET)]  # as backward does
        groups = (group for bucket in self._buckets for group in bucket.groups)
        self._groups = {group: number for number, group in enumerate(groups)}
        self._hooks = [
            param.register_post_accumulate_grad_hook(lambda _, bucket=bucket, group=group: self._add(bucket, group))
            for bucket in self._buckets for group in bucket.groups for param in group.params]

    def require_all_grads(self) -> None:
        """From now on every parameter takes the sum over ranks, even if this rank has always skipped its layer."""
        for group in self._groups:
            group.used = set(range(len(group.params)))

    @contextmanager
    def grad_sync(self, is_last: bool, scale: Tensor) -> Iterator[None]:
        """Add the micro-batch's gradients to the sums, group by group, while its backward pass still runs."""
        self._is_last, self._scale = is_last, scale
        yield
        self._add_rest(scale)  # of groups some of whose parameters got no gradient from this micro-batch

    def enter(self, grads: dict[nn.Parameter, Tensor | None], scale: Tensor) -> None:
        """Round and convert them where the sums are, which finish() has read."""
        kept = {param: param.grad for param in grads}
        for param, grad in grads.items():
            param.grad = grad
        self._add_rest(scale)
        for group in self._groups:
            group.zero_unless_added()
        for param, grad in kept.items():
            param.grad = grad

    def _add_rest(self, scale: Tensor) -> None:
        for group in self._groups:
            if group.add(scale):
                self._note(group)

    def _note(self, group: "_Group") -> None:
        self.add_entered([(self._groups[group], group.sums)])

    def finish(self, scale: Tensor) -> None:
        """Wait for the sums and convert them to gradients. Collective."""
        self._send(only_full=False)  # a bucket with a parameter that got no gradient is still here
        for bucket in self._buckets:
            self.communication.start()
            bucket.work.wait()
            self.communication.stop()
            bucket.finish(scale)

    def _add(self, bucket: "_Bucket", group: "_Group") -> None:
        if bucket.add_if_complete(group, self._scale, self._is_last):
            self._note(group)
        if self._is_last:
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
        device, dtype = params[0].device, params[0].dtype
        chunk = CHUNK if device.type == "cpu" else BUCKET
        parts = _cut(params, chunk)
        sizes = [sum(map(nn.Parameter.numel, part)) for part in parts]
        self._sums = torch.zeros(sum(sizes) + len(sizes), dtype=torch.int64, device=device)
        grads = torch.empty(sum(sizes), dtype=dtype, device=device)
        self.groups = [_Group(*each, limit, chunk) for each in zip(
            parts, self._sums.split([size + 1 for size in sizes]), grads.split(sizes), strict=True)]
        self.num_missing, self.work = len(self.groups), None  # groups without the last micro-batch's gradients; a sum

    def add_if_complete(self, group: "_Group", scale: Tensor, is_last: bool) -> bool:
        """A parameter of `group` has got its gradient: add those of the group if all of them are there."""
        group.num_missing -= 1
        if group.num_missing:
            return False
        self.num_missing -= is_last
        return group.add(scale)

    def send(self) -> None:
        """Start to sum over ranks. Collective."""
        for group in self.groups:
            group.zero_unless_added()
        self.work = dist.all_reduce(self._sums, async_op=True)

    def finish(self, scale: Tensor) -> None:
        """Write the sums over ranks into the gradients, and prepare for the next step."""
        for group in self.groups:
            group.finish(scale)
        self.num_missing, self.work = len(self.groups), None


class _Group:
    """Parameters of a bucket whose gradients are added at once: a few large operations instead of many small ones."""

    def __init__(self, params: list[nn.Parameter], sums: Tensor, grads: Tensor, limit: float, chunk: int):
        """sums: [N + 1] int64, the last is the number of bad chunks. grads: [N], what the sums become."""
        self.params, self._limit, self._chunk = params, limit, chunk
        self.sums, self._sums, self._num_bad, self._grads = sums, sums[:-1], sums[-1], grads
        # A gradient has the strides of its parameter (channels_last, say); in memory order it is flat without a copy.
        self._memory_orders = [sorted(range(param.ndim), key=lambda dim, p=param: -p.stride(dim)) for param in params]
        self._views = [
            values.view([param.shape[dim] for dim in order]).permute([order.index(dim) for dim in range(param.ndim)])
            for values, param, order in zip(
                grads.split([param.numel() for param in params]), params, self._memory_orders, strict=True)]
        self.used: set[int] = set()  # indices of params that have had a gradient in any step, or must have one
        self.num_missing, self._is_added = len(params), False

    def add(self, scale: Tensor) -> bool:
        """Add the gradients that are there to the sums, and forget them: the next ones start from nothing.

        Returns whether there was any. Factors are powers of two: only round_ rounds.
        """
        found = {index for index, param in enumerate(self.params) if param.grad is not None}
        if not found:
            return False
        flat = [self._flat_grad(index) if index in found else param.new_zeros(param.numel())
                for index, param in enumerate(self.params)]
        grads, factor, limit = torch.cat(flat) if len(flat) > 1 else flat[0], GRID / scale, self._limit * scale
        if not self._is_added:
            self._num_bad.zero_()
        for values, sums in zip(grads.split(self._chunk), self._sums.split(self._chunk), strict=True):
            low, high = values.aminmax()  # NaN if any value is
            self._num_bad += ~((low >= -limit) & (high <= limit))
            rounded = (values * factor).round_()
            if self._is_added:
                sums += rounded.long()
            else:
                sums.copy_(rounded)
        for param in self.params:
            param.grad = None
        self.used |= found
        self.num_missing, self._is_added = len(self.params), True
        return True

    def zero_unless_added(self) -> None:
        """Make the sums those of this step, if this rank has nothing to add."""
        if not self._is_added:
            self._sums.zero_()
            self._num_bad.zero_()
        self._is_added = False

    def finish(self, scale: Tensor) -> None:
        """Make the sums the gradients, times scale; not finite if a chunk was bad."""
        factor = torch.where(self._num_bad > 0, torch.inf, scale / GRID)
        for values, sums in zip(self._grads.split(self._chunk), self._sums.split(self._chunk), strict=True):
            values.copy_(sums).mul_(factor)
        for index in self.used:
            self.params[index].grad = self._views[index]

    def _flat_grad(self, index: int) -> Tensor:
        param, order = self.params[index], self._memory_orders[index]
        if not param.grad.permute(order).is_contiguous():
            param.grad = torch.empty_like(param).copy_(param.grad)
        return param.grad.detach().permute(order).view(-1)


def _cut(params: list[nn.Parameter], size: int) -> list[list[nn.Parameter]]:
    """Parts of `params`, each of one dtype, with at most `size` values, or with one parameter that has more."""
    parts: list[list[nn.Parameter]] = []
    for param in params:
        is_full = parts and sum(map(nn.Parameter.numel, parts[-1])) + param.numel() > size
        if not parts or is_full or parts[-1][0].dtype != param.dtype:
            parts.append([])
        parts[-1].append(param)
    return parts
