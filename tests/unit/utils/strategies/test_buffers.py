"""Buffers of a step: every micro-batch starts from the same, and the run's are those that micro-batch 0 leaves."""

from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from utils.strategies import STRATEGIES, load_strategy

YES, NO = torch.tensor(True), torch.tensor(False)


def build_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4, momentum=None))


def batches_of(numbers):
    generators = [torch.Generator().manual_seed(number) for number in numbers]
    return [SimpleNamespace(index=v, images=torch.randn(4, 3, 8, 8, generator=g)) for v, g in zip(numbers, generators, strict=True)]


def buffers_of(model):
    return {name: buffer.tolist() for name, buffer in model.named_buffers()}


def run_step(strategy, numbers, is_finite=YES):
    """One step; returns the buffers from which each micro-batch started."""
    starts = []
    for batch in strategy.accumulate(batches_of(numbers), len(numbers), torch.ones(())):
        starts.append(buffers_of(strategy.module))
        strategy.model(batch.images).sum().backward()
    strategy.commit_buffers(is_finite)
    return starts


@pytest.fixture(params=STRATEGIES)
def strategy(request, world):
    strategy = load_strategy(request.param)(build_net(), world)
    strategy.setup(4)
    run_step(strategy, [0])  # so that buffers are not as they were made
    return strategy


@pytest.mark.parametrize("numbers", [[0, 1, 2, 3], [2, 0, 3], [0]])
def test_after_a_step_they_are_those_that_micro_batch_0_leaves_from_the_steps_start(strategy, numbers):
    alone = deepcopy(strategy.module)
    alone(batches_of([0])[0].images)
    run_step(strategy, numbers)
    assert buffers_of(strategy.module) == buffers_of(alone)


def test_every_micro_batch_starts_from_those_of_the_steps_start(strategy):
    before = buffers_of(strategy.module)
    assert run_step(strategy, [0, 1, 2]) == [before] * 3


def test_where_the_gradient_is_not_finite_they_are_as_before_the_step(strategy):
    before = buffers_of(strategy.module)
    run_step(strategy, [0, 1, 2], is_finite=NO)
    assert buffers_of(strategy.module) == before


def test_a_rank_without_micro_batch_0_keeps_its_own_until_they_are_sent(strategy):
    before = buffers_of(strategy.module)
    run_step(strategy, [1, 3])
    assert buffers_of(strategy.module) == before


def test_a_step_whose_buffers_were_never_settled_leaves_no_trace(strategy):
    before = buffers_of(strategy.module)
    for batch in strategy.accumulate(batches_of([0, 1]), 2, torch.ones(())):
        strategy.model(batch.images).sum().backward()
    assert buffers_of(strategy.module) == before  # the warm-up


def test_those_that_the_next_forward_reads_are_sent_each_step_and_batch_norms_are_not(world):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.spectral = nn.BatchNorm1d(2), nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2))
            self.register_buffer("average", torch.zeros(2))
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    net = Net()
    strategy = load_strategy("ddp")(net, world)
    names = {id(buffer): name for name, buffer in net.named_buffers()}
    sent = {names[id(buffer)] for buffer in strategy._buffers.stepwise}
    assert sent == {"average", "spectral.parametrizations.weight.0._u", "spectral.parametrizations.weight.0._v"}


def test_a_model_without_buffers_takes_a_step(world):
    strategy = load_strategy("ddp")(nn.Conv2d(3, 1, 1), world)
    strategy.setup(2)
    assert run_step(strategy, [0, 1]) == [{}, {}]
