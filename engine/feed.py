"""The feed of a training: global batches in order, this rank's micro-batches of each as they are loaded.

Loading goes on across the ends of epochs and during evaluations, so that no epoch begins with a wait.
"""

from collections.abc import Iterator
from itertools import islice

from torch.utils.data import DataLoader

from data.batch import GlobalBatch
from data.loader import BadSamples, MicroBatchDataset
from data.plan import BatchPlan
from data.sampler import ElasticDistributedSampler
from engine.start import Start
from utils.distributed.deadlines import MARGIN_S
from utils.rundir.clock import Clock
from utils.rundir.state import Progress, TrainState

REREAD = 128  # samples of each set, at a start


class Feed:
    """Made once the position is known; goes on to the end of the run."""

    def __init__(self, start: Start, loader: DataLoader, progress: Progress, bad_samples: BadSamples,
                 clock: Clock):
        self.samples: MicroBatchDataset = loader.dataset
        self.sampler: ElasticDistributedSampler = loader.sampler
        self.plan: BatchPlan = loader.sampler.plan
        self._task, self._bad_samples, self._watchdog = start.task, bad_samples, start.watchdog
        epochs = start.run.resolved.epochs - progress.epoch  # the current one included
        self.sampler.set_position(progress.epoch, progress.sample_offset, epochs)

        # limits; torch.compile compiles anew for a batch of a width that it has not met, which may be at any step
        limits = start.config.faults
        self._limit_s = limits.section_timeout
        self._next_s = limits.section_timeout if start.config.device.compile else limits.step_timeout

        # The iterator is made now: it forks, which is better done while no thread writes a checkpoint.
        items = clock.waiting(iter(loader) if self.sampler.share else ())
        self._items = self._watchdog.watch(items, "training", self._limit_s, self._next_s, self.samples.reading)

    def rest_of_epoch(self, progress: Progress) -> Iterator[GlobalBatch]:
        """The global batches from the position on to the end of its epoch."""
        epoch, start, num_own = progress.epoch, progress.sample_offset, len(self.sampler.share)
        while start < self.plan.num_samples:
            end = self.plan.end(start)
            if not num_own:  # the others have one micro-batch each: a limit for its data, and one for its work
                self._watchdog.enter("waiting for the ranks that compute", 2 * (self._limit_s + MARGIN_S))
            indices = self.sampler.indices(epoch, start)
            yield GlobalBatch(
                micro_batches=map(self._bad_samples.check, islice(self._items, num_own)), num_own=num_own,
                num_micro_batches=self.plan.num_micro_batches, num_samples=end - start,
                num_tokens=self.sampler.num_tokens(indices), normalizer=self._task.normalizer(indices), epoch=epoch,
                end=(epoch + 1, 0) if end == self.plan.num_samples else (epoch, end))
            start, self._limit_s = end, self._next_s


def end_if_samples_changed(start: Start, state: TrainState, bad_samples: BadSamples) -> None:
    """Read some samples that the run has used again; each is compared at its next use anyway. Collective.

    Raises UserError (65) on every rank if one has changed; one that cannot be read is left to the training.
    """
    world, sets = start.world, {"train": start.task.train_set, "val": start.task.eval_set}

    def reread() -> None:
        for name, digests in state.digests.items():
            chosen = digests.some_used(REREAD)[world.rank::world.world_size]
            bad_samples.changed += digests.changed({index: sets[name].digest(index) for index in chosen})

    world.everywhere(reread)  # Collective.
    if any(world.gather(bad_samples.has_stopped())):  # Collective.
        bad_samples.stop(world)  # Collective.
