"""What the time of a start is spent on: the speed of its steps, waiting, and all that is not a step."""

import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from statistics import mean, median_low
from typing import Any

import torch

from utils.hardware.devices import Stopwatch

SHARES = {"starting": "starting", "computing": "computing", "data_wait": "waiting for data",
          "communication": "waiting for other ranks", "evaluation": "evaluating", "checkpoints": "saving",
          "logging": "logging"}  # of a start's time, in words


class Clock:
    """A process's own clock. communication: what a step waits for other ranks; None = the strategy cannot tell."""

    def __init__(self, device: torch.device, communication: Stopwatch | None):
        self._device, self._tells_waits = device, communication is not None
        self._waits = communication or Stopwatch(device)  # the latter is never started
        self._began, self._mark = process_began(), time.perf_counter()
        self._spent: Counter[str] = Counter()  # seconds of this start, by SHARES
        self._since: Counter[str] = Counter()  # the last record: steps, samples, tokens; seconds in steps, data_wait

    def restart(self) -> None:
        """Leave out the time since the end of the last step: it was not training."""
        self._mark = time.perf_counter()

    @contextmanager
    def on(self, what: str) -> Iterator[None]:
        """The time of the block is spent on `what`, which is no part of a step; that of a block inside, on its own."""
        began, before = time.perf_counter(), self._spent.total()
        try:
            yield
        finally:
            own_s = time.perf_counter() - began - (self._spent.total() - before)
            self._spent[what] += own_s
            self._mark += own_s

    def waiting(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The loader's items; the time until each arrives counts as waiting."""
        began = time.perf_counter()
        for item in loader:
            self._since["data_wait"] += time.perf_counter() - began
            yield item
            began = time.perf_counter()

    def step(self, samples: int, tokens: int = 0) -> None:
        """Count an optimizer step over these samples and, in text, tokens. A device may lag behind: it evens out."""
        now = time.perf_counter()
        if not self._has_begun:  # this was the first step
            self._spent["starting"] = now - self._began - self._spent.total() - self._since["data_wait"]
            self._waits.clear()  # what it and the warm-up waited for is a part of starting
        self._since.update(steps=1, samples=samples, tokens=tokens, seconds=now - self._mark)
        self._mark = now

    def times(self) -> list[float]:
        """Seconds since the last record: in steps, waiting for data, waiting for other ranks.

        The host must have waited for the device's work on the last step.
        """
        return [self._since["seconds"], self._since["data_wait"], self._waits.take()]

    def record(self, times: Sequence[Sequence[float]]) -> dict[str, float]:
        """The timing fields of a train record; then start again from 0. times: of every rank. memory is in MiB."""
        since, self._since = self._since, Counter()
        elapsed_s, shares = max(since["seconds"], 1e-9), {"data_wait": mean(wait_s for _, wait_s, _ in times)}
        fields = {"samples_per_s": since["samples"] / elapsed_s}
        if since["tokens"]:
            fields["tokens_per_s"] = since["tokens"] / elapsed_s
        if len(times) > 1 and self._tells_waits:
            shares["communication"] = mean(waits_s for *_, waits_s in times)
            own = [(rank_s - waits_s) / max(1, since["steps"]) for rank_s, _, waits_s in times]
            fields |= {"step_s": median_low(own), "slowest_step_s": max(own), "slowest_rank": own.index(max(own))}
        if self._device.type != "cpu":
            with suppress(RuntimeError):  # an allocator that does not count
                fields["memory"] = torch.accelerator.max_memory_allocated(self._device) / 2**20
        self._spent.update(shares)
        return fields | {name: min(1.0, value / elapsed_s) for name, value in shares.items()}

    def shares(self) -> dict[str, float]:
        """What the time since the process began was spent on: 0 to 1 each, 1 together.

        Up to the last record waiting is the mean over ranks, and from there on that of this rank.
        """
        total_s, spent, rest = time.perf_counter() - self._began, self._spent.copy(), "starting"
        if self._has_begun:
            rest = "computing"
            spent.update(data_wait=self._since["data_wait"], communication=self._waits.so_far())
        shares = {name: spent[name] / total_s for name in SHARES}
        return shares | {rest: max(0.0, 1 - sum(shares.values()))}

    def words(self) -> str:
        """The same for people."""
        total_s = round(time.perf_counter() - self._began)
        shares = sorted(self.shares().items(), key=lambda item: -item[1])
        shown = ", ".join(f"{SHARES[name]} {100 * share:.0f} %" for name, share in shares if share >= 0.005)
        until = f"; {self._spent['starting']:.1f} s until the first step" if self._has_begun else ""
        return f"{timedelta(seconds=total_s)} in all: {shown}{until}"

    @property
    def _has_begun(self) -> bool:
        """Whether this start has taken a step."""
        return "starting" in self._spent


def process_began() -> float:
    """When this process began, as perf_counter tells it: the import of torch counts, too."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # since boot; proc(5), starttime
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.perf_counter() - age_s
