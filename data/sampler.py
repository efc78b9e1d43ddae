"""Order of samples: a pure function of (seed, epoch), and its cut into global batches and micro-batches.

The micro-batch is the unit of computation; ranks only share micro-batches out. So what a step computes does not depend on
how many ranks compute it, and a position in an epoch is one number: how many samples came before.
Source of the order: torch.utils.data.DistributedSampler, whose order a fresh start reproduces wherever torch's is exact.
Legend: N samples, B samples per global batch, M micro-batches per global batch.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler

from data.plan import BatchPlan
from utils.numerics.seed import derive_seed

WINDOW = 50  # batches whose samples are sorted by length together


def epoch_order(seed: int, epoch: int, num_samples: int) -> Tensor:
    """The order of epoch `epoch`: torch's own permutation of range(N), [N] int32 (int64 above 2^31)."""
    generator = torch.Generator()
    generator.manual_seed(seed + epoch)
    order = torch.randperm(num_samples, generator=generator)
    return order.to(torch.int32) if num_samples < 2**31 else order


def bucketed(order: Tensor, lengths: Tensor, plan: BatchPlan, seed: int) -> Tensor:
    """`order` with samples of similar length in the same batch; a pure function of its arguments, and again a permutation.

    lengths: [N]. Of each WINDOW batches in turn, the samples are sorted by length and dealt out to the batches, these in random
    order: so a batch is of one length, the next one of any.
    """
    order, starts = order.clone(), plan.starts
    generator = torch.Generator().manual_seed(seed)
    for first in range(0, len(starts), WINDOW):
        window = starts[first:first + WINDOW]
        begin, end = window[0], plan.end(window[-1])
        by_length = order[begin:end][lengths[order[begin:end]].argsort(stable=True)]
        taken = 0
        for number in torch.randperm(len(window), generator=generator).tolist():
            size = plan.end(window[number]) - window[number]
            order[window[number]:window[number] + size] = by_length[taken:taken + size]
            taken += size
    return order


@dataclass(frozen=True)
class MicroBatch:
    """What a loader is asked for: micro-batch `number` of a global batch, as indices into the training set."""

    epoch: int
    index: int
    indices: tuple[int, ...]
    is_stand_in: bool  # there was no sample left for it: one sample of weight 0, so that all ranks meet


class ElasticDistributedSampler(DistributedSampler):
    """torch's DistributedSampler without its padding and dropping; it starts anywhere, for any number of ranks.

    An item is one micro-batch, so that what is loaded at once does not grow with the global batch; this rank has `share` of
    each global batch. set_position takes the place of set_epoch.
    lengths: [N] tokens of the samples, for batches of similar ones; None where all are alike.
    """

    def __init__(self, plan: BatchPlan, rank: int, world_size: int, seed: int, lengths: Tensor | None = None):
        super().__init__(range(plan.num_samples), num_replicas=world_size, rank=rank, shuffle=True, seed=seed)
        self.plan, self._lengths, self._start, self._epochs = plan, lengths, 0, 1
        self._orders: dict[int, Tensor] = {}  # of two epochs: loading is ahead of training

    @property
    def share(self) -> range:
        """Numbers of this rank's micro-batches of every global batch; empty where there are more ranks than micro-batches."""
        return range(self.rank, self.plan.num_micro_batches, self.num_replicas)

    def set_position(self, epoch: int, start: int = 0, epochs: int = 1) -> None:
        """The next iteration goes through `epochs` epochs: `epoch` from position `start`, the beginning of a global batch, ..."""
        self.epoch, self._start, self._epochs = epoch, start, epochs

    def order(self, epoch: int) -> Tensor:
        """The order of an epoch, [N], the same on every rank."""
        if epoch not in self._orders:
            order = epoch_order(self.seed, epoch, self.plan.num_samples)
            if self._lengths is not None:
                order = bucketed(order, self._lengths, self.plan, derive_seed(self.seed, "buckets", epoch))
            self._orders = {each: self._orders[each] for each in list(self._orders)[-1:]} | {epoch: order}
        return self._orders[epoch]

    def indices(self, epoch: int, start: int) -> Tensor:
        """Indices into the training set of the whole global batch that begins at `start`; the same on every rank."""
        return self.order(epoch)[start : self.plan.end(start)]

    def num_tokens(self, indices: Tensor) -> int:
        """Tokens of these samples; 0 where samples have none."""
        return 0 if self._lengths is None else int(self._lengths[indices].sum())

    def __iter__(self) -> Iterator[MicroBatch]:
        epoch, start, end = self.epoch, self._start, self.epoch + self._epochs
        while self.share and epoch < end:
            yield from (self.micro_batch(epoch, start, number) for number in self.share)
            start = self.plan.end(start)
            if start == self.plan.num_samples:
                epoch, start = epoch + 1, 0

    def __len__(self) -> int:
        return self.plan.steps_per_epoch * len(self.share)  # of a whole epoch

    def micro_batch(self, epoch: int, start: int, number: int) -> MicroBatch:
        """Micro-batch `number` of the global batch that begins at position `start` of an epoch."""
        positions = self.plan.positions(start, number)
        taken = positions if len(positions) else range(start, start + 1)
        indices = self.order(epoch)[taken.start : taken.stop : taken.step]
        return MicroBatch(epoch, number, tuple(indices.tolist()), is_stand_in=len(positions) == 0)


@dataclass(frozen=True)
class EvaluationSampler:
    """Batches of a constant size, batch j on rank j mod W. Every rank gets ceil(batches / W); a surplus one has weight 0."""

    num_samples: int
    batch_size: int
    rank: int
    world_size: int

    @property
    def num_batches(self) -> int:
        """Batches over all ranks, without surplus ones."""
        return -(-self.num_samples // self.batch_size)

    def __iter__(self) -> Iterator[MicroBatch]:
        for number in range(self.rank, len(self) * self.world_size, self.world_size):
            is_surplus = number >= self.num_batches
            start = 0 if is_surplus else number * self.batch_size
            stop = min(start + self.batch_size, self.num_samples)
            yield MicroBatch(0, number, tuple(range(start, stop)), is_stand_in=is_surplus)

    def __len__(self) -> int:
        return -(-self.num_batches // self.world_size)
