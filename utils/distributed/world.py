"""The processes of a run: their ranks, the process group, the few collectives.

torchrun sets RANK, LOCAL_RANK, WORLD_SIZE and MASTER_ADDR/PORT; one process alone is a process group of one, so there
is one code path. "Collective." in a docstring: all ranks must call it, in the same order, or none.
"""

import json
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten, treespec_dumps, treespec_loads

from utils.distributed.preflight import require_loopback, require_own_name
from utils.distributed.rendezvous import fresh_store
from utils.distributed.watchdog import Watchdog
from utils.errors import Exit, PeerError, RankError, UserError, explain
from utils.files import ask_server
from utils.hardware.cores import cpu_quota, fair_share
from utils.hardware.devices import devices_of, find_device, resolve_device
from utils.settings.option import is_model_folder
from utils.settings.run_options import FaultOptions

T = TypeVar("T")
DISK_BYTES_PER_S = 10e6  # the slowest disk that time limits allow for
DATA_TIMEOUT = timedelta(hours=12)  # one rank works for the others: scans, downloads, tokenizes


@dataclass(frozen=True)
class World:
    """This process among the processes of the run. Built once by from_env and passed on.

    Leaving the context destroys the process group.
    """

    rank: int
    local_rank: int  # selects a device, nothing else
    world_size: int
    local_world_size: int
    device: torch.device
    cpu_group: dist.ProcessGroup  # a gloo group over all ranks, for small facts in host memory
    section_timeout: timedelta = timedelta(seconds=300)  # for what one rank does while the others wait
    cores: int = 1  # this process's share of its node's cores
    devices: tuple[torch.device, ...] = ()  # all of this process; `device` is the first

    @classmethod
    def from_env(cls, device: str, timeouts: FaultOptions | None = None, watchdog: Watchdog | None = None,
                 per_process: int | str = 1) -> Self:
        """Join the process group: the device's backend, and gloo for host memory. Collective.

        device: --device. timeouts: None = the defaults. watchdog: meets the peers. per_process: see devices_of.
        Raises UserError: 64 if there are too few devices, 76 if a process does not come.
        """
        rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        try:
            if world_size == local_world_size and not os.environ.get("GLOO_SOCKET_IFNAME"):
                require_loopback()
                os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # gloo would listen at the address of the host's name
            require_own_name()
            if world_size > 1 and not os.environ.keys() >= {"MASTER_ADDR", "MASTER_PORT"}:
                raise UserError(f"WORLD_SIZE={world_size} needs MASTER_ADDR and MASTER_PORT, where the processes meet:"
                                " set both, or start with torchrun, which sets them")
        except UserError as error:  # only this node has it; its first rank prints it
            raise (RankError if local_rank == 0 else PeerError)(str(error), error.code) from None
        timeouts = timeouts or FaultOptions()
        section_timeout = timedelta(seconds=timeouts.section_timeout)
        # of a collective: an idle rank waits while others load a first batch and compute a first step
        longest = 2 * section_timeout + timedelta(seconds=timeouts.step_timeout)
        store = dist.HashStore() if world_size == 1 else fresh_store(rank, world_size, section_timeout)
        if watchdog and world_size > 1:
            watchdog.meet(store, rank, world_size)
        find = partial(find_device, device, local_world_size, per_process)
        kind = resolve_device(device, find, store, rank, world_size)  # Collective.
        target, *others = devices = devices_of(kind, local_rank, local_world_size, per_process)
        if kind != "cpu":
            torch.accelerator.set_device_index(target.index)
        dist.init_process_group(
            dist.get_default_backend_for_device(target), store=store, rank=rank, world_size=world_size,
            timeout=longest, device_id=None if kind == "cpu" or others else target)
        cpu_group = dist.group.WORLD if kind == "cpu" else dist.new_group(backend="gloo", timeout=longest)
        world = cls(rank, local_rank, world_size, local_world_size, target, cpu_group, section_timeout,
                    devices=devices)
        return replace(world, cores=_share_of_cores(world))  # Collective.

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the only one that writes."""
        return self.rank == 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # After an error the peers may be gone, and destroying the group would wait for them; the process ends anyway.
        if error is None or self.world_size == 1:
            dist.destroy_process_group()

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` over ranks, in place. Collective."""
        dist.all_reduce(tensor, group=self.cpu_group if tensor.device.type == "cpu" else None)
        return tensor

    def all_reduce_or(self, tensor: Tensor) -> Tensor:
        """Join the bits of `tensor`, integers in host memory, over ranks, in place. Collective."""
        dist.all_reduce(tensor, op=dist.ReduceOp.BOR, group=self.cpu_group)
        return tensor

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Rank 0's `tensor` on every rank, in place. Collective."""
        dist.broadcast(tensor, src=0, group=self.cpu_group if tensor.device.type == "cpu" else None)
        return tensor

    def broadcast_nest(self, nest: Any, in_host_memory: bool = False) -> Any:
        """Rank 0's nest on every rank, its tensors on this rank's device. Collective.

        nest: dicts and lists of tensors and JSON values (no pickle). in_host_memory: there instead. Tensors are sent
        one by one: besides the nest itself no rank holds more than one of them.
        """
        # the nest, with the type, shape and strides of each tensor
        device = torch.device("cpu") if in_host_memory else self.device
        leaves, spec = tree_flatten(nest)
        about = [_described(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        spec, about = self._broadcast_json([treespec_dumps(spec), about])

        # the tensors
        for number, leaf in enumerate(about):
            if isinstance(leaf, dict):  # no other leaf is one
                tensor = torch.empty_strided(leaf["shape"], leaf["strides"], dtype=getattr(torch, leaf["dtype"]),
                                             device=device)
                if self.is_main:
                    tensor.copy_(leaves[number])
                if tensor.numel():  # as bytes in the order of memory: any type, any strides
                    self.broadcast(tensor.as_strided([tensor.numel()], [1]).view(torch.uint8))
                about[number] = tensor
        return tree_unflatten(about, treespec_loads(spec))

    def _broadcast_json(self, value: Any) -> Any:
        """Rank 0's JSON value on every rank. Collective."""
        data = _as_bytes(value)
        size = int(self.broadcast(torch.tensor([len(data)])))
        data = self.broadcast(data if self.is_main else torch.empty(size, dtype=torch.uint8))
        return json.loads(data.numpy().tobytes())

    def limit_s(self, num_bytes: int) -> float:
        """Time limit in seconds to read or write `num_bytes`: three times --step-timeout, and more for a slow disk."""
        return self.section_timeout.total_seconds() + num_bytes / DISK_BYTES_PER_S

    def on_rank_zero(self, work: Callable[[], Any], per_node: bool = False, takes_long: bool = False,
                     num_bytes: int = 0) -> Any:
        """Run `work` on rank 0 (per_node: on the first rank of each node) while the others wait. Collective.

        They wait limit_s(num_bytes) seconds, or 12 hours for work on all the data (per_node, takes_long).
        Returns rank 0's result (per_node: that of its own node's first rank) on every rank; it must be JSON. Raises an
        error of `work` on every rank, as everywhere() does.
        """
        if per_node:  # torchrun numbers the ranks of a node one after the other
            outcomes = self._outcomes(work if self.local_rank == 0 else None, DATA_TIMEOUT)
            return outcomes[self.rank - self.local_rank]
        results: list[Any] = []
        self._outcomes((lambda: results.append(work())) if self.is_main else None,
                       DATA_TIMEOUT if takes_long else timedelta(seconds=self.limit_s(num_bytes)))
        return self._broadcast_json(results[0] if self.is_main else None)

    def everywhere(self, work: Callable[[], T], takes_long: bool = False) -> T:
        """Run `work`, which calls no collective, on every rank. Collective. Returns this rank's own result.

        Time limits as in on_rank_zero().

        If it fails on some ranks, every rank raises the first one's error as a UserError with its code; the message
        names the host if other ranks did not fail. (A bug, 70: that rank raises it as it is, with the traceback, and
        the others a PeerError.)
        """
        results: list[T] = []
        self._outcomes(lambda: results.append(work()), DATA_TIMEOUT if takes_long else self.section_timeout)
        return results[0]

    def _outcomes(self, work: Callable[[], Any] | None, timeout: timedelta) -> list[Any]:
        """What `work` returned, by rank. work: None = this rank only waits for the others. Collective."""
        outcome, failure = {}, None
        if work is not None:
            try:
                outcome = {"value": work()}
            except Exception as error:  # every rank raises it below
                failure, (message, code) = error, explain(error)
                outcome = {"error": [message or repr(error), int(code), socket.gethostname()]}
        dist.monitored_barrier(self.cpu_group, timeout=timeout, wait_all_ranks=True)  # its error names a missing rank
        outcomes = self.gather(outcome)
        failed = {rank: found["error"] for rank, found in enumerate(outcomes) if "error" in found}
        for rank, (message, code, host) in failed.items():
            if code == Exit.INTERNAL:
                raise failure if rank == self.rank else PeerError(f"rank {rank}: {message}", Exit.INTERNAL)
            has_every_worker = len(failed) == len([found for found in outcomes if found])
            raise UserError(message if has_every_worker else f"{host}: {message}", Exit(code)) from failure
        return [found.get("value") for found in outcomes]

    def require_same(self, value: str, what: str) -> None:
        """Raise UserError (65) on every rank if `value` differs between them. Collective."""
        values = self.gather([value, socket.gethostname()])
        if other := next((host for found, host in values if found != values[0][0]), None):
            raise UserError(f"{what} must be the same on all nodes, but {other} and {values[0][1]} differ: give all"
                            " nodes the same command, program, torch and data", Exit.BAD_DATA)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's JSON value, by rank, on every rank. Collective. (No pickle: a peer's bytes could run code.)"""
        data = _as_bytes(value)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(sizes, torch.tensor([data.numel()]), group=self.cpu_group)
        longest = int(max(sizes))
        rows = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.world_size)]
        dist.all_gather(rows, torch.nn.functional.pad(data, (0, longest - data.numel())), group=self.cpu_group)
        return [json.loads(row[: int(size)].numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)]


def _as_bytes(value: Any) -> Tensor:
    """A value as JSON: [bytes] uint8."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _described(tensor: Tensor) -> dict[str, Any]:
    strides = torch.empty_like(tensor, device="meta").stride()  # the tensor's own if it is dense (channels_last, say)
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape), "strides": list(strides)}


def is_folder(name: str, world: World) -> bool:
    """Whether --model `name` is a folder, on all nodes or none. Collective. Raises UserError (66) if nodes differ."""
    ask_server(Path(name))
    found = world.gather([is_model_folder(name), socket.gethostname()])
    lacking = [host for is_there, host in found if not is_there]
    if 0 < len(lacking) < len(found):
        raise UserError(f"{lacking[0]} has no folder {name}, but other nodes have: give a path that all nodes have",
                        Exit.NO_INPUT)
    return not lacking


def _share_of_cores(world: World) -> int:
    """This process's share of its node's cores, at least 1. Collective."""
    host, allowed = socket.gethostname(), sorted(os.sched_getaffinity(0))
    affinities = [other for where, other in world.gather([host, allowed]) if where == host]
    return fair_share(allowed, affinities, cpu_quota())
