"""Devices, as torch.accelerator knows them: which one a process computes on, and how the host reads from it.

The devices of all nodes are compared before the ranks make a process group: one that lacks what the others have is named.
"""

import json
import socket

import torch
import torch.distributed as dist
from torch import Tensor

from utils.errors import UserError, some
from utils.hardware import vendor


def resolve_device(name: str, processes: int, store: dist.Store, rank: int, world_size: int) -> str:
    """find_device for all ranks: the type of the device that each of them computes on. Collective.

    By the store: ranks with other devices could not make a process group together, and would wait for each other.
    Raises UserError (64) on every rank, also where a node has no accelerator and another one has.
    """
    kind, problem = "", None
    try:
        kind = find_device(name, processes).type
    except UserError as error:
        problem = str(error)
    store.set(f"device/{rank}", json.dumps([socket.gethostname(), kind, problem]))
    found = [json.loads(told) for told in store.multi_get([f"device/{other}" for other in range(world_size)])]
    for host, _, problem in found:
        if problem:
            raise UserError(problem if host in problem else f"{host}: {problem}")
    best = max((other for _, other, _ in found), key=lambda other: other != "cpu")
    if without := sorted({host for host, other, _ in found if other != best}):
        raise UserError(f"--device {name}: {some(without)} has no {best} device, and other nodes have; all nodes need the same"
                        " kind: leave it out, or use --device cpu")
    return kind


def find_device(name: str, processes: int = 1) -> torch.device:
    """The device, without a number, that --device means: "auto" is the accelerator that is there, else the CPU.

    processes: of this node, one device each. Raises UserError (64) where it is not there, or there are too few.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    there = accelerator.type if accelerator else "cpu"
    kind = there if name == "auto" else name
    if kind not in (there, "cpu"):
        raise UserError(f"--device {name}: torch {torch.__version__} finds {there if accelerator else 'no accelerator'} here; use"
                        f" --device {there}")
    if kind != "cpu" and (count := torch.accelerator.device_count()) < processes:
        raise UserError(f"--device {name}: {processes} processes on this node and {count} {kind} device{'s' * (count > 1)}; one"
                        f" process needs one device: start {count}, or use --device cpu")
    vendor.require_code(kind, processes)
    return torch.device(kind)


class Arriving:
    """Tensors on their way to the host: asking for them waits for what was computed before, not for what came after."""

    def __init__(self, *tensors: Tensor):
        self._tensors = [tensor.to("cpu", non_blocking=True) for tensor in tensors]  # into pinned memory
        device = tensors[0].device
        self._event = None if device.type == "cpu" else torch.accelerator.current_stream(device).record_event()

    def wait(self) -> list[Tensor]:
        """The tensors, on the CPU."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensors
