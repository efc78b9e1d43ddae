"""Devices, as torch.accelerator knows them: which one a process computes on, and how the host reads from it.

Ranks with different devices cannot form a process group: they would wait for each other. So the devices of all nodes
are compared before, and the error names the node that lacks one.

Tests: tests/device/test_hardware.py
"""

import json
import os
import platform
import re
import socket
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from utils.errors import UserError, counted, some
from utils.hardware import vendor


def resolve_device(name: str, find: Callable[[], torch.device], store: dist.Store, rank: int, world_size: int) -> str:
    """The type of device ("cpu", "xpu", ...) that --device `name` means on every rank. Collective, through the store.

    find: find_device, for this node. Raises UserError (64) on every rank if it raises one on any, or if some nodes have
    an accelerator and others have none.
    """
    kind, problem = "", None
    try:
        kind = find().type
    except UserError as error:
        problem = str(error)
    store.set(f"device/{rank}", json.dumps([socket.gethostname(), kind, problem]))
    found = [json.loads(text) for text in store.multi_get([f"device/{other}" for other in range(world_size)])]
    for host, _, problem in found:
        if problem:
            raise UserError(problem if host in problem or world_size == 1 else f"{host}: {problem}")
    best = max((other for _, other, _ in found), key=lambda other: other != "cpu")
    if without := sorted({host for host, other, _ in found if other != best}):
        raise UserError(
            f"--device {name}: {some(without)} has no {best} device, but other nodes have one; all nodes need the same"
            f" kind: leave {some(without)} out, or use --device cpu")
    return kind


def find_device(name: str, num_processes: int = 1, per_process: int | str = 1) -> torch.device:
    """The device that --device `name` means, without an index; "auto" is this host's accelerator, or else the CPU.

    num_processes: on this node. per_process: the devices of each; "auto" = at least one. Raises UserError (64) if there
    is no such device, or too few.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    available = accelerator.type if accelerator else "cpu"
    kind = available if name == "auto" else name
    if kind not in (available, "cpu"):
        found = available if accelerator else "no accelerator"
        raise UserError(f"--device {name}: torch {torch.__version__} finds {found} here; use --device {available}")
    each = 1 if per_process == "auto" else int(per_process)
    if kind != "cpu" and (count := torch.accelerator.device_count()) < num_processes * each:
        own = f"{each} of its own" if each > 1 else "its own"
        fits = count >= each or count < num_processes
        way_out = f"start {count // each or count}" if fits else f"--devices-per-process {count // num_processes}"
        raise UserError(
            f"--device {name}: {counted(num_processes, 'process')} on this node, but {counted(count, f'{kind} device')}"
            f"; each process needs {own}: {way_out}, or use --device cpu")
    vendor.require_code(kind, num_processes * each)
    return torch.device(kind)


def hardware_of(device: torch.device) -> dict[str, Any]:
    """What the bits of this process depend on: the device's name, the CPU's, its instructions, and what limits them."""
    found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())  # no ARM kernel writes one
    hardware = {"cpu": found[1] if found else platform.machine(),
                "instructions": torch.backends.cpu.get_cpu_capability(),
                "limits": {name: value for name, value in sorted(os.environ.items()) if _LIMITS.match(name)}}
    if device.type == "cpu":
        return {"device": "cpu", **hardware}
    name = getattr(torch.get_device_module(device), "get_device_name", lambda device: device.type)(device)
    return {"device": name, **hardware}


_LIMITS = re.compile("ATEN_CPU_CAPABILITY|(ONE)?DNN_MAX_CPU_ISA|DNNL_MAX_CPU_ISA|MKL_(CBWR|ENABLE_INSTRUCTIONS)")


def devices_of(kind: str, local_rank: int, num_processes: int, per_process: int | str) -> tuple[torch.device, ...]:
    """The devices of one process of a node: process k has k N to k N + N - 1. On the CPU N times the CPU.

    per_process: N; "auto" = an equal share of all, on the CPU one.
    """
    if kind == "cpu":
        return (torch.device("cpu"),) * (1 if per_process == "auto" else int(per_process))
    number = torch.accelerator.device_count() // num_processes if per_process == "auto" else int(per_process)
    return tuple(torch.device(kind, index) for index in range(local_rank * number, (local_rank + 1) * number))


def seed_device(device: torch.device, value: int) -> None:
    """Seed the generator of an accelerator."""
    if device.type != "cpu":
        with torch.accelerator.device_index(device.index):
            torch.get_device_module(device).manual_seed(value)


def seed_further(devices: Sequence[torch.device]) -> None:
    """Seed all but the first of a process's devices, each for a stream of its own, by the seed that the CPU has."""
    for number, device in enumerate(devices[1:], 1):
        seed_device(device, torch.initial_seed() ^ number)


class Stopwatch:
    """Adds up the time between start() and stop() in the device's work; the host does not wait for an accelerator."""

    def __init__(self, device: torch.device):
        self._device = device
        self._began: float | torch.Event | None = None
        self._laps: list[tuple[float, float] | tuple[torch.Event, torch.Event]] = []

    def start(self) -> None:
        """From here on; a start that no stop has followed is forgotten."""
        self._began = self._now()

    def stop(self) -> None:
        """Up to here; nothing without a start."""
        if self._began is not None:
            self._laps.append((self._began, self._now()))
        self._began = None

    def take(self) -> float:
        """Seconds since the last call. The host must have waited for the device's work up to the last stop."""
        laps, self._laps = self._laps, []
        return self._seconds(laps)

    def so_far(self) -> float:
        """Seconds since the last take(), which still counts them; without what the device has yet to do: nobody waits.
        """
        return self._seconds([lap for lap in self._laps if self._device.type == "cpu" or lap[1].query()])

    def clear(self) -> None:
        """Forget the time since the last take()."""
        self._laps = []

    def _seconds(self, laps: list[tuple[float, float] | tuple[torch.Event, torch.Event]]) -> float:
        if self._device.type == "cpu":
            return sum(end - began for began, end in laps)
        return sum(began.elapsed_time(end) for began, end in laps) / 1000

    def _now(self) -> float | torch.Event:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event


def copied_beside(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """`tensors` of the host, on `device`. From pinned memory the host does not wait, and the device copies beside its
    other work.

    What the current stream gets from here on waits for the copies.
    """
    if device.type == "cpu":
        return [tensor.to(device) for tensor in tensors]
    stream, current = copy_stream(device), torch.accelerator.current_stream(device)
    with stream:
        copies = [tensor.to(device, non_blocking=True) for tensor in tensors]
    current.wait_stream(stream)
    for copy in copies:
        copy.record_stream(current)  # or their memory could be given to the next copies while it is still read
    return copies


@cache
def copy_stream(device: torch.device) -> torch.Stream:
    """The stream that an accelerator copies batches on."""
    return torch.Stream(device)


class Arriving:
    """Tensors on their way to the host: wait() waits for work queued before them on the device, not for later work."""

    def __init__(self, *tensors: Tensor):
        self._tensors = [tensor.to("cpu", non_blocking=True) for tensor in tensors]  # into pinned memory
        device = tensors[0].device
        self._event = None if device.type == "cpu" else torch.accelerator.current_stream(device).record_event()

    def wait(self) -> list[Tensor]:
        """The tensors, on the CPU."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensors
