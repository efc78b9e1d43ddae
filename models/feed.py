"""The feed of a training: global batches in order, this rank's micro-batches of each as they are loaded.

Loading goes on across the ends of epochs and during evaluations, so that no epoch begins with a wait.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from torch.utils.data import DataLoader

from data.loader import MicroBatchDataset
from data.sampler import ElasticDistributedSampler
from models.tasks.base import Batch, Task
from utils.checkpoint import Progress
from utils.config import FaultOptions
from utils.throughput import Throughput
from utils.watchdog import MARGIN_S, Watchdog


@dataclass(frozen=True)
class GlobalBatch:
    """What one optimizer step learns from: this rank's micro-batches, and what every rank knows of the whole by arithmetic."""

    micro_batches: Iterator[Batch]  # to go through once
    num_micro_batches: int  # of this rank; 0 where there are more ranks than micro-batches
    num_samples: int  # of all ranks, as all that follows
    num_tokens: int  # 0 where samples have none
    weight: float  # samples or predicted tokens: what losses are divided by
    end: int  # the position in the epoch's order after it


class Feed:
    """See above. Made once the position is known; goes on for `epochs` epochs, the current one included."""

    def __init__(self, task: Task, loader: DataLoader, progress: Progress, epochs: int, throughput: Throughput,
                 watchdog: Watchdog, limits: FaultOptions, is_compiled: bool):
        self.samples: MicroBatchDataset = loader.dataset
        self.sampler: ElasticDistributedSampler = loader.sampler
        self._task, self._watchdog = task, watchdog
        self.sampler.set_position(progress.epoch, progress.sample_offset, epochs)
        # torch.compile compiles anew where a batch has a width that it has not met, which may be at any step.
        first_s, self._next_s = limits.start_timeout, limits.start_timeout if is_compiled else limits.step_timeout
        self._limit_s = first_s
        items = iter(loader) if self.sampler.share else iter(())  # now: it forks, better while no thread writes a checkpoint
        self._items = watchdog.each(throughput.waiting(items), "training", first_s, self._next_s, self.samples.reading)

    def rest_of_epoch(self, progress: Progress) -> Iterator[GlobalBatch]:
        """The global batches from the position on to the end of its epoch."""
        sampler, share, start = self.sampler, self.sampler.share, progress.sample_offset
        while start < sampler.plan.num_samples:
            indices, end = sampler.indices(progress.epoch, start), sampler.plan.end(start)
            if not share:  # the others have one micro-batch each: a limit for its data, and one for its work
                self._watchdog.expect("waiting for the ranks that compute", 2 * (self._limit_s + MARGIN_S))
            yield GlobalBatch(islice(self._items, len(share)), len(share), end - start, sampler.num_tokens(indices),
                              self._task.weight(indices), end)
            start, self._limit_s = end, self._next_s
