"""How an epoch is cut into global batches and micro-batches. Arithmetic alone: no rank, no number of processes.

The micro-batch is the unit of computation; ranks only share micro-batches out. So a position in an epoch is one number:
how many samples came before.
Legend: N samples, B samples per global batch, M micro-batches per global batch.

Tests: tests/unit/data/test_sampler.py
"""

from dataclasses import dataclass

from utils.errors import UserError, counted


@dataclass(frozen=True)
class BatchPlan:
    """How an epoch is cut; depends on (N, B, M) alone, never on ranks.

    N = qB + t. t = 0: q batches of B. q = 0: one batch of N. Else q - 1 batches of B, then two of ceil((B + t) / 2) and
    floor((B + t) / 2) samples. So every sample occurs once, in ceil(N / B) steps, and no batch is smaller than B / 2.
    Micro-batch v takes the positions p of the epoch's order, within the batch, with p mod M = v.
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

    def positions(self, start: int, index: int) -> range:
        """Positions of micro-batch `index` of the global batch that begins at `start`; empty if it has no sample."""
        return range(start + (index - start) % self.num_micro_batches, self.end(start), self.num_micro_batches)

    @property
    def sizes(self) -> tuple[int, int]:
        """Samples in the smallest and in the largest micro-batch of an epoch. 0: a stand-in replaces it."""
        whole, tail = divmod(self.num_samples, self.global_batch_size)
        smallest = largest = min(self.global_batch_size, self.num_samples)
        if whole and tail:
            smallest = (self.global_batch_size + tail) // 2
            largest = self.global_batch_size if whole > 1 else self.num_samples - smallest
        return smallest // self.num_micro_batches, -(-largest // self.num_micro_batches)

    def require_two(self) -> None:
        """Raise UserError (64) if a micro-batch has fewer samples than BatchNorm needs."""
        batch, count, smallest = self.global_batch_size, self.num_micro_batches, self.sizes[0]
        if smallest < 2:
            sizes = self.sizes_for(1, needs_two=True)
            raise UserError(
                f"--global-batch-size {batch} in {counted(count, 'micro-batch')} leaves {counted(smallest, 'sample')}"
                f" in one of them ({counted(self.num_samples, 'training sample')}), and BatchNorm needs two;"
                f" use {f'--micro-batch-size {sizes[0]}, ' if sizes else ''}"
                "another --global-batch-size")

    def sizes_for(self, world_size: int, needs_two: bool) -> list[int]:
        """The micro-batch sizes that give every rank work and (needs_two) every micro-batch two samples, ascending."""
        plans = {size: cut(self.num_samples, self.global_batch_size, size)
                 for size in range(1, min(self.global_batch_size, self.num_samples) + 1)}
        return [size for size, plan in plans.items()
                if plan.num_micro_batches >= world_size and (plan.sizes[0] >= 2 or not needs_two)]


def cut(num_samples: int, global_batch_size: int, micro_batch_size: int) -> BatchPlan:
    """The plan whose micro-batches have at most `micro_batch_size` samples: M = ceil(min(B, N) / micro_batch_size)."""
    return BatchPlan(num_samples, global_batch_size, -(-min(global_batch_size, num_samples) // micro_batch_size))
