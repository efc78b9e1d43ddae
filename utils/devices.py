"""The devices of all nodes, compared before the ranks make a process group: one that lacks what the others have is named."""

import json
import socket

import torch
import torch.distributed as dist

from utils.errors import UserError, some
from utils.preflight import require_architecture


def require_device(
    device: str, use_cuda: bool, local_world_size: int, store: dist.Store, rank: int, world_size: int
) -> None:
    """Raise UserError (64) on every rank where a node has too few GPUs, or none while another has some. Collective.

    By the store: ranks with other devices could not make a process group together, and would wait for each other.
    """
    problem = None
    if use_cuda:
        try:
            _require_gpus(device, local_world_size)
        except UserError as error:
            problem = str(error)
    store.set(f"device/{rank}", json.dumps([socket.gethostname(), use_cuda, problem]))
    found = [json.loads(told) for told in store.multi_get([f"device/{other}" for other in range(world_size)])]
    for host, _, problem in found:
        if problem:
            raise UserError(problem if host in problem else f"{host}: {problem}")
    without = sorted({host for host, has_cuda, _ in found if not has_cuda})
    if without and any(has_cuda for _, has_cuda, _ in found):
        raise UserError(f"--device {device}: {some(without)} has no CUDA device, and other nodes have; all nodes need"
                        " the same kind: leave it out, or use --device cpu")


def _require_gpus(device: str, processes: int) -> None:
    if torch.cuda.device_count() < processes:
        raise UserError(f"--device {device}: {processes} processes on this node and {torch.cuda.device_count()} GPUs; one process needs"
                        " one GPU: start fewer processes, or use --device cpu")
    for number in range(processes):
        require_architecture(torch.cuda.get_device_name(number), torch.cuda.get_device_capability(number), torch.cuda.get_arch_list())
