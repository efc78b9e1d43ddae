"""Loading: one item is this rank's micro-batches of one global batch, ready to be computed."""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from data.sampler import ElasticDistributedSampler, EvaluationSampler, MicroBatch
from utils.distributed import World
from utils.errors import Exit, RankError


class MicroBatchDataset(Dataset):
    """A view of `samples` whose items are whole micro-batches, so that a worker collates what is computed together."""

    def __init__(self, samples: Any, collate: Callable[[Sequence[Any]], Any]):
        self._samples, self._collate = samples, collate

    def __getitem__(self, wanted: MicroBatch) -> Any:
        batch = self._collate([self._samples[wanted.epoch, index] for index in wanted.indices])
        if wanted.is_stand_in:  # whoever has the sample itself reports it
            batch = replace(batch, weight=torch.zeros_like(batch.weight), bad=())
        return replace(batch, number=wanted.number)


def build_loader(
    samples: Any, collate: Callable, sampler: ElasticDistributedSampler | EvaluationSampler, workers: int, world: World
) -> DataLoader:
    """A DataLoader whose items are lists of Batch. Workers, if any, live for as many iterations as the loader."""
    return _Loader(
        MicroBatchDataset(samples, collate),
        batch_sampler=sampler,
        collate_fn=_as_it_is,
        num_workers=workers,
        persistent_workers=workers > 0,
        # fork is said explicitly: Python 3.14 changed the default, and workers share the index without a copy.
        multiprocessing_context="fork" if workers else None,
        worker_init_fn=_leave_signals_to_the_parent,
        generator=torch.Generator(),  # its own: making an iterator would draw from torch's otherwise
        pin_memory=world.device.type == "cuda")


def num_workers(given: int | str, world: World) -> int:
    """Data loading processes per process. auto: the cores that are left over, up to 8; on the CPU, which computes too, up to 1."""
    if given != "auto":
        return int(given)
    spare = len(os.sched_getaffinity(0)) // world.local_world_size - 1
    return max(1, min(8, spare)) if world.device.type == "cuda" else max(0, min(1, spare))


_TEXT = {"encoding": "utf-8", "errors": "surrogateescape"}  # file names may be in any encoding


class BadSamples:
    """What becomes of samples that cannot be read: `stop` ends the run (65), `skip` lists them in `file` (weight 0 is theirs already)."""

    def __init__(self, policy: str, file: Path | None):
        self._policy, self._file = policy, file
        self._listed = set(file.read_text(**_TEXT).splitlines()) if file and file.exists() else set()

    def check(self, batch: Any) -> None:
        """Act on the bad samples of a batch. Raises RankError, for only this rank has read them."""
        if batch.bad and self._policy == "stop":
            raise RankError(f"cannot read {batch.bad[0]}; repair or remove it, or pass --bad-samples skip", Exit.BAD_DATA)
        new = [line for line in batch.bad if line not in self._listed]
        self._listed.update(new)
        if new and self._file:
            with self._file.open("a", **_TEXT) as file:  # every rank appends its own, in one write
                file.write("".join(f"{line}\n" for line in new))
        elif new:
            print(*new, sep="\n", file=sys.stderr)

    def report(self, note: Callable[[str], None]) -> None:
        """Say how many were skipped, once, at the end."""
        count = len(set(self._file.read_text(**_TEXT).splitlines())) if self._file and self._file.exists() else 0
        if count:
            note(f"{count} unreadable samples were skipped, see {self._file}")


def _as_it_is(batches: list[Any]) -> list[Any]:
    return batches


# torchrun signals the whole process group; a worker that dies of it would take the process down before it can save.
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


class _Loader(DataLoader):
    """Holds the signals back while it forks workers, until these ignore them: what comes in between would end one."""

    def __iter__(self) -> Any:
        held_back = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            return super().__iter__()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, held_back)


def _leave_signals_to_the_parent(worker: int) -> None:
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
