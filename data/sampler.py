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
from utils.errors import UserError
from utils.run import Run
from utils.seed import derive_seed

AUTO_LIMIT = 64  # samples in a micro-batch of `--micro-batch-size auto`
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

        def suits(plan: BatchPlan) -> bool:
            return plan.num_micro_batches >= world_size and (plan.sizes[0] >= 2 or not needs_two)

        if suits(self):
            return
        sizes = [size for size in range(1, min(batch, samples) + 1) if suits(cut(samples, batch, size))]
        if world_size > count:
            raise UserError(
                f"--global-batch-size {batch} makes {count} micro-batches of up to {self.sizes[1]} samples: work for {count} processes,"
                f" and there are {world_size}; use {f'--micro-batch-size {sizes[-1]} or smaller, ' if sizes else ''}"
                "a larger --global-batch-size, or fewer processes")
        raise UserError(
            f"--global-batch-size {batch} in {count} micro-batches leaves {self.sizes[0]} samples in one of them ({samples} training"
            f" samples), and BatchNorm needs two; use {f'--micro-batch-size {sizes[0]} or larger, ' if sizes else ''}"
            "another --global-batch-size, or fewer processes")


def cut(num_samples: int, global_batch_size: int, micro_batch_size: int) -> BatchPlan:
    """The plan in which no micro-batch has more than `micro_batch_size` samples: M = ceil(min(B, N) / micro_batch_size)."""
    return BatchPlan(num_samples, global_batch_size, -(-min(global_batch_size, num_samples) // micro_batch_size))


def settle_plan(config: BatchOptions, given: frozenset[str], num_samples: int, model: nn.Module, run: Run, world: World) -> BatchPlan:
    """The plan of this run: its number of micro-batches is resolved at the first start and kept. Raises UserError (64).

    auto: the smallest multiple of the number of processes that keeps micro-batches within AUTO_LIMIT samples. For more processes
    later a cut that was not given is made finer; one that was given is the user's, who is told.
    """
    batch, size = config.global_batch_size, config.micro_batch_size
    is_given = "micro_batch_size" in given and size != "auto"

    def derive() -> int:
        if size != "auto":
            return cut(num_samples, batch, size).num_micro_batches
        return world.world_size * -(-min(batch, num_samples) // (AUTO_LIMIT * world.world_size))

    count = run.settle("micro_batches", derive() if is_given else "auto", derive)
    if world.world_size > count and not is_given:
        count = run.kept["micro_batches"] = count * -(-world.world_size // count)
        run.note(f"{world.world_size} processes: a global batch is cut into {count} micro-batches from here")
    plan = BatchPlan(num_samples, batch, count)
    plan.check(world.world_size, needs_two=any(isinstance(module, nn.modules.batchnorm._NormBase) for module in model.modules()))
    return plan


@dataclass(frozen=True)
class MicroBatch:
    """What a loader is asked for: micro-batch `number` of a global batch, as indices into the training set."""

    epoch: int
    number: int
    indices: tuple[int, ...]
    is_stand_in: bool  # there was no sample left for it: one sample of weight 0, so that all ranks meet


class ElasticDistributedSampler(DistributedSampler):
    """torch's DistributedSampler without its padding and dropping; it starts anywhere, for any number of ranks.

    An item is one global batch: this rank's micro-batches of it. set_position takes the place of set_epoch.
    lengths: [N] tokens of the samples, for batches of similar ones; None where all are alike.
    """

    def __init__(self, plan: BatchPlan, rank: int, world_size: int, seed: int, lengths: Tensor | None = None):
        super().__init__(range(plan.num_samples), num_replicas=world_size, rank=rank, shuffle=True, seed=seed)
        self.plan, self._lengths, self._start, self._order = plan, lengths, 0, None

    def set_position(self, epoch: int, start: int = 0) -> None:
        """The next iteration goes through `epoch` from position `start`, the beginning of a global batch."""
        if epoch != self.epoch or self._order is None:
            self._order = epoch_order(self.seed, epoch, self.plan.num_samples)
            if self._lengths is not None:
                self._order = bucketed(self._order, self._lengths, self.plan, derive_seed(self.seed, "buckets", epoch))
        self.epoch, self._start = epoch, start

    def indices(self, start: int) -> Tensor:
        """Indices into the training set of the whole global batch that begins at `start`; the same on every rank."""
        return self._order[start : self.plan.end(start)]

    def num_tokens(self, start: int) -> int:
        """Tokens of that batch; 0 where samples have none."""
        return 0 if self._lengths is None else int(self._lengths[self.indices(start)].sum())

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        start = self._start
        while start < self.plan.num_samples:
            yield [self._micro_batch(start, number) for number in range(self.rank, self.plan.num_micro_batches, self.num_replicas)]
            start = self.plan.end(start)

    def __len__(self) -> int:
        return self.plan.steps_per_epoch  # of a whole epoch

    def _micro_batch(self, start: int, number: int) -> MicroBatch:
        positions = self.plan.positions(start, number)
        taken = positions if len(positions) else range(start, start + 1)
        indices = self._order[taken.start : taken.stop : taken.step]
        return MicroBatch(self.epoch, number, tuple(indices.tolist()), is_stand_in=len(positions) == 0)


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

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        for number in range(self.rank, len(self) * self.world_size, self.world_size):
            is_surplus = number >= self.num_batches
            start = 0 if is_surplus else number * self.batch_size
            stop = min(start + self.batch_size, self.num_samples)
            yield [MicroBatch(0, number, tuple(range(start, stop)), is_stand_in=is_surplus)]

    def __len__(self) -> int:
        return -(-self.num_batches // self.world_size)
