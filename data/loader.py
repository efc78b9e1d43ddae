"""Loading: one item is one micro-batch, so that memory and waits do not grow with the global batch."""

import mmap
import os
import resource
import shutil
import socket
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from data.batch import Batch, SampleSet
from data.sampler import MicroBatchRequest
from utils.distributed.signals import end_worker_with
from utils.distributed.world import World
from utils.errors import Exit, RankError, UserError, counted, some
from utils.rundir.digests import Digests


class MicroBatchDataset(Dataset):
    """A view of `samples` whose items are whole micro-batches, so that a worker collates what is computed together."""

    def __init__(self, samples: SampleSet, collate: Callable[[Sequence[Any]], Batch], workers: int):
        self._samples, self._collate = samples, collate
        # 1 + the index of the sample that is being read: by this process, then by each worker. Forked workers share it.
        self._reading = memoryview(mmap.mmap(-1, 8 * (workers + 1))).cast("q")

    def __getitem__(self, wanted: MicroBatchRequest) -> Batch:
        batch = self.collated(wanted.epoch, wanted.indices)
        if get_worker_info():  # torch would do it in a thread whose errors reach nobody: the batch would never come
            for tensor in batch.tensors:
                tensor.share_memory_()  # raises RuntimeError if there is too little
        if wanted.is_stand_in:  # if its sample is bad, the micro-batch that really has it reports that
            batch.sample_weight.zero_()
            return replace(batch, index=wanted.index, bad=())
        return replace(batch, index=wanted.index, indices=wanted.indices)

    def collated(self, epoch: int, indices: Sequence[int]) -> Batch:
        """Samples as one batch."""
        worker = get_worker_info()
        place = worker.id + 1 if worker else 0
        samples = []
        for index in indices:
            self._reading[place] = index + 1
            samples.append(self._samples[epoch, index])
        self._reading[place] = 0
        return self._collate(samples)

    def name(self, index: int) -> str:
        """What a sample is called in messages."""
        return self._samples.name(index)

    def reading(self) -> str:
        """What is being read at this moment, for a message. May be called from any thread of the main process."""
        names = [self.name(index - 1) for index in self._reading.tolist() if index]
        return f" ({some(names)} is being read)" if names else ""


def build_loader(
    samples: SampleSet, collate: Callable[[Sequence[Any]], Batch], sampler: Iterable[MicroBatchRequest], workers: int,
    world: World
) -> DataLoader:
    """A DataLoader whose items are Batches. Workers, if any, live as long as the loader."""
    _raise_limit_of_open_files()
    return DataLoader(
        MicroBatchDataset(samples, collate, workers),
        batch_size=None,  # an item is a batch already, which torch's default_convert returns as it is
        sampler=sampler,
        num_workers=workers,
        persistent_workers=workers > 0,
        # Forked workers share the index without a copy. Explicit, because Python 3.14 changed the default.
        multiprocessing_context="fork" if workers else None,
        # torch's workers check on their parent every 5 s, and not while a read hangs.
        worker_init_fn=partial(end_worker_with, os.getpid()),
        generator=torch.Generator(),  # its own: else making an iterator would draw from torch's default one
        pin_memory=world.device.type != "cpu")


def num_workers(given: int | str, world: World) -> int:
    """Data loading processes per process. auto: spare cores, at most 1 on the CPU, which computes, too; 0 without shm.

    On an accelerator at most 16, and above 8 only as many as find 512 MiB of shared memory each for what they have read
    ahead (three micro-batches of 256 images of 224 px, and as many to evaluate, take half of it).
    """
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        if given in ("auto", 0):
            return 0
        raise RankError(f"--workers {given}: data loading processes need {shared}, and {socket.gethostname()} has none"
                        " that can be written to; mount it, or use --workers 0", Exit.IO)
    if given != "auto":
        return int(given)
    spare, room = world.cores - 1, shutil.disk_usage(shared).total
    most = max(8, min(16, room // 2**29 // world.local_world_size))
    return max(0, min(1, spare)) if world.device.type == "cpu" else max(1, min(most, spare))


_TEXT = {"encoding": "utf-8", "errors": "surrogateescape"}  # file names may be in any encoding


class BadSamples:
    """What happens to samples that cannot be read, or are not what they were when the run used them.

    policy "skip": their sample_weight is already 0; they are listed in `file`, without one on standard error.
    policy "stop": the step is made void, every rank learns of it (Agreement), and all end together (65).
    Those of the other kind always stop the run in this way. digests: of each set; without, nothing is compared.
    """

    def __init__(self, policy: str, file: Path | None, digests: Mapping[str, Digests] = MappingProxyType({})):
        self._policy, self._file, self._digests = policy, file, digests
        self._listed = set(file.read_text(**_TEXT).splitlines()) if file and file.exists() else set()
        self.stopped_by: list[str] = []  # "path: reason" of those that this rank met, if the policy is to stop
        self.changed: list[str] = []  # names of those of the other kind

    def check(self, batch: Batch, split: str = "train") -> Batch:
        """The batch of a set, after acting on its bad samples.

        If they must stop the run, its sample weights make the gradient NaN.
        """
        # stop
        unreadable = batch.bad if self._policy == "stop" else ()
        changed = self._digests[split].changed(batch.counted) if split in self._digests else []
        if unreadable or changed:
            self.stopped_by += unreadable
            self.changed += changed
            return replace(batch, sample_weight=torch.full_like(batch.sample_weight, torch.nan),
                           bad=(*batch.bad, *changed))

        # skip, and list what is new
        new = [line for line in batch.bad if line not in self._listed]
        self._listed.update(new)
        if new and self._file:
            with self._file.open("a", **_TEXT) as file:  # every rank appends its own, in one write
                file.write("".join(f"{line}\n" for line in new))
        elif new:
            print(*new, sep="\n", file=sys.stderr)
        return batch

    def note(self, read: Mapping[int, bytes], split: str = "train") -> None:
        """The run has used these samples of a set, with their digests."""
        if split in self._digests:
            self._digests[split].add(read)

    def has_stopped(self) -> bool:
        """Whether this rank met a sample that must stop the run."""
        return bool(self.stopped_by or self.changed)

    def stop(self, world: World) -> NoReturn:
        """End the run because some rank met bad samples. Collective. Raises UserError (65) on every rank."""
        by_rank = world.gather([self.stopped_by, self.changed])  # Collective.
        unreadable, changed = ([line for lines in each for line in lines] for each in zip(*by_rank, strict=True))
        found = unreadable or changed
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise UserError(
            f"cannot read {found[0]}{more}; repair or restore the file, and the same command continues; or skip such"
            " samples with --bad-samples skip" if unreadable else
            f"{found[0]}{more} is not what it was when this run used it: its name, label or bytes have changed; restore"
            " it, and the same command continues; or begin a new run with --fresh", Exit.BAD_DATA)

    def report(self, note: Callable[[str], None]) -> None:
        """Note how many were skipped, once, at the end."""
        if self._file and self._file.exists() and (lines := set(self._file.read_text(**_TEXT).splitlines())):
            note(f"skipped {counted(len(lines), 'unreadable sample')}, see {self._file}")


def _raise_limit_of_open_files() -> None:
    """Each tensor from a worker holds a file descriptor until it is freed; shells give 1,024 and allow more."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # the hard limit may be above what the kernel permits
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
