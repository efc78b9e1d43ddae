"""The same bits on any number of processes: gradients are added as integers, so the order of the sum does not matter.

Floating-point sums are rounded after each addition, so another number of processes, which adds in another order, ends
with other weights. Nobody can then tell a bug in a restart from rounding, or compare two runs bit by bit.

Each micro-batch's gradient is rounded to a fixed-point grid (int64 in units of 2^-50), added over micro-batches and
ranks, and converted back to floats once. Integers cannot show NaN, inf or overflow (x86 converts all three to
INT64_MIN, and two of them add to 0). So beside the sums stands the number of ranks with a NaN or a value larger
than 2^12 / num_micro_batches. If it is above 0, the gradient becomes inf or NaN; if it is 0, no sum has overflowed.

A sum of integers also keeps a checksum that is linear: sum(weight * x) mod 2^64, with odd weights, so that each single
flipped bit changes it. Every rank sends that of its values and a stamp of its rank and the step with them; what arrives
must have the sum of the checksums. So a rank whose values are lost, or come twice or from an earlier step, is found.

Source: reproducible summation (Demmel and Nguyen, 2013) over logical workers (EasyScale, SC'23); checksums as in Huang
and Abraham (1984). It sends twice the bytes of DDP.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from utils.distributed.world import World
from utils.strategies.checksum import checksum, odd_numbers
from utils.strategies.replicated import Replicated

GRID = 2.0**50  # grid units per 1.0
LIMIT = 2.0**12  # of the absolute value of a sum: 2^62 grid units
WIDTH = 520  # values with different weights in a checksum; no power of two, whose strides share few places of a cache
CHUNK = 252 * WIDTH  # values handled at a time on the CPU, so that they stay in its cache; elsewhere BUCKET
BUCKET = 24 * CHUNK  # int64 values in a bucket: 24 MiB are sent at a time


class Exact(Replicated):
    """Sums of gradients that do not depend on the order; `model` is the plain module."""

    is_invariant = can_audit = True
    bytes_per_param = 8  # its int64 sum
    not_finite = "is not finite, or is larger than 2^12 / micro-batches (--strategy exact)"

    _hooks: Sequence[RemovableHandle] = ()

    def setup(self, num_micro_batches: int) -> None:
        """Send rank 0's parameters to all ranks, and hook every trainable one. Collective."""
        limit = LIMIT / num_micro_batches
        for hook in self._hooks:
            hook.remove()
        self._buckets, self._groups = [], {}  # frees their memory
        for param in self.module.parameters():
            self.world.broadcast(param.detach())
        parts = _cut(self.trainable[::-1], BUCKET)  # as backward does
        self._buckets = [_Bucket(part, limit, self.world) for part in parts]
        groups = (group for bucket in self._buckets for group in bucket.groups)
        self._groups = {group: number for number, group in enumerate(groups)}  # all of all buckets, with a number
        self._hooks = [param.register_post_accumulate_grad_hook(lambda _, group=group: self._take(group))
                       for group in self._groups for param in group.params]

    def require_all_grads(self) -> None:
        """From now on every parameter takes the sum over ranks, even if this rank has always skipped its layer."""
        for group in self._groups:
            group.used = set(range(len(group.params)))

    @contextmanager
    def grad_sync(self, is_last: bool, scale: Tensor) -> Iterator[None]:
        """Add the micro-batch's gradients to the sums, group by group, while its backward pass still runs."""
        self._is_last, self._scale = is_last, scale
        yield
        for group in self._groups:  # what is left: some of its parameters got no gradient from this micro-batch
            self._add(group)

    def entered_by(self, grads: dict[nn.Parameter, Tensor | None], scale: Tensor) -> Tensor:
        """Round and convert them where the sums are, which finish() has read."""
        kept = {param: param.grad for param in grads}
        for param, grad in grads.items():
            param.grad = grad
        found = checksum((number, group.sums) for group, number in self._groups.items()
                         if group.add(scale, is_last=False))
        for group in self._groups:
            group.complete()
        for param, grad in kept.items():
            param.grad = grad
        return found

    def finish(self, scale: Tensor) -> None:
        """Wait for the sums, convert them to gradients, and compare their checksums. Collective."""
        self._send(scale, only_full=False)  # a bucket with a parameter that got no gradient is still here
        for bucket in self._buckets:
            self.communication.start()
            bucket.work.wait()
            self.communication.stop()
            bucket.finish(scale)
        self.is_corrupted = torch.stack([bucket.is_corrupted for bucket in self._buckets]).any()
        self.is_own_finite = torch.stack([bucket.is_finite for bucket in self._buckets]).all()

    def _take(self, group: "_Group") -> None:
        """A parameter of `group` got its gradient: once all of them have theirs, add these. All ranks or none."""
        group.num_missing -= 1
        if not group.num_missing:
            self._add(group)
            if self._is_last:
                self._send(self._scale, only_full=True)

    def _add(self, group: "_Group") -> None:
        if group.add(self._scale, self._is_last):
            self.add_entered([(self._groups[group], group.sums)])

    def _send(self, scale: Tensor, only_full: bool) -> None:
        for bucket in self._buckets:  # in the same order on every rank
            if bucket.work is None:
                if only_full and not all(group.is_counted for group in bucket.groups):
                    return
                bucket.send(scale)


class _Bucket:
    """Parameters whose gradients are sent together, the int64 sums of these, and their checksum."""

    is_corrupted: Tensor  # scalar bool on the device: the last sums have another checksum than was sent
    is_finite: Tensor  # the same: this rank's part of them is finite and small enough

    def __init__(self, params: list[nn.Parameter], limit: float, world: World):
        device, dtype = params[0].device, params[0].dtype
        chunk = CHUNK if device.type == "cpu" else BUCKET
        parts = _cut(params, chunk)
        sizes = [sum(map(nn.Parameter.numel, part)) for part in parts]
        lengths, counts = ([-(-size // unit) for size in sizes] for unit in (WIDTH, chunk))  # in rows; in chunks

        # what is sent: rows of sums, the number of ranks with a bad value, the checksum
        self._sent = torch.zeros(sum(lengths) * WIDTH + 2, dtype=torch.int64, device=device)
        self._num_bad, self._checksum = self._sent[-2:]
        grads = torch.empty(sum(sizes), dtype=dtype, device=device)

        # what it is made of
        self._columns = torch.zeros(sum(counts), WIDTH, dtype=torch.int64, device=device)  # sums of columns, by chunk
        self._weights = odd_numbers(self._columns.numel(), device).view_as(self._columns)
        self._limit, self._extremes = limit, torch.zeros(len(parts), 2, dtype=dtype, device=device)  # of all values
        rows = self._sent[:-2].view(-1, WIDTH).split(lengths)
        self.groups = [_Group(*each, chunk) for each in zip(
            parts, rows, self._columns.split(counts), grads.split(sizes), self._extremes, strict=True)]
        self.work: dist.Work | None = None  # a sum over ranks that has begun
        self._rank, self._stamps = world.rank, range(world.world_size)  # by rank; no two of a run are equal

    def send(self, scale: Tensor) -> None:
        """Start to sum over ranks. Collective."""
        for group in self.groups:
            group.complete()
        (low, high), limit = self._extremes.aminmax(), self._limit * scale
        self.is_finite = (low >= -limit) & (high <= limit)  # NaN if any value is
        self._num_bad.copy_(~self.is_finite)
        self._stamps = range(self._stamps.stop, self._stamps.stop + len(self._stamps))
        self._checksum.copy_(self._weighed() + self._stamps[self._rank])
        self.work = dist.all_reduce(self._sent, async_op=True)

    def finish(self, scale: Tensor) -> None:
        """Write the sums over ranks into the gradients, and prepare for the next step."""
        factor = torch.where(self._num_bad > 0, torch.inf, scale / GRID)
        for group in self.groups:
            group.finish(factor)
        self.is_corrupted = self._weighed() + sum(self._stamps) != self._checksum
        self.work = None

    def _weighed(self) -> Tensor:
        """The checksum of the sums and of the number of bad ranks, without a stamp: scalar int64."""
        return (self._columns * self._weights).sum() + self._num_bad


class _Group:
    """Parameters of a bucket whose gradients are added at once: a few large operations instead of many small ones."""

    def __init__(self, params: list[nn.Parameter], rows: Tensor, columns: Tensor, grads: Tensor, extremes: Tensor,
                 chunk: int):
        """rows: [R, WIDTH] int64, the sums, and zeros up to the end of the last row. columns: [chunks, WIDTH] int64,
        what the rows of each chunk add up to. grads: [N], what the sums become. extremes: [2], of this rank's values.
        """
        self.params, self._extremes, self._chunk, self._grads = params, extremes, chunk, grads
        self.sums = rows.view(-1)[:len(grads)]
        self._chunks = [*zip(self.sums.split(chunk), rows.split(chunk // WIDTH), columns, strict=True)]
        # A gradient has the strides of its parameter (channels_last, say); in memory order it is flat without a copy.
        parts = grads.split([param.numel() for param in params])
        self._views = [part.as_strided(param.shape, torch.empty_like(param, device="meta").stride())
                       for part, param in zip(parts, params, strict=True)]
        self.used: set[int] = set()  # indices of params that have had a gradient in any step, or must have one
        self.num_missing, self._is_added = len(params), False
        self.is_counted = False  # the sums have what this rank's last micro-batch adds, and so have the columns

    def add(self, scale: Tensor, is_last: bool) -> bool:
        """Add the gradients that are there to the sums, and forget them: the next ones start from nothing.

        Returns whether there was any. Factors are powers of two: only round_ rounds.
        """
        found = {index for index, param in enumerate(self.params) if param.grad is not None}
        if not found:
            return False
        flat = [self._flat_grad(index) if index in found else param.new_zeros(param.numel())
                for index, param in enumerate(self.params)]
        grads, factor = torch.cat(flat) if len(flat) > 1 else flat[0], GRID / scale
        low, high = self._extremes
        if not self._is_added:
            self._extremes.zero_()
        for values, (sums, rows, columns) in zip(grads.split(self._chunk), self._chunks, strict=True):
            lowest, highest = values.aminmax()  # NaN if any value is
            torch.minimum(low, lowest, out=low)
            torch.maximum(high, highest, out=high)
            rounded = (values * factor).round_()
            if self._is_added:
                sums += rounded.long()
            else:
                sums.copy_(rounded)
            if is_last:
                torch.sum(rows, 0, out=columns)
        for param in self.params:
            param.grad = None
        self.used |= found
        self.num_missing, self._is_added, self.is_counted = len(self.params), True, is_last
        return True

    def complete(self) -> None:
        """Make the sums and their columns those of this step, if this rank's last micro-batch has added nothing."""
        if not self._is_added:
            self.sums.zero_()
            self._extremes.zero_()
        if not self.is_counted:
            for _, rows, columns in self._chunks:
                torch.sum(rows, 0, out=columns)
        self._is_added = self.is_counted = False

    def finish(self, factor: Tensor) -> None:
        """Make the sums the gradients, times factor; and the columns those of the sums."""
        for values, (sums, rows, columns) in zip(self._grads.split(self._chunk), self._chunks, strict=True):
            values.copy_(sums).mul_(factor)
            torch.sum(rows, 0, out=columns)
        for index in self.used:
            self.params[index].grad = self._views[index]

    def _flat_grad(self, index: int) -> Tensor:
        grad, view = self.params[index].grad.detach(), self._views[index]
        if grad.stride() != view.stride():
            grad = torch.empty_like(view).copy_(grad)
        return grad.as_strided([grad.numel()], [1])


def _cut(params: list[nn.Parameter], size: int) -> list[list[nn.Parameter]]:
    """Parts of `params`, each of one dtype, with at most `size` values, or with one parameter that has more."""
    parts: list[list[nn.Parameter]] = []
    for param in params:
        is_full = parts and sum(map(nn.Parameter.numel, parts[-1])) + param.numel() > size
        if not parts or is_full or parts[-1][0].dtype != param.dtype:
            parts.append([])
        parts[-1].append(param)
    return parts
