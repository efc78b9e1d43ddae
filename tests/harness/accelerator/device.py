"""A device in time: one queue of operations, copies that arrive late, waits of the host, faults. And the report of a process.

An operation has a place in its device's queue, counted from 1. The queue moves only when the host waits for a place in
it, so that a race which a GPU would lose now and then is lost every time.
"""

import collections
import contextlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

SETTINGS = json.loads(os.environ.get("SIMULATED_ACCELERATOR") or "{}")
RANK, PROCESS = int(os.environ.get("RANK", 0)), os.getpid()
FOLDER = f"{os.getcwd()}/"
LEFT_OUT = (str(Path(__file__).parent), str(Path(os.__file__).parent), "<frozen")  # of stacks; and site-packages
FIRST_SEED = 5_171_717  # of the devices' random numbers, before the program seeds them: not the CPU's

LOCK = threading.RLock()
waits: collections.Counter[tuple[str, tuple[str, ...]]] = collections.Counter()  # (kind, stack) -> times
copies: collections.Counter[str] = collections.Counter()  # "to_device", "to_host"


def stack() -> list[tuple[str, int, str]]:
    """(path, line, function) of the program's frames, innermost first; paths relative to the working folder."""
    frames, frame = [], sys._getframe(1)
    while frame:
        path = frame.f_code.co_filename
        if not (path.startswith(LEFT_OUT) or "site-packages" in path):
            frames.append((path.removeprefix(FOLDER), frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return frames


def require_own_process() -> None:
    """Raise RuntimeError in a fork of the process that has the devices."""
    if os.getpid() != PROCESS:
        raise RuntimeError("Cannot re-initialize sim in forked subprocess. To use sim with multiprocessing, you must"
                           " use the 'spawn' start method")


class Device:
    """Device number `index`. `current`: tells the number of the current one; `hang`: never returns."""

    def __init__(self, index: int, current: Callable[[], int], hang: Callable[[], None]):
        self.index, self.operations = index, 0
        self.random_state = torch.Generator().manual_seed(FIRST_SEED + index).get_state()
        self._current, self._hang = current, hang
        self._finished = self._asked = 0  # places that the queue has come to, that the host asked for without waiting
        self._under_way: collections.deque[tuple[int, Callable[[], None]]] = collections.deque()
        self._is_broken, self._hangs_from = False, float("inf")

    def issue(self, complete: Callable[[], None] | None = None) -> int:
        """Put an operation into the queue. Returns its place. complete: what it does when the queue comes to it."""
        require_own_process()
        with LOCK:
            self.operations += 1
            self._is_broken = self._is_broken or self._is_struck("fails")
            if self.operations < self._hangs_from and self._is_struck("hangs"):
                self._hangs_from = self.operations
            if complete:
                self._under_way.append((self.operations, complete))
            self._require_whole()
            return self.operations

    def wait(self, place: int, kind: str) -> None:
        """The host waits until the queue has come to `place`."""
        with LOCK:
            waits[kind, tuple(f"{path}:{function}" for path, _, function in stack())] += 1
        self._advance(place)

    def query(self, place: int) -> bool:
        """Whether the queue has come to `place`. It has not when it is first asked, and has when it is asked again."""
        self._require_whole()
        if self._asked >= place < self._hangs_from:
            self._advance(place)
        self._asked = max(self._asked, place)
        return self._finished >= place

    def issued(self) -> int:
        """The last place in the queue."""
        self._require_whole()
        return self.operations

    def complete(self, place: float = float("inf")) -> None:
        """Complete what is under way up to `place`."""
        with LOCK:
            while self._under_way and self._under_way[0][0] <= place:
                self._under_way.popleft()[1]()

    @contextlib.contextmanager
    def random_numbers(self) -> Iterator[None]:
        """torch's generator of the CPU stands in for the device's own."""
        with LOCK:
            before = torch.default_generator.get_state()
            torch.default_generator.set_state(self.random_state)
            try:
                yield
            finally:
                self.random_state = torch.default_generator.get_state()
                torch.default_generator.set_state(before)

    def _advance(self, place: int) -> None:
        self._require_whole()
        if place >= self._hangs_from:
            self._hang()
        self.complete(place)
        self._finished = max(self._finished, place)

    def _require_whole(self) -> None:
        require_own_process()
        if self._is_broken:
            raise torch.AcceleratorError("sim error: uncorrectable ECC error encountered")

    def _is_struck(self, kind: str) -> bool:
        fault = SETTINGS.get(kind)
        if not fault or fault.get("rank", 0) != RANK or self.operations < fault["operation"]:
            return False
        if fault.get("device", self._current()) != self.index:
            return False
        try:  # once over all starts
            os.close(os.open(fault["once"], os.O_CREAT | os.O_EXCL)) if fault.get("once") else None
        except FileExistsError:
            return False
        return True


def report(devices: list[Device], peak: Callable[[int], int]) -> None:
    """At the end of the process that has the devices: write rank-N.json; complete every copy, which may raise."""
    if SETTINGS.get("report"):
        found = {"waits": [[kind, frames, count] for (kind, frames), count in waits.items()],
                 "operations": {device.index: device.operations for device in devices},
                 "peak": {device.index: peak(device.index) for device in devices},
                 "copies_to_device": copies["to_device"], "copies_to_host": copies["to_host"]}
        Path(SETTINGS["report"]).mkdir(parents=True, exist_ok=True)
        Path(SETTINGS["report"], f"rank-{RANK}.json").write_text(json.dumps(found))
    for device in devices:
        device.complete()
