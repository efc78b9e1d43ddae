"""Devices, as torch.accelerator knows them: which one a process computes on, and how the host reads from it.

Ranks with different devices cannot form a process group: they would wait for each other. So the devices of all nodes
are compared before, and the error names the node that lacks one.
"""

import json
import socket

import torch
import torch.distributed as dist
from torch import Tensor

from utils.errors import UserError, some
from utils.hardware import vendor


def resolve_device(name: str, num_processes: int, store: dist.Store, rank: int, world_size: int) -> str:
    """The type of device ("cpu", "xpu", ...) that --device `name` means on every rank. Collective, through the store.

    num_processes: on this node. Raises UserError (64) on every rank if find_device raises it on any, or if some nodes
    have an accelerator and others have none.
    """
    kind, problem = "", None
    try:
        kind = find_device(name, num_processes).type
    except UserError as error:
        problem = str(error)
    store.set(f"device/{rank}", json.dumps([socket.gethostname(), kind, problem]))
    found = [json.loads(text) for text in store.multi_get([f"device/{other}" for other in range(world_size)])]
    for host, _, problem in found:
        if problem:
            raise UserError(problem if host in problem else f"{host}: {problem}")
    best = max((other for _, other, _ in found), key=lambda other: other != "cpu")
    if without := sorted({host for host, other, _ in found if other != best}):
        raise UserError(
            f"--device {name}: {some(without)} has no {best} device, but other nodes have one; all nodes need the same"
            f" kind: leave {some(without)} out, or use --device cpu")
    return kind


def find_device(name: str, num_processes: int = 1) -> torch.device:
    """The device that --device `name` means, without an index; "auto" is this host's accelerator, or else the CPU.

    num_processes: on this node, one device each. Raises UserError (64) if there is no such device, or too few.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    available = accelerator.type if accelerator else "cpu"
    kind = available if name == "auto" else name
    if kind not in (available, "cpu"):
        raise UserError(
            f"--device {name}: torch {torch.__version__} finds {available if accelerator else 'no accelerator'} here;"
            f" use --device {available}")
    if kind != "cpu" and (count := torch.accelerator.device_count()) < num_processes:
        raise UserError(
            f"--device {name}: {num_processes} processes on this node, but {count} {kind} device{'s' * (count > 1)};"
            f" each process needs its own: start {count}, or use --device cpu")
    vendor.require_code(kind, num_processes)
    return torch.device(kind)


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
