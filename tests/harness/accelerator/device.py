"""A device in time: its queues, copies that arrive late, waits of the host, faults; and the report of a process.

An operation has a place, counted from 1 on its device, in the queue of the stream that it was issued on. A queue moves
only when the host waits for a place in it, or another queue that waits for it moves: a race that a GPU loses now and
then is lost every time. Importing this makes "sim" the accelerator of the process.
"""

import ctypes
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import traceback
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from math import inf
from pathlib import Path

import torch
from torch import Tensor

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
        # by stream: what is called when its queue comes to a place; the place that it has come to (-1: all have)
        self._under_way: dict[int, deque[tuple[int, Callable[[], None]]]] = defaultdict(deque)
        self._come_to: Counter[int] = Counter()
        # copies that are under way to it, by place: the address, the stream, and the streams that come after the copy
        self._copies: dict[int, tuple[int, int, set[int]]] = {}
        self._hangs_from = inf  # a place
        self.flipped: list[str] = []  # the operations in whose results a bit flipped
        self._num_fit = 0  # operations that could have flipped one so far
        self.seed(5_171_717 + index)  # until the program does

    def seed(self, value: int) -> None:
        """Give its generator the state that this seed, or another one, gives the CPU's."""
        self.random_state = torch.Generator().manual_seed(value ^ SETTINGS.get("generator", 0)).get_state()

    def issue(self, stream: int | None = None, complete: Callable[[], None] | None = None) -> int:
        """Put an operation into the queue of `stream`, the current one if None. Returns its place.

        complete: called when the queue comes to it.
        """
        with LOCK:
            self.operations += 1
            self._has_failed = self._has_failed or self._is_struck_by("fails")
            if self._hangs_from == inf and self._is_struck_by("hangs"): self._hangs_from = self.operations
            if self._is_struck_by("shrinks"): set_memory(SETTINGS["shrinks"]["memory"])
            if complete:
                self._under_way[self.stream if stream is None else stream].append((self.operations, complete))
            return self.last_place()

    def begin_copy(self, memory: Tensor, check: Callable[[], None]) -> None:
        """Put a copy to `memory`, a CPU tensor, into the queue of the current stream; `check` when it comes to it."""
        with LOCK:
            stream, place = self.stream, self.operations + 1
            self._copies[place] = memory.untyped_storage().data_ptr(), stream, {stream}
            self.issue(stream, lambda: (self._copies.pop(place), check()))

    def require_arrived(self, memory: Tensor) -> None:
        """Raise RuntimeError if `memory` is being copied to, and the current stream does not come after the copy."""
        if not self._copies: return
        address, stream = memory.untyped_storage().data_ptr(), self.stream
        with LOCK:
            for copied, other, after in self._copies.values():
                if copied == address and stream not in after:
                    raise RuntimeError(f"sim error: memory that stream {other} copies to is used on stream {stream},"
                                       " which has not waited for it")

    def block(self, stream: int, other: "Device", place: int, awaited: int) -> None:
        """`stream` waits for `place` in the queue of the stream `awaited`, which may be another device's."""
        with LOCK:
            self.issue(stream, lambda: other.complete(place, awaited))
            for copy_place, (_, _, after) in other._copies.items():
                if awaited in after and copy_place <= place: after.add(stream)

    @property
    def stream(self) -> int:
        """The calling thread's current one; 0 is the default stream."""
        return torch.accelerator.current_stream(self.index).stream_id

    def last_place(self) -> int:
        """The place of the last operation."""
        if os.getpid() != PROCESS:
            raise RuntimeError("Cannot re-initialize sim in forked subprocess: with multiprocessing, use spawn")
        if self._has_failed: raise torch.AcceleratorError("sim error: uncorrectable ECC error encountered")
        return self.operations

    def wait(self, place: int, kind: str, stream: int | None = None) -> None:
        """The host waits until the queue of `stream`, the current one if None, has come to `place`; -1: all queues.

        For ever, if the device hangs before.
        """
        self.last_place()
        waits[kind, tuple(f"{path}:{function}" for path, function, _ in stack())] += 1
        if place >= self._hangs_from: LIBRARY.hang()
        self.complete(place, self.stream if stream is None else stream)

    def query(self, place: int, stream: int) -> bool:
        """Whether the queue of `stream` has come to `place`. If not, it has when the host asks again."""
        has_come = max(self._come_to[stream], self._come_to[-1]) >= place
        if self.last_place() and place < self._hangs_from: self.complete(place, stream)
        return has_come

    def complete(self, place: float, stream: int = -1) -> None:
        """Let the queue of `stream` come to `place`; -1: all queues."""
        with LOCK:
            self._come_to[stream] = max(self._come_to[stream], place)
            for each in list(self._under_way) if stream < 0 else [stream]:
                queue = self._under_way[each]
                while queue and queue[0][0] <= place: queue.popleft()[1]()

    def flip(self, name: str, host: Tensor) -> None:
        """Flip a bit of `host`, the result of operation `name`, if it is its turn: of the value in its middle."""
        with LOCK:
            fault = SETTINGS.get("flips") or {}
            if not (fault and self._is_victim_of(fault) and re.fullmatch(fault.get("only", ".*"), name)): return
            turn, self._num_fit = self._num_fit, self._num_fit + 1
            if turn % fault["every"] if fault.get("every") else turn: return
            self.flipped.append(name)
            middle = host[tuple(size // 2 for size in host.shape)]
            integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[host.itemsize]
            middle.view(integers).bitwise_xor_(1 << fault.get("bit", 20))

    def _is_victim_of(self, fault: dict[str, int]) -> bool:
        victim = fault.get("rank", 0), fault.get("device", torch.accelerator.current_device_index())
        return victim == (RANK, self.index) and self.operations >= fault["operation"]

    def _is_struck_by(self, kind: str) -> bool:
        if not (fault := SETTINGS.get(kind)) or not self._is_victim_of(fault): return False
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
                 "flipped": [name for device in DEVICES for name in device.flipped],
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
