"""Order of samples: a pure function of (seed, epoch), and its cut into global batches and micro-batches.

The micro-batch is the unit of computation; ranks only share micro-batches out. So a step computes the same on any
number of ranks, and a position in an epoch is one number: how many samples came before.
Source: torch.utils.data.DistributedSampler. A fresh start has its order wherever torch's own is exact.
Legend: N samples, B samples per global batch, M micro-batches per global batch, W ranks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler

from data.plan import BatchPlan
from utils.numerics.seed import derive_seed

WINDOW = 50  # see Lengths


@dataclass(frozen=True, eq=False)
class Lengths:
    """The samples' lengths, by which they are sorted, those of `window` batches together.

    WINDOW: the samples of a batch are of similar length. 1: a batch has samples of any lengths, and each of its
    micro-batches has as many tokens as the others, or nearly.
    """

    tokens: Tensor  # [N] of each sample
    window: int


def epoch_order(seed: int, epoch: int, num_samples: int) -> Tensor:
    """The order of an epoch: torch's own permutation of range(N), [N] int32 (int64 above 2^31)."""
    generator = torch.Generator()
    generator.manual_seed(seed + epoch)
    order = torch.randperm(num_samples, generator=generator)
    return order.to(torch.int32) if num_samples < 2**31 else order


def bucketed(order: Tensor, lengths: Lengths, plan: BatchPlan, seed: int) -> Tensor:
    """`order` sorted by length within each window, again a permutation; a pure function of its arguments.

    What is sorted is dealt to the batches of the window in random order: the next batch may have any length.
    """
    order, starts = order.clone(), plan.starts
    generator = torch.Generator().manual_seed(seed)
    for first in range(0, len(starts), lengths.window):
        # sort
        window = starts[first:first + lengths.window]
        begin, end = window[0], plan.end(window[-1])
        by_length = order[begin:end][lengths.tokens[order[begin:end]].argsort(stable=True)]

        # deal
        num_dealt = 0
        for index in torch.randperm(len(window), generator=generator).tolist():
            start, size = window[index], plan.end(window[index]) - window[index]
            order[start:start + size] = by_length[num_dealt:num_dealt + size]
            num_dealt += size
    return order


@dataclass(frozen=True)
class MicroBatchRequest:
    """What a loader is asked for: micro-batch `index` of a global batch, as indices into the data set."""

    epoch: int
    index: int
    indices: tuple[int, ...]
    is_stand_in: bool  # no sample was left: it has one sample, with sample weight 0, so that all ranks meet


class ElasticDistributedSampler(DistributedSampler):
    """torch's DistributedSampler without its padding and dropping; it starts anywhere, with any number of ranks.

    An item is one micro-batch, so that the memory for loading does not grow with the global batch. This rank has the
    micro-batches `share` of each global batch. set_position replaces set_epoch.
    lengths: None if all samples are alike.
    """

    def __init__(self, plan: BatchPlan, rank: int, world_size: int, seed: int, lengths: Lengths | None = None):
        super().__init__(range(plan.num_samples), num_replicas=world_size, rank=rank, shuffle=True, seed=seed)
        self.plan, self._lengths, self._start, self._epochs = plan, lengths, 0, 1
        self.order = lru_cache(maxsize=2)(self.order)  # of two epochs, because loading is ahead of training

    @property
    def share(self) -> range:
        """Indices of this rank's micro-batches in a global batch; empty if there are more ranks than micro-batches."""
        return range(self.rank, self.plan.num_micro_batches, self.num_replicas)

    def set_position(self, epoch: int, start: int = 0, epochs: int = 1) -> None:
        """The next iteration goes through `epochs` epochs, from position `start` of `epoch`: a global batch's start."""
        self.epoch, self._start, self._epochs = epoch, start, epochs

    def order(self, epoch: int) -> Tensor:
        """The order of an epoch, [N], the same on every rank."""
        order = epoch_order(self.seed, epoch, self.plan.num_samples)
        if self._lengths is None:
            return order
        return bucketed(order, self._lengths, self.plan, derive_seed(self.seed, "buckets", epoch))

    def indices(self, epoch: int, start: int) -> Tensor:
        """Indices into the training set of the global batch that begins at `start`; the same on every rank."""
        return self.order(epoch)[start : self.plan.end(start)]

    def num_tokens(self, indices: Tensor) -> int:
        """Tokens of these samples; 0 for samples without tokens."""
        return 0 if self._lengths is None else int(self._lengths.tokens[indices].sum())

    def __iter__(self) -> Iterator[MicroBatchRequest]:
        epoch, start, end = self.epoch, self._start, self.epoch + self._epochs
        while self.share and epoch < end:
            yield from (self.micro_batch(epoch, start, index) for index in self.share)
            start = self.plan.end(start)
            if start == self.plan.num_samples:
                epoch, start = epoch + 1, 0

    def __len__(self) -> int:
        return self.plan.steps_per_epoch * len(self.share)  # of a whole epoch

    def micro_batch(self, epoch: int, start: int, index: int) -> MicroBatchRequest:
        """Micro-batch `index` of the global batch that begins at position `start` of an epoch."""
        positions = self.plan.positions(start, index)
        taken = positions if len(positions) else range(start, start + 1)
        indices = self.order(epoch)[taken.start : taken.stop : taken.step]
        return MicroBatchRequest(epoch, index, tuple(indices.tolist()), is_stand_in=len(positions) == 0)


@dataclass(frozen=True)
class EvaluationSampler:
    """Batches of one size, batch j on rank j mod W. Every rank gets ceil(batches / W).

    Surplus ones have sample weight 0.
    """

    num_samples: int
    batch_size: int
    rank: int
    world_size: int

    @property
    def num_batches(self) -> int:
        """Batches over all ranks, without surplus ones."""
        return -(-self.num_samples // self.batch_size)

    def __iter__(self) -> Iterator[MicroBatchRequest]:
        for index in range(self.rank, len(self) * self.world_size, self.world_size):
            is_surplus = index >= self.num_batches
            start = 0 if is_surplus else index * self.batch_size
            stop = min(start + self.batch_size, self.num_samples)
            yield MicroBatchRequest(0, index, tuple(range(start, stop)), is_stand_in=is_surplus)

    def __len__(self) -> int:
        return -(-self.num_batches // self.world_size)
