"""Fully sharded data parallel: every rank keeps a part of each parameter, its gradient and its optimizer state.

A block's parameters are gathered where it computes, forward and backward, and freed afterwards: no device holds the
whole model. A forward is therefore collective: all ranks go forward equally often, with stand-ins that count nothing.
Gradients are summed after each micro-batch, so that none is kept in full. Source: torch.distributed.fsdp.fully_shard
(Zhao et al., 2023), which averages over ranks; here it sums, as losses are divided by the whole batch's normalizer.

Precision is autocast's, as under every strategy: float32 is what is kept, gathered and summed.

Tests: tests/distributed/test_fsdp.py
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map_only

from utils.distributed.world import World
from utils.strategies.base import Block, BlocksOf
from utils.strategies.replicated import Replicated


class FSDP(Replicated):
    """fully_shard by blocks; a process that is alone has nothing to share and keeps the plain model."""

    is_split = is_sharded = True

    def place(self, blocks_of: BlocksOf) -> None:
        """Shard rank 0's parameters. Collective."""
        module, world = self.module, self.world
        self.is_sharded = self.needs_every_grad = world.world_size > 1
        self.least_forwards = int(self.is_sharded)
        if self.is_sharded:
            for param in module.parameters():
                world.broadcast(param.detach())
            shard(module, blocks_of(module), world)
        module.to(world.device)  # what is not sharded
        self.communication = None  # it happens inside of forward and backward

    def setup(self, num_micro_batches: int) -> None:
        """The model is sharded already; only the number of forwards is new."""
        if self.is_sharded:
            self.least_forwards = -(-num_micro_batches // self.world.world_size)  # as many as any rank has

    def whole(self, tensor: Tensor) -> Tensor:
        """The parts of all ranks together. Collective."""
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def model_state(self) -> dict[str, Tensor]:
        """Rank 0: full tensors in host memory, gathered one at a time; other ranks: nothing. Collective."""
        return self._whole(super().model_state())

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
        """As model_state. Collective."""
        return self._whole(super().optimizer_state(optimizer))

    def placed(self, tensor: Tensor, like: Tensor) -> Tensor:
        """This rank's part of `tensor`, as `like` is sharded."""
        if isinstance(like, DTensor) and tensor.shape == like.shape:
            full = tensor.to(like.device).contiguous()
            tensor = distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)  # sends nothing
        return super().placed(tensor, like)

    def _whole(self, nest: dict[str, Any]) -> dict[str, Any]:
        def gathered(tensor: DTensor) -> Tensor | None:
            full = tensor.full_tensor()
            return full.cpu() if self.world.is_main else None

        nest = tree_map_only(DTensor, gathered, nest)
        return nest if self.world.is_main else {}


def shard(module: nn.Module, blocks: Sequence[Block], world: World) -> None:
    """Shard each composed part of the blocks as one group, and what is left with the root: single layers, tied weights.

    Every group sums over ranks. fully_shard takes no channels_last.
    """
    module.to(memory_format=torch.contiguous_format)
    mesh = init_device_mesh(world.device.type, (world.world_size,))
    uses = _uses(module)
    for part in (part for block in blocks for part in block.parts):
        own = _uses(part)
        is_composed = any(True for _ in part.children())
        if part is not module and own and is_composed and all(uses[key] == count for key, count in own.items()):
            fully_shard(part, mesh=mesh, reshard_after_forward=True)
    fully_shard(module, mesh=mesh, reshard_after_forward=True)  # the root too: between steps nothing is gathered
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # gloo has no other


def _uses(module: nn.Module) -> Counter[int]:
    """How often each parameter occurs in `module`: a tied one more than once."""
    return Counter(id(param) for _, param in module.named_parameters(remove_duplicate=False))
