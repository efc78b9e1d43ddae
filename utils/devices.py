"""Devices, as torch.accelerator knows them: which one a process computes on, and how the host reads from it.

The devices of all nodes are compared before the ranks make a process group: one that lacks what the others have is named.
"""

import json
import socket

import torch
import torch.distributed as dist
from torch import Tensor

from utils import vendor
from utils.errors import UserError, some


def settle_device(name: str, processes: int, store: dist.Store, rank: int, world_size: int) -> str:
    """The type of the device that all ranks compute on, from --device. Collective.

    name: "auto" (the accelerator that is there, else the CPU) or a type. processes: on this node, one device each. By the
    store: ranks with other devices could not make a process group together, and would wait for each other.
    Raises UserError (64) on every rank where a node has too few devices, or none while another has some.
    """
    kind, problem = _find_type(name), None
    try:
        _require_devices(name, kind, processes)
    except UserError as error:
        problem = str(error)
    store.set(f"device/{rank}", json.dumps([socket.gethostname(), kind, problem]))
    found = [json.loads(told) for told in store.multi_get([f"device/{other}" for other in range(world_size)])]
    for host, _, problem in found:
        if problem:
            raise UserError(problem if host in problem else f"{host}: {problem}")
    kinds = sorted({kind for _, kind, _ in found} - {"cpu"})
    without = sorted({host for host, kind, _ in found if kinds and kind != kinds[0]})
    if without:
        raise UserError(f"--device {name}: {some(without)} has no {kinds[0]} device, and other nodes have; all nodes need"
                        " the same kind: leave it out, or use --device cpu")
    return kind


def find_device(name: str) -> torch.device:
    """The first device that `name` means ("auto", "cpu", a type), for a process alone. Raises UserError (64)."""
    kind = _find_type(name)
    _require_devices(name, kind, 1)
    return torch.device(kind)


def peak_memory(device: torch.device) -> int | None:
    """Most bytes that tensors on `device` have taken; None where it cannot tell."""
    if device.type == "cpu":
        return None
    try:
        return torch.accelerator.max_memory_allocated(device)
    except RuntimeError:  # its allocator does not count
        return None


class Arriving:
    """Tensors on their way to the host: asking for them waits for what was computed before, not for what came after."""

    def __init__(self, *tensors: Tensor):
        self._tensors = [tensor.to("cpu", non_blocking=True) for tensor in tensors]  # into pinned memory
        self._event = None
        if (device := tensors[0].device).type != "cpu":
            self._event = torch.Event(device)
            self._event.record()

    def wait(self) -> list[Tensor]:
        """The tensors, on the CPU."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensors


def _find_type(name: str) -> str:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return name if name != "auto" else accelerator.type if accelerator else "cpu"


def _require_devices(name: str, kind: str, processes: int) -> None:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    there = accelerator.type if accelerator else "cpu"
    if kind not in ("cpu", there):
        raise UserError(f"--device {name}: torch {torch.__version__} finds {there if accelerator else 'no accelerator'} here; use"
                        f" --device {there}")
    if kind == "cpu":
        return
    if (count := torch.accelerator.device_count()) < processes:
        raise UserError(f"--device {name}: {processes} processes on this node and {count} {kind} device{'s' * (count > 1)}; one"
                        f" process needs one device: start {count}, or use --device cpu")
    vendor.require_code(kind, processes)
