"""Buffers in a step: every micro-batch starts from the same ones, and the run keeps what micro-batch 0 leaves."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.harness.strategies import OnCpu
from utils.strategies import STRATEGIES, load_strategy
from utils.strategies.buffers import Buffers

YES, NO = torch.tensor(True), torch.tensor(False)


def build_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3),
                         nn.BatchNorm2d(4, momentum=None))


def batch_of(index):
    images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(index))
    return OnCpu(index=index, images=images)


def buffers_of(model):
    return {name: buffer.tolist() for name, buffer in model.named_buffers()}


def run_step(strategy, indices, is_finite=YES):
    """One step; returns the buffers from which each micro-batch started."""
    starts = []
    for model, batch in strategy.accumulate([*map(batch_of, indices)], torch.ones(())):
        starts.append(buffers_of(strategy.module))
        model(batch.images).sum().backward()
    strategy.commit_buffers(is_finite)
    return starts


@pytest.fixture(params=[name for name in STRATEGIES if load_strategy(name).min_devices == 1])
def strategy(request, world):
    strategy = load_strategy(request.param)(build_net(), world)
    strategy.setup(4)
    run_step(strategy, [0])  # so that buffers are not as they were made
    return strategy


@pytest.mark.parametrize("indices", [[0, 1, 2, 3], [2, 0, 3], [0]])
def test_after_a_step_they_are_what_micro_batch_0_leaves(strategy, indices):
    alone = deepcopy(strategy.module)
    alone(batch_of(0).images)
    run_step(strategy, indices)
    assert buffers_of(strategy.module) == buffers_of(alone)


def test_every_micro_batch_starts_from_those_of_the_steps_start(strategy):
    before = buffers_of(strategy.module)
    assert run_step(strategy, [0, 1, 2]) == [before] * 3


def test_micro_batches_come_on_the_device_of_what_computes_them(strategy, world):
    places = [batch.place for _, batch in strategy.accumulate([*map(batch_of, [0, 1, 2])], torch.ones(()))]
    assert places == [world.device] * 3


def test_of_several_devices_each_gets_its_micro_batches_in_turn(world):
    places = [torch.device("cpu"), torch.device("cpu", 0)]
    strategy = load_strategy("dp")(build_net(), replace(world, devices=tuple(places)))
    strategy.setup(4)
    found = []
    for model, batch in strategy.accumulate([*map(batch_of, [0, 1, 2])], torch.ones(())):
        found.append((batch.place, model is strategy.module))
        model(batch.images).sum().backward()
    assert found == [(places[0], True), (places[1], False), (places[0], True)]


def test_a_non_finite_gradient_leaves_them_as_before_the_step(strategy):
    before = buffers_of(strategy.module)
    run_step(strategy, [0, 1, 2], is_finite=NO)
    assert buffers_of(strategy.module) == before


def test_a_rank_without_micro_batch_0_keeps_its_own_until_they_are_sent(strategy):
    before = buffers_of(strategy.module)
    run_step(strategy, [1, 3])
    assert buffers_of(strategy.module) == before


def test_a_step_without_commit_leaves_no_trace(strategy):
    """The warm-up is one."""
    before = buffers_of(strategy.module)
    for model, batch in strategy.accumulate([*map(batch_of, [0, 1])], torch.ones(())):
        model(batch.images).sum().backward()
    assert buffers_of(strategy.module) == before


def test_those_that_the_next_forward_reads_are_sent_in_each_step(world):
    """BatchNorm's statistics and counters are not."""
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


def test_a_step_has_as_many_kernels_whatever_the_number_of_buffers():
    """A GPU copies the tensors of one list in one kernel if they have one type."""
    def kernels(depth):
        buffers = Buffers(nn.Sequential(*(nn.BatchNorm2d(2) for _ in range(depth))))
        with Counting() as counting:
            buffers.begin()
            buffers.keep()
            buffers.restore()
            buffers.commit(YES)
        return counting.names

    assert kernels(20) == kernels(2) and len(kernels(2)) <= 2 * 5  # floats and counters


class Counting(TorchDispatchMode):
    """Names of all operations."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        if "foreach" in str(function):
            assert len({tensor.dtype for tensors in args for tensor in tensors}) == 1
        return function(*args, **(kwargs or {}))


def test_a_model_without_buffers_takes_a_step(world):
    strategy = load_strategy("ddp")(nn.Conv2d(3, 1, 1), world)
    strategy.setup(2)
    assert run_step(strategy, [0, 1]) == [{}, {}]
