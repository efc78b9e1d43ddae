"""Order of samples: a pure function of (seed, epoch), and its cut into global batches and micro-batches.

The micro-batch is the unit of computation; ranks only share micro-batches out. So what a step computes does not depend on
how many ranks compute it, and a position in an epoch is one number: how many samples came before.
Source of the order: torch.utils.data.DistributedSampler, whose order a fresh start reproduces wherever torch's is exact.
Legend: N samples, B samples per global batch, M micro-batches per global batch.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.data import DistributedSampler

from utils.config import BatchOptions
from utils.distributed import World
from utils.errors import UserError, some
from utils.run import Run
from utils.seed import derive_seed

AUTO_LIMIT = 64  # samples in a micro-batch of `--micro-batch-size auto`
INVARIANT_SHARES = 8  # the same where the number of processes must not matter: an eighth of the global batch, ...
INVARIANT_LEAST = {True: 16, False: 4}  # ... but at least as many samples, with and without BatchNorm ...
INVARIANT_LIMIT = 32  # ... and at most as many
FORMER_EVAL_BATCH = 64  # samples in an evaluation batch, before that was a setting
WINDOW = 50  # batches whose samples are sorted by length together


def epoch_order(seed: int, epoch: int, num_samples: int) -> Tensor:
    """The order of epoch `epoch`: torch's own permutation of range(N), [N] int32 (int64 above 2^31)."""
    generator = torch.Generator()
    generator.manual_seed(seed + epoch)
    order = torch.randperm(num_samples, generator=generator)
    return order.to(torch.int32) if num_samples < 2**31 else order


def bucketed(order: Tensor, lengths: Tensor, plan: "BatchPlan", seed: int) -> Tensor:
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
class BatchPlan:
    """How an epoch is cut; depends on (N, B, M) alone, never on ranks.

    N = qB + t. t = 0: q batches of B. q = 0: one batch of N. Else q - 1 of B, then two of the ceil and the floor of (B + t) / 2:
    every sample once, in ceil(N / B) steps, no batch below B / 2. Micro-batch v takes the positions p of its batch with p mod M = v.
    """

    num_samples: int
    global_batch_size: int
    num_micro_batches: int

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in an epoch: ceil(N / B)."""
        return -(-self.num_samples // self.global_batch_size)

    def end(self, start: int) -> int:
        """The end of the global batch that begins at position `start` of the epoch's order."""
        whole, tail = divmod(self.num_samples, self.global_batch_size)
        if tail and whole and start == (whole - 1) * self.global_batch_size:
            return start + -(-(self.global_batch_size + tail) // 2)
        return min(start + self.global_batch_size, self.num_samples)

    @property
    def starts(self) -> list[int]:
        """Where the global batches of an epoch begin."""
        starts = [0]
        while (end := self.end(starts[-1])) < self.num_samples:
            starts.append(end)
        return starts

    def positions(self, start: int, number: int) -> range:
        """Positions of micro-batch `number` of the global batch that begins at `start`; empty where there are too few samples."""
        return range(start + (number - start) % self.num_micro_batches, self.end(start), self.num_micro_batches)

    @property
    def sizes(self) -> tuple[int, int]:
        """Samples in the smallest and in the largest micro-batch of an epoch (0 = a stand-in of weight 0 takes its place)."""
        whole, tail = divmod(self.num_samples, self.global_batch_size)
        smallest = largest = min(self.global_batch_size, self.num_samples)
        if whole and tail:
            smallest = (self.global_batch_size + tail) // 2
            largest = self.global_batch_size if whole > 1 else self.num_samples - smallest
        return smallest // self.num_micro_batches, -(-largest // self.num_micro_batches)

    def check(self, world_size: int, needs_two: bool) -> None:
        """Raise UserError (64) where ranks would have no work, or (needs_two: BatchNorm) a micro-batch fewer than two samples."""
        batch, count, samples = self.global_batch_size, self.num_micro_batches, self.num_samples
        if world_size > count:
            sizes = self.sizes_for(world_size, needs_two)
            raise UserError(
                f"--global-batch-size {batch} makes {count} micro-batches of up to {self.sizes[1]} samples: work for {count} processes,"
                f" and there are {world_size}; use {f'--micro-batch-size {sizes[-1]} or smaller, ' if sizes else ''}"
                "a larger --global-batch-size, or fewer processes")
        if needs_two and self.sizes[0] < 2:
            sizes = self.sizes_for(world_size, needs_two)
            raise UserError(
                f"--global-batch-size {batch} in {count} micro-batches leaves {self.sizes[0]} samples in one of them ({samples} training"
                f" samples), and BatchNorm needs two; use {f'--micro-batch-size {sizes[0]} or larger, ' if sizes else ''}"
                "another --global-batch-size, or fewer processes")

    def sizes_for(self, world_size: int, needs_two: bool) -> list[int]:
        """The micro-batch sizes that give every rank work and (needs_two) every micro-batch two samples, ascending."""
        plans = {size: cut(self.num_samples, self.global_batch_size, size)
                 for size in range(1, min(self.global_batch_size, self.num_samples) + 1)}
        return [size for size, plan in plans.items()
                if plan.num_micro_batches >= world_size and (plan.sizes[0] >= 2 or not needs_two)]


def cut(num_samples: int, global_batch_size: int, micro_batch_size: int) -> BatchPlan:
    """The plan in which no micro-batch has more than `micro_batch_size` samples: M = ceil(min(B, N) / micro_batch_size)."""
    return BatchPlan(num_samples, global_batch_size, -(-min(global_batch_size, num_samples) // micro_batch_size))


def settle_plan(
    config: BatchOptions, num_samples: int, model: nn.Module, is_invariant: bool, run: Run, world: World, fit: int | None = None
) -> BatchPlan:
    """The plan of this run: its number of micro-batches is resolved at the first start and kept. Raises UserError (64).

    is_invariant: see Strategy. Then `auto` does not look at the number of processes, and ranks may be without work. Else `auto`
    is the smallest multiple of the number of processes that keeps micro-batches within AUTO_LIMIT samples, and is cut finer for
    more processes later. fit: samples that do fit into the device's memory, where those of the plan before did not.
    """
    batch, size = min(config.global_batch_size, num_samples), config.micro_batch_size
    has_batch_norm = any(isinstance(module, nn.modules.batchnorm._NormBase) for module in model.modules())

    def derive() -> int:
        if is_invariant:
            return -(-batch // min(INVARIANT_LIMIT, max(INVARIANT_LEAST[has_batch_norm], -(-batch // INVARIANT_SHARES))))
        return world.world_size * -(-batch // ((fit or AUTO_LIMIT) * world.world_size))

    if fit:
        kept = run.kept.pop("micro_batches")
        run.note(f"out of memory: a global batch is cut into {derive()} micro-batches of at most {fit} samples instead of {kept}")
    if "micro_batches" in run.kept:
        run.kept.setdefault("eval_batch_size", FORMER_EVAL_BATCH)  # the run is of an earlier version
    count = run.settle("micro_batches", "auto" if size == "auto" else -(-batch // size), derive)
    if size == "auto" and world.world_size > count and not is_invariant:
        count = run.kept["micro_batches"] = count * -(-world.world_size // count)
        run.note(f"{world.world_size} processes: a global batch is cut into {count} micro-batches from here on:"
                 " not bit-exact from here")
    plan = BatchPlan(num_samples, config.global_batch_size, count)
    plan.check(min(world.world_size, count) if is_invariant else world.world_size, has_batch_norm)
    if world.world_size > count:
        sizes = plan.sizes_for(world.world_size, has_batch_norm)
        idle = some(str(rank) for rank in range(count, world.world_size))
        run.note(f"a global batch has {count} micro-batches, and there are {world.world_size} processes: rank {idle} only takes part"
                 f" in the sums; {f'--micro-batch-size {sizes[-1]}' if sizes else 'a larger --global-batch-size'} in a new run"
                 " gives every rank work")
    return plan


def settle_eval_batch(config: BatchOptions, plan: BatchPlan, run: Run) -> int:
    """Samples in an evaluation batch, kept from the first start on. auto: twice the micro-batch, at most AUTO_LIMIT."""
    return run.settle("eval_batch_size", config.eval_batch_size, lambda: min(AUTO_LIMIT, 2 * plan.sizes[1]))


@dataclass(frozen=True)
class MicroBatch:
    """What a loader is asked for: micro-batch `number` of a global batch, as indices into the training set."""

    epoch: int
    number: int
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
