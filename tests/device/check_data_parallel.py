"""The gradient of a micro-batch under dp-classic, beside that of torch.nn.DataParallel; test_hardware.py.

    python tests/device/check_data_parallel.py MODEL [DEVICE]     prints the norm of the difference, by its norm
"""

import sys
from copy import deepcopy

import torch
from torch import nn

from models.blocks import blocks_of
from tests.device.check_strategies import ONE, build, loss_of
from utils.distributed.world import World
from utils.strategies import load_strategy


def main(model: str, device: str) -> None:
    net, (batch, *_) = build(model)
    with World.from_env(device, per_process=2) as world:
        theirs = nn.DataParallel(deepcopy(net).to(world.device), None if device == "cpu" else [0, 1])
        loss_of(theirs, batch.to(world.device)).backward()
        strategy = load_strategy("dp-classic")(net.to(world.device), world, blocks_of)
        strategy.setup(1)
        for split, each in strategy.accumulate([batch], ONE):
            loss_of(split, each).backward()
        ours, expected = (torch.cat([param.grad.flatten() for param in each.parameters()])
                          for each in (strategy.module, theirs))
        print(float((ours - expected).norm() / expected.norm()), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], (sys.argv[2:] or [torch.accelerator.current_accelerator().type])[0])
