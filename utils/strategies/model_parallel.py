"""One model split over the devices of a process, block by block; over several processes as `ddp`.

The devices compute one after the other: this trains what does not fit into one device, and is no faster. A process's
share of the gradient is summed over ranks by DistributedDataParallel, which takes such a model as it is.

Tests: tests/device/test_strategies.py
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from utils.errors import UserError, counted
from utils.hardware.devices import seed_further
from utils.strategies.base import Block, BlocksOf
from utils.strategies.ddp import DDP


class ModelParallel(DDP):
    """DDP over a model on several devices; what it takes and gives is on the first."""

    min_devices, max_devices = 2, sys.maxsize
    is_split, can_audit = True, False

    def place(self, blocks_of: BlocksOf) -> None:
        """Split the model. Raises UserError (64) if it has too few blocks."""
        split(self.module, blocks_of(self.module), self.world.devices)
        self.module.register_forward_pre_hook(lambda *_: seed_further(self.world.devices))
        self.module.register_forward_hook(lambda part, args, output: _moved(output, self.world.device))


def split(module: nn.Module, blocks: Sequence[Block], devices: Sequence[torch.device]) -> None:
    """Move each block to its device: none gets more than its share of the bytes and the largest block.

    Raises UserError (64) if a device would get no block.
    """
    # a device for each block
    sizes = [sum(param.nbytes for param in block.params.values()) for block in blocks]
    middles = [sum(sizes[:index]) + size / 2 for index, size in enumerate(sizes)]
    numbers = [int(middle * len(devices) / sum(sizes)) for middle in middles]
    places = [devices[number] for number in numbers]
    if len(used := set(numbers)) < len(devices):
        raise UserError(f"--strategy model-parallel: the model has {counted(len(blocks), 'block')}, the largest with"
                        f" {100 * max(sizes) // sum(sizes)} % of its bytes, so {counted(len(devices), 'device')} cannot"
                        f" share it; use --devices-per-process {len(used)}")

    # where each layer computes: all its parameters are in one place, also if one is tied to another block's
    place_of = {id(param): place for block, place in reversed([*zip(blocks, places, strict=True)])
                for param in block.params.values()}
    layers = dict.fromkeys(module.modules(), devices[0])
    for block, place in zip(blocks, places, strict=True):
        for part in block.parts:
            part.register_forward_pre_hook(_moving_to(place), prepend=True, with_kwargs=True)
            layers |= dict.fromkeys(part.modules(), place)
    for layer, place in layers.items():
        if own := list(layer.parameters(recurse=False)):
            place = min((place_of[id(param)] for param in own), key=devices.index)
            if layer is not module:
                layer.register_forward_pre_hook(_moving_to(place), prepend=True, with_kwargs=True)
        for param in own:
            param.data = param.data.to(place)
        for name, buffer in layer.named_buffers(recurse=False):
            setattr(layer, name, buffer.to(place))


def _moving_to(place: torch.device) -> Callable[..., Any]:
    return lambda part, args, options: _moved((args, options), place)


def _moved(nest: Any, place: torch.device) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.to(place, non_blocking=True), nest)
