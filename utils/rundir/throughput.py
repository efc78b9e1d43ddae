"""Speed of training: samples and tokens per second, and the share of the time spent waiting for data."""

import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch


class Throughput:
    """Covers the training steps since the last record; evaluation and checkpoints are left out (restart)."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._mark = device, time.perf_counter()
        self._samples, self._tokens, self._elapsed_s = 0, 0, 0.0
        self.wait_s = 0.0  # that this rank waited for data since the last record

    def restart(self) -> None:
        """Leave out the time since the end of the last step: it was not training."""
        self._mark = time.perf_counter()

    def waiting(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The loader's items; the time until each arrives counts as waiting."""
        items = iter(loader)
        while True:
            began = time.perf_counter()
            item = next(items, None)
            if item is None:
                return
            self.wait_s += time.perf_counter() - began
            yield item

    def step(self, samples: int, tokens: int = 0) -> None:
        """Count an optimizer step over these samples and, in text, tokens. A device may lag behind: it evens out."""
        now = time.perf_counter()
        self._samples += samples
        self._tokens += tokens
        self._elapsed_s += now - self._mark
        self._mark = now

    def record(self, wait_s: float) -> dict[str, float]:
        """The timing fields of a train record; then start again from 0. wait_s: mean over ranks. memory is in MiB."""
        elapsed_s = max(self._elapsed_s, 1e-9)
        fields = {"samples_per_s": self._samples / elapsed_s, "data_wait": min(1.0, wait_s / elapsed_s)}
        if self._tokens:
            fields["tokens_per_s"] = self._tokens / elapsed_s
        if self._device.type != "cpu":
            with suppress(RuntimeError):  # an allocator that does not count
                fields["memory"] = torch.accelerator.max_memory_allocated(self._device) / 2**20
        self._samples, self._tokens, self._elapsed_s, self.wait_s = 0, 0, 0.0, 0.0
        return fields
