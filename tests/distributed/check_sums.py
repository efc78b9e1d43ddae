"""Faults planted in sums of --strategy exact, and which ranks find them: torchrun ... check_sums.py FILE.

Rank 0 writes {kind: [planted, found on exactly the ranks that have the wrong sum, found on none]} as JSON; test_sums.py
reads it. The kind "none" counts steps without a fault.
"""

import json
import random
import sys
from collections import defaultdict
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tests.harness.strategies import OnCpu
from tests.harness.transport import Change, flip, plant
from utils.distributed.world import World
from utils.errors import exit_after
from utils.strategies import exact
from utils.strategies.exact import Exact

ONE, SIZE = torch.ones(()), 9_000  # values of a bucket, fewer than there are
OF_EACH = 40  # faults of each kind that is not a flipped bit


def nothing(sums: Tensor) -> None:
    """Change nothing."""


class Fault(NamedTuple):
    """What is done to the first bucket of one step, on rank `on`, or on all (None). reaches_all: it is in the sum."""

    kind: str
    on: int | None
    sent: Change = nothing
    received: Change = nothing
    reaches_all: bool = False


def faults(world: World, before: list[Tensor], of_rank_0: list[Tensor]) -> Iterator[Fault]:
    """The same on every rank. before: what this rank sent in the step before. of_rank_0: what rank 0 sends in this one.
    """
    draw = random.Random(0)

    def exchange(sums: Tensor) -> None:
        one, other = int(sums.argmin()), int(sums.argmax())
        sums[one], sums[other] = sums[other].clone(), sums[one].clone()

    for bit in range(64):
        for at in (draw.randrange(SIZE), draw.randrange(SIZE), -2, -1):
            def change(sums: Tensor, at: int = at, bit: int = bit) -> None:
                flip(sums, at, bit)

            on = draw.randrange(world.world_size)
            yield Fault("a bit of the result, on one rank", on, received=change)
            yield Fault("a bit of the result, on all ranks", None, received=change)
            yield Fault("a bit of what a rank sends", on, sent=change, reaches_all=True)
    for _ in range(OF_EACH):
        on, at = draw.randrange(world.world_size), draw.randrange(SIZE - 512)
        yield Fault("4 KiB of zeros in the result", on, received=lambda sums, at=at: sums[at:at + 512].zero_())
        yield Fault("nothing but zeros as the result", on, received=Tensor.zero_)
        yield Fault("nothing but zeros from a rank", on, sent=Tensor.zero_, reaches_all=True)
        yield Fault("what a rank sent the step before", on, sent=lambda sums: sums.copy_(before[0]), reaches_all=True)
        yield Fault("what rank 0 sent, in place of another rank's", world.world_size - 1,
                    sent=lambda sums: sums.copy_(of_rank_0[0]), reaches_all=True)
        yield Fault("the least and the largest value exchanged", on, received=exchange)
        one, other = draw.sample(range(SIZE), 2)
        yield Fault("two flipped sign bits in the result", on,
                    received=lambda sums, pair=(one, other): [flip(sums, at, 63) for at in pair])


def main() -> int:
    """One step with and one without each fault. Collective."""
    torch.set_num_threads(1)
    exact.CHUNK, exact.BUCKET = 4 * exact.WIDTH, 24 * exact.WIDTH  # several groups in a bucket, and several buckets
    with World.from_env("cpu") as world:
        torch.manual_seed(0)
        # Softplus: no gradient is 0. Of units that are off for every sample (ReLU) whole rows are: zeros in their place
        # change nothing, and are no fault.
        model = nn.Sequential(nn.Linear(60, 90), nn.Softplus(), nn.Linear(90, 60), nn.Softplus(), nn.Linear(60, 40))
        strategy, counts = Exact(model, world), defaultdict(lambda: [0, 0, 0])
        strategy.setup(world.world_size)
        inputs = torch.randn(8, 60, generator=torch.Generator().manual_seed(world.rank))
        before, of_rank_0 = [torch.zeros(1, dtype=torch.int64)], [torch.zeros(1, dtype=torch.int64)]
        numbers, planted = count(), list[Fault]()
        own: list[Tensor] = []

        def sent(sums: Tensor) -> None:
            own.append(sums.clone())
            if len(own) == 1:
                of_rank_0[0] = world.broadcast(sums.clone())  # Collective.
                for fault in planted:
                    fault.sent(sums)

        def received(sums: Tensor) -> None:
            for fault in planted:
                fault.received(sums)
            planted.clear()  # the other buckets arrive as they are

        def step() -> list[int]:
            own.clear()
            model.zero_grad(set_to_none=True)
            for module, _ in strategy.accumulate([OnCpu(index=world.rank)], ONE):
                module(inputs + next(numbers) % 7).square().mean().backward()
            before[0] = own[0]
            return [rank for rank, is_corrupted in enumerate(world.gather(bool(strategy.is_corrupted)))  # Collective.
                    if is_corrupted]

        plant(sent, received)
        step()
        for fault in faults(world, before, of_rank_0):
            planted[:] = [fault] if fault.on in (None, world.rank) else []
            found = step()
            ranks = range(world.world_size)
            expected = [*ranks] if fault.reaches_all or fault.on is None else [fault.on]
            for kind, right in {fault.kind: expected, "none": []}.items():
                found = step() if kind == "none" else found
                counts[kind] = [sum(pair) for pair in zip(counts[kind], (1, found == right, not found), strict=True)]
        if world.is_main:
            Path(sys.argv[1]).write_text(json.dumps(counts, indent=1))
    return 0


if __name__ == "__main__":
    exit_after(main)
