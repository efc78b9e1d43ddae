"""The feed of a training: global batches in order, this rank's micro-batches of each as they are loaded.

Loading goes on across the ends of epochs and during evaluations, so that no epoch begins with a wait.
"""

from collections.abc import Iterator
from itertools import islice

from torch.utils.data import DataLoader

from data.batch import Batch, GlobalBatch
from data.loader import BadSamples, MicroBatchDataset
from data.plan import BatchPlan
from data.sampler import ElasticDistributedSampler
from models.tasks.base import Task
from utils.distributed.deadlines import MARGIN_S
from utils.distributed.watchdog import Watchdog
from utils.rundir.checkpoint import Progress
from utils.rundir.throughput import Throughput
from utils.settings.config import FaultOptions


class Feed:
    """See above. Made once the position is known; goes on for `epochs` epochs, the current one included."""

    def __init__(self, task: Task, loader: DataLoader, progress: Progress, epochs: int, bad_samples: BadSamples,
                 throughput: Throughput, watchdog: Watchdog, limits: FaultOptions, is_compiled: bool):
        self.samples: MicroBatchDataset = loader.dataset
        self.sampler: ElasticDistributedSampler = loader.sampler
        self.plan: BatchPlan = loader.sampler.plan
        self._task, self._bad_samples, self._watchdog = task, bad_samples, watchdog
        self.sampler.set_position(progress.epoch, progress.sample_offset, epochs)
        # torch.compile compiles anew where a batch has a width that it has not met, which may be at any step.
        first_s, self._next_s = limits.start_timeout, limits.start_timeout if is_compiled else limits.step_timeout
        self._limit_s = first_s
        # The iterator is made now: it forks, which is better done while no thread writes a checkpoint.
        items = iter(loader) if self.sampler.share else iter(())
        self._items = watchdog.watch(throughput.waiting(items), "training", first_s, self._next_s, self.samples.reading)

    def rest_of_epoch(self, progress: Progress) -> Iterator[GlobalBatch]:
        """The global batches from the position on to the end of its epoch."""
        sampler, share, epoch, start = self.sampler, len(self.sampler.share), progress.epoch, progress.sample_offset
        while start < self.plan.num_samples:
            indices, end = sampler.indices(epoch, start), self.plan.end(start)
            if not share:  # the others have one micro-batch each: a limit for its data, and one for its work
                self._watchdog.enter("waiting for the ranks that compute", 2 * (self._limit_s + MARGIN_S))
            taken: list[tuple[int, tuple[int, ...]]] = []
            yield GlobalBatch(
                self._micro_batches(share, taken), share, self.plan.num_micro_batches, end - start,
                sampler.num_tokens(indices), self._task.normalizer(indices), epoch,
                (epoch + 1, 0) if end == self.plan.num_samples else (epoch, end), taken)
            start, self._limit_s = end, self._next_s

    def _micro_batches(self, count: int, taken: list[tuple[int, tuple[int, ...]]]) -> Iterator[Batch]:
        for micro_batch in islice(self._items, count):
            micro_batch = self._bad_samples.check(micro_batch)
            taken.append((micro_batch.index, micro_batch.indices))
            yield micro_batch
