"""Data parallel over the devices of one process, balanced: to compare with, and to learn from. DDP is faster.

A step has the four parts of torch.nn.DataParallel. Replicate: every device gets the weights. Scatter: each gets whole
micro-batches, in turn, so BatchNorm sees what it sees under DDP. Apply: the loss is computed where the outputs are, so
no device holds those of all. Gather: gradients are added on the first device, whose optimizer takes the step. Source of
the balance: DataParallelModel and DataParallelCriterion of PyTorch-Encoding (Zhang, 2018). torch's form: dp_classic.py.

One thread keeps all devices busy: forward and backward only queue work, and nothing in a step waits for a device.

Tests: tests/device/test_strategies.py
"""

import sys
from collections.abc import Iterator, Sequence
from copy import deepcopy

import torch
from torch import Tensor, nn

from utils.hardware.compiling import compile_model
from utils.strategies.base import AnyMicroBatch, MicroBatches
from utils.strategies.buffers import Buffers
from utils.strategies.replicated import Replicated


class DP(Replicated):
    """One process; the model and a replica for each further device."""

    max_processes, max_devices = 1, sys.maxsize

    @property
    def lanes(self) -> int:
        """One on each device."""
        return len(self.world.devices)

    def setup(self, num_micro_batches: int) -> None:
        """Make the replicas."""
        self._replicas = make_replicas(self.module, self.world.devices)
        self._theirs = [self._buffers, *map(Buffers, self._replicas[1:])]

    def accumulate(self, micro_batches: MicroBatches[AnyMicroBatch],
                   scale: Tensor) -> Iterator[tuple[nn.Module, AnyMicroBatch]]:
        """Yield each micro-batch with the next replica, on its device; then gather."""
        replicate(self.module, self._replicas[1:])
        for buffers in self._theirs:
            buffers.begin()
        for number, micro_batch in enumerate(micro_batches):  # scatter
            place = number % len(self._replicas)
            yield self._replicas[place], micro_batch.to(self.world.devices[place])
            if micro_batch.index == 0:  # the first, which is on the first device
                self._buffers.keep()
            self._theirs[place].restore()
        gather(self.module, self._replicas[1:])


def make_replicas(module: nn.Module, devices: Sequence[torch.device]) -> list[nn.Module]:
    """`module`, which is on the first of `devices`, and a copy on each of the others."""
    replicas = [module, *(copied(module, device) for device in devices[1:])]
    for replica in replicas[1:] if module._compiled_call_impl else ():  # a copy is not compiled
        compile_model(replica)
    return replicas


def copied(module: nn.Module, device: torch.device) -> nn.Module:
    """A copy on `device`; no other device holds one in between."""
    params = {id(param): nn.Parameter(param.detach().to(device, copy=True), param.requires_grad)
              for param in module.parameters()}
    return deepcopy(module, params | {id(buffer): buffer.to(device, copy=True) for buffer in module.buffers()})


@torch.no_grad()
def replicate(module: nn.Module, replicas: Sequence[nn.Module]) -> None:
    """Give the replicas the parameters, the buffers and the mode of `module`."""
    for replica in replicas:
        for own, source in zip([*replica.parameters(), *replica.buffers()], [*module.parameters(), *module.buffers()],
                               strict=True):
            own.copy_(source, non_blocking=True)
        replica.train(module.training)


@torch.no_grad()
def gather(module: nn.Module, replicas: Sequence[nn.Module]) -> None:
    """Add the gradients of the replicas to those of `module`, and take them away from the replicas."""
    for replica in replicas:
        for param, theirs in zip(module.parameters(), replica.parameters(), strict=True):
            if theirs.grad is not None:
                grad = theirs.grad.to(param.device, non_blocking=True)
                param.grad = grad if param.grad is None else param.grad.add_(grad)
                theirs.grad = None
