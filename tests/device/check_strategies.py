"""A step of a strategy over several devices of one process, beside the same step on the CPU; test_strategies.py.

    python -m tests.harness.accelerator tests/device/check_strategies.py STRATEGY DEVICES MODEL     a JSON line
"""

import json
import sys
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.blocks import blocks_of
from models.vision.classifier import build_classifier
from utils.distributed.world import World
from utils.numerics.averages import Averages
from utils.strategies import load_strategy

M, CLASSES, SIDE = 6, 10, 32
ONE = torch.ones(())


@dataclass(frozen=True)
class MicroBatch:
    index: int
    inputs: Tensor  # [B, ...]; the first number of a sample says which it is
    labels: Tensor

    def to(self, device: torch.device) -> "MicroBatch":
        return MicroBatch(self.index, self.inputs.to(device), self.labels.to(device))


def build(name: str) -> tuple[nn.Module, list[MicroBatch]]:
    """The model on the CPU, and six micro-batches."""
    torch.manual_seed(0)
    if name in ("wide", "wide-norm"):  # its outputs take more memory than its weights
        norm = nn.BatchNorm1d(16) if name == "wide-norm" else nn.Identity()
        net: nn.Module = nn.Sequential(nn.Linear(8, 16), norm, nn.ReLU(), nn.Linear(16, 4096))
        shapes, classes = (256, 8), 4096
    else:
        net, shapes, classes = build_classifier(name, CLASSES), (4, 3, SIDE, SIDE), CLASSES
    found = []
    for index in range(M):
        inputs = torch.randn(shapes)
        inputs.flatten(1)[:, 0] = torch.arange(len(inputs)) + 1000 * index
        found.append(MicroBatch(index, inputs, torch.randint(classes, (len(inputs),))))
    return net, found


def loss_of(model: nn.Module, batch: MicroBatch) -> Tensor:
    return F.cross_entropy(model(batch.inputs), batch.labels, reduction="sum") / 100


def on_the_cpu(net: nn.Module, batches: list[MicroBatch]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients of the step, and the buffers after micro-batch 0."""
    after, start = {}, {name: buffer.clone() for name, buffer in net.named_buffers()}
    for batch in batches:
        net.load_state_dict(start, strict=False)
        loss_of(net, batch).backward()
        after = after or {name: buffer.clone() for name, buffer in net.named_buffers()}
    return {name: param.grad for name, param in net.named_parameters()}, after


def main(kind: str, number: int, model: str) -> None:
    net, batches = build(model)
    expected, buffers = on_the_cpu(deepcopy(net), batches)
    seen: list[list[Any]] = []
    with World.from_env("sim", per_process=number) as world:
        strategy = load_strategy(kind)(net.to(world.device), world, blocks_of)
        next(part for part in net.modules() if not list(part.children())).register_forward_hook(
            lambda part, args, output: seen.append([str(output.device), args[0].flatten(1)[:, 0].int().tolist()]))
        strategy.setup(M)
        averages = Averages(strategy.model_state(), decay=0.5)
        for replica, batch in strategy.accumulate(batches, ONE):
            loss_of(replica, batch).to(world.device).backward()
        found = {name: param.grad.cpu() for name, param in strategy.module.named_parameters()}
        strategy.commit_buffers(torch.ones((), dtype=torch.bool, device=world.device))
        averages.update(0, torch.ones((), dtype=torch.bool, device=world.device))
        held: dict[str, int] = {}
        for param in strategy.module.parameters():
            held[str(param.device)] = held.get(str(param.device), 0) + param.nbytes
        norm = torch.cat([grad.flatten() for grad in expected.values()]).norm()
        print(json.dumps({
            "gradient": max(float((found[name] - grad).norm() / norm) for name, grad in expected.items()),
            "buffers": max((float((buffer.cpu() - buffers[name]).abs().max())
                            for name, buffer in strategy.module.named_buffers()), default=0.0),
            "seen": seen, "held": held, "largest": max(sum(param.nbytes for param in block.params.values())
                                                       for block in blocks_of(strategy.module))}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
