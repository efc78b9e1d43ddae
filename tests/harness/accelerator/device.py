"""A device in time: its queue, copies that arrive late, waits of the host, faults; and the report of a process.

An operation has a place in its device's queue, counted from 1. The queue moves only when the host waits for a place in
it: a race that a GPU loses now and then is lost every time. Importing this makes "sim" the accelerator of the process.
"""

import ctypes
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import traceback
from collections import Counter, deque
from collections.abc import Callable
from math import inf
from pathlib import Path

import torch

SETTINGS = {"devices": 4} | json.loads(os.environ.get("SIMULATED_ACCELERATOR") or "{}")
RANK, PROCESS, FOLDER = int(os.environ.get("RANK", 0)), os.getpid(), f"{os.getcwd()}/"
HERE, LOCK = Path(__file__).parent, threading.RLock()
waits: Counter[tuple[str, tuple[str, ...]]] = Counter()  # by kind and stack
copies = Counter({"to device": 0, "to host": 0})


def load() -> ctypes.CDLL:
    """device.cpp: compiled by the first process that needs it (g++, 20 s), kept in the folder for temporary files."""
    source, root = HERE / "device.cpp", Path(torch.__file__).parent
    name = f"sim-{os.getuid()}-{torch.__version__}-{hashlib.sha256(source.read_bytes()).hexdigest()[:16]}.so"
    if not (path := Path(tempfile.gettempdir(), name)).exists():
        partial = path.with_suffix(f".{os.getpid()}")
        subprocess.run(["g++", "-fPIC", "-shared", "-std=c++20", f"-I{root}/include", source, "-o", partial,
                        f"-L{root}/lib", "-lc10", "-ltorch_cpu"], check=True)
        partial.rename(path)
    torch.ops.load_library(path)
    torch.utils.rename_privateuse1_backend("sim")
    library = ctypes.CDLL(str(path))
    library.peak_bytes.restype = ctypes.c_int64
    library.begin(SETTINGS["devices"])
    return library


def set_memory(size: float) -> None:
    """Bytes that each device of this process has from here on."""
    LIBRARY.set_memory(ctypes.c_double(size / 2**20))


def stack() -> list[tuple[str, str, int]]:
    """(path, function, line) of the program's frames, innermost first; paths from the working folder."""
    frames = [(frame.f_code.co_filename, frame.f_code.co_name, line) for frame, line in traceback.walk_stack(None)]
    others = (str(HERE), os.path.dirname(os.__file__), "<frozen")
    return [(path.removeprefix(FOLDER), function, line) for path, function, line in frames
            if not (path.startswith(others) or "/site-packages/" in path)]


class Device:
    """One device. All raises RuntimeError in a fork of the process, and AcceleratorError once the device has failed."""

    def __init__(self, index: int):
        self.index, self.operations, self._has_failed = index, 0, False
        self._under_way: deque[tuple[int, Callable[[], None]]] = deque()
        self._come_to, self._hangs_from = 0, inf  # places
        self.seed(5_171_717 + index)  # until the program does

    def seed(self, value: int) -> None:
        """Give its generator the state that this seed gives the CPU's."""
        self.random_state = torch.Generator().manual_seed(value).get_state()

    def issue(self, complete: Callable[[], None] | None = None) -> int:
        """Put an operation into the queue; `complete` is called when the queue comes to it. Returns its place."""
        with LOCK:
            self.operations += 1
            self._has_failed = self._has_failed or self._is_struck_by("fails")
            if self._hangs_from == inf and self._is_struck_by("hangs"): self._hangs_from = self.operations
            if self._is_struck_by("shrinks"): set_memory(SETTINGS["shrinks"]["memory"])
            if complete: self._under_way.append((self.operations, complete))
            return self.last_place()

    def last_place(self) -> int:
        """The place of the last operation."""
        if os.getpid() != PROCESS:
            raise RuntimeError("Cannot re-initialize sim in forked subprocess: with multiprocessing, use spawn")
        if self._has_failed: raise torch.AcceleratorError("sim error: uncorrectable ECC error encountered")
        return self.operations

    def wait(self, place: int, kind: str) -> None:
        """The host waits until the queue has come to `place`; for ever, if the device hangs before."""
        self.last_place()
        waits[kind, tuple(f"{path}:{function}" for path, function, _ in stack())] += 1
        if place >= self._hangs_from: LIBRARY.hang()
        self.complete(place)

    def query(self, place: int) -> bool:
        """Whether the queue has come to `place`. If not, it has when the host asks again."""
        has_come = self._come_to >= place
        if self.last_place() and place < self._hangs_from: self.complete(place)
        return has_come

    def complete(self, place: float) -> None:
        """Let the queue come to `place`."""
        with LOCK:
            self._come_to = max(self._come_to, place)
            while self._under_way and self._under_way[0][0] <= place: self._under_way.popleft()[1]()

    def _is_struck_by(self, kind: str) -> bool:
        if not (fault := SETTINGS.get(kind)): return False
        victim = fault.get("rank", 0), fault.get("device", torch.accelerator.current_device_index())
        if victim != (RANK, self.index) or self.operations < fault["operation"]: return False
        try:
            if fault.get("once"): Path(fault["once"]).touch(exist_ok=False)
        except FileExistsError:  # it has struck before
            return False
        return True


def report() -> int:
    """Write this rank's file of the report and complete all copies. Returns 1, and prints why, if one raced; else 0."""
    if os.getpid() != PROCESS: return 0
    if folder := SETTINGS.get("report"):
        found = {"waits": [[kind, frames, count] for (kind, frames), count in waits.items()],
                 "copies_to_device": copies["to device"], "copies_to_host": copies["to host"],
                 "operations": {device.index: device.operations for device in DEVICES},
                 "peak": {device.index: LIBRARY.peak_bytes(device.index) for device in DEVICES}}
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder, f"rank-{RANK}.json").write_text(json.dumps(found))
    try:
        for device in DEVICES: device.complete(inf)
    except RuntimeError as error:
        print(error, file=sys.stderr, flush=True)
        return 1
    return 0


LIBRARY = load()
set_memory(SETTINGS.get("memory") or inf)
DEVICES = [Device(index) for index in range(SETTINGS["devices"])]
