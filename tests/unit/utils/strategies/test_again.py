"""What a micro-batch put into the sums, and the same computed again: their checksums are equal, and nothing else is.

The class of a strategy is that of a process that is alone; on several: tests/contracts.
"""

import pytest
import torch

from tests.harness.strategies import ACROSS
from tests.unit.utils.strategies.test_buffers import batch_of, buffers_of, build_net
from utils.strategies import load_strategy

SCALE = torch.tensor(4.0)


def loss_of(model, batch):
    return model(batch.images).square().sum() / 7


def audited_step(name, world, indices):
    """A strategy after a step of micro-batches, and what its first one put into the sums."""
    strategy = load_strategy(name)(build_net(), world)
    strategy.setup(4)
    strategy.is_audited = True
    for model, batch in strategy.accumulate([*map(batch_of, indices)], SCALE):
        (loss_of(model, batch) * SCALE).backward()
    return strategy, int(strategy.entered)


@pytest.mark.parametrize("name, indices", [
    ("ddp", [0, 1, 2]), ("exact", [0, 1, 2]), ("exact", [0]), ("exact", [2, 0])])
def test_the_same_micro_batch_again_alone_has_the_same_checksum(name, indices, world):
    strategy, entered = audited_step(name, world, indices)
    found = [int(strategy.again(loss_of(strategy.module, batch_of(index)), SCALE)) for index in (indices[0], 3)]
    assert found[0] == entered != found[1]


@pytest.mark.parametrize("name", ACROSS)
def test_computing_again_changes_nothing(name, world):
    strategy, _ = audited_step(name, world, [0, 1])
    other, _ = audited_step(name, world, [0, 1])
    strategy.again(loss_of(strategy.module, batch_of(2)), SCALE)
    for each in (strategy, other):
        each.commit_buffers(torch.tensor(True))
    assert buffers_of(strategy.module) == buffers_of(other.module)
    for one, two in zip(strategy.module.parameters(), other.module.parameters(), strict=True):
        assert torch.equal(one, two) and torch.equal(one.grad, two.grad)
    strategy.module.zero_grad(set_to_none=True)
    other.module.zero_grad(set_to_none=True)
    for each in (strategy, other):  # nor the next step
        for model, batch in each.accumulate([batch_of(5)], SCALE):
            (loss_of(model, batch) * SCALE).backward()
    for one, two in zip(strategy.module.parameters(), other.module.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)


@pytest.mark.parametrize("name", ACROSS)
def test_the_weights_checksum_is_without_batch_norms_statistics(name, world):
    strategy, _ = audited_step(name, world, [0])
    before = int(strategy.weights_checksum())
    strategy.module[1].running_mean.add_(1)
    assert int(strategy.weights_checksum()) == before
    strategy.module[0].bias.data[0] += 1
    assert int(strategy.weights_checksum()) != before
