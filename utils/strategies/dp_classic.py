"""Data parallel as torch.nn.DataParallel does it, written out for any device: to compare with, and to learn from.

Each micro-batch is split over the devices of one process, and the outputs are gathered on the first, which therefore
holds more than the others. BatchNorm sees the part of a micro-batch that its device has: its statistics, and the
results, are not those of `ddp`. Threads share one interpreter: its lock lets one of them queue work at a time.

Tests: tests/device/test_strategies.py
"""

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from utils.errors import UserError
from utils.hardware.devices import seed_further
from utils.strategies.dp import make_replicas
from utils.strategies.replicated import Replicated


class DPClassic(Replicated):
    """One process; `model` splits what it gets, and gives what all devices give."""

    max_processes, max_devices = 1, sys.maxsize

    def setup(self, num_micro_batches: int) -> None:
        """Make the replicas. Raises UserError (64) for what cannot be split, or computed again."""
        if any(part._forward_pre_hooks for part in self.module.modules()):
            raise UserError("--strategy dp-classic splits a micro-batch by its samples, and a layer of this model takes"
                            " a whole one (in masked-lm the output layer); use --strategy dp")
        if self.config.checkpoint_activations:  # the weights of a forward are gone by then
            raise UserError("--strategy dp-classic cannot compute activations again; leave --checkpoint-activations"
                            " out, or use --strategy dp")
        self.model = Classic(self.module, self.world.devices)


class Classic(nn.Module):
    """replicate, scatter, parallel_apply, gather: in every forward; autograd does the same backwards."""

    def __init__(self, module: nn.Module, devices: Sequence[torch.device]):
        super().__init__()
        self.module, self._devices = module, devices
        self._replicas = make_replicas(module, devices)  # a list: no submodules, their weights are replaced

    def forward(self, *args: Any, **options: Any) -> Any:
        """The outputs of all samples, on the first device."""
        shares = scatter((args, options), self._devices)
        devices = self._devices[:len(shares)]
        seed_further(devices)
        outputs = parallel_apply(self._replicas, replicate(self.module, devices), shares, devices[0].type)
        return gather(outputs, devices[0])


def replicate(module: nn.Module, devices: Sequence[torch.device]) -> list[dict[str, Tensor]]:
    """Parameters and buffers by name, on each device; the gradients of these copies flow back to `module`."""
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    return [{name: tensor.to(device) for name, tensor in tensors.items()} for device in devices]


def scatter(inputs: Any, devices: Sequence[torch.device]) -> list[Any]:
    """The parts of `inputs`, a nest with tensors [B, ...], each on its device; two samples at least, for BatchNorm."""
    size = min(len(tensor) for tensor in tree_leaves(inputs) if isinstance(tensor, Tensor))
    number = min(len(devices), max(1, size // 2))

    def part(index: int) -> Any:
        return tree_map_only(Tensor, lambda tensor: tensor.tensor_split(number)[index].to(devices[index]), inputs)

    return [part(index) for index in range(number)]


def parallel_apply(replicas: Sequence[nn.Module], weights: Sequence[dict[str, Tensor]], shares: Sequence[Any],
                   device_type: str) -> list[Any]:
    """What each replica, with its weights, gives for its share. A thread each; a thread has its own autocast."""
    has_grad, has_autocast = torch.is_grad_enabled(), torch.is_autocast_enabled(device_type)
    dtype = torch.get_autocast_dtype(device_type)

    def apply(replica: nn.Module, own: dict[str, Tensor], share: Any) -> Any:
        with torch.set_grad_enabled(has_grad), torch.autocast(device_type, dtype, has_autocast):
            return functional_call(replica, own, *share)

    for replica in replicas[1:]:
        replica.train(replicas[0].training)
    with ThreadPoolExecutor(len(shares)) as threads:
        return list(threads.map(apply, replicas, weights, shares))


def gather(outputs: Sequence[Any], device: torch.device) -> Any:
    """The outputs of all replicas, a nest with tensors [B, ...], in one on `device`."""
    return tree_map(lambda *parts: torch.cat([part.to(device) for part in parts]), *outputs)
