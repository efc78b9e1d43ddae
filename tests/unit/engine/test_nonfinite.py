"""engine/nonfinite.py: the samples behind a gradient that is not finite are named."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from data.batch import Batch
from engine.nonfinite import nonfinite_samples
from utils.strategies.base import Strategy
from utils.strategies.ddp import DDP
from utils.strategies.exact import Exact

SHARES = ((7, 3, 12, 5), (20, 1, 9, 4), (8, 2))  # a rank's micro-batches, by the indices of their samples
ALONE = SimpleNamespace(device=torch.device("cpu"), world_size=1)
PLANTED = [float("nan"), float("inf"), -float("inf")]


class Root(torch.autograd.Function):
    """x itself, with a gradient that is inf where x is above 100: a loss alone does not show it."""

    @staticmethod
    def forward(context, x):
        context.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        [x] = context.saved_tensors
        return torch.where(x.abs() > 100, torch.inf, gradient)


class Net(nn.Module):
    """BatchNorm makes every sample of a micro-batch that holds a NaN one; without it each stands for itself."""

    def __init__(self, has_batch_norm=True):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(6) if has_batch_norm else nn.Identity()
        self.dropout, self.head = nn.Dropout(0.5), nn.Linear(6, 3)
        self.unused, self.frozen = nn.Linear(2, 2), nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x):
        return self.head(self.dropout(Root.apply(self.frozen(self.norm(self.first(x))))))


def batch_of(indices, planted):
    """planted: {index: value}, one of the numbers of that sample."""
    x = torch.stack([torch.randn(4, generator=torch.Generator().manual_seed(index)) for index in indices])
    for row, index in enumerate(indices):
        x[row, 1] = planted.get(index, x[row, 1])
    labels = torch.zeros(len(indices), dtype=torch.int64)
    return Batch({"x": x}, labels, torch.ones(len(indices)), indices=tuple(indices))


def named(net, planted, largest=Strategy.largest, loss_of=None, shares=SHARES):
    loss_of = loss_of or (lambda batch: net(batch.inputs["x"]).square().sum())
    micro_batches = [batch_of(share, planted) for share in shares]
    strategy = DDP(net, ALONE)
    strategy.largest = largest
    return nonfinite_samples(strategy, micro_batches, len(shares), loss_of, lambda index: batch_of([index], planted))


@pytest.fixture(params=[True, False], ids=["BatchNorm", "no BatchNorm"])
def net(request):
    return Net(request.param).train()


@pytest.mark.parametrize("value", PLANTED)
def test_a_sample_that_is_not_finite_is_named_and_its_neighbours_are_not(net, value):
    assert named(net, {9: value}) == [9]


def test_several_are_named_in_the_order_of_the_step(net):
    assert named(net, {8: PLANTED[0], 9: PLANTED[1], 5: PLANTED[2], 7: PLANTED[0]}) == [7, 5, 9, 8]


def test_where_all_is_finite_none_is_named(net):
    assert named(net, {}) == []


def test_where_a_gradient_alone_is_not_finite_its_micro_batch_is_named():
    assert named(Net(has_batch_norm=False).train(), {1: 1e6}) == [20, 1, 9, 4]


@pytest.mark.parametrize("largest, expected", [(1e9, []), (1e3, [20, 1, 9, 4])])
def test_a_gradient_beyond_the_largest_value_is_not_finite_either(largest, expected):
    net = Net(has_batch_norm=False).train()

    def loss_of(batch):
        return net(batch.inputs["x"]).sum() * (1e4 if 9 in batch.indices else 1.0)

    assert named(net, {}, largest, loss_of) == expected


def test_a_share_without_samples_names_none(net):
    assert named(net, {9: PLANTED[0]}, shares=()) == []


def everything(net):
    """Weights, gradients, buffers and the mode, comparable bit for bit."""
    grads = [param.grad for param in net.parameters() if param.grad is not None]
    tensors = [*net.parameters(), *grads, *net.buffers()]
    return [tensor.tolist() for tensor in tensors], [module.training for module in net.modules()]


def test_gradients_buffers_and_mode_are_left_as_they_were(net):
    net(batch_of(SHARES[0], {}).inputs["x"]).sum().backward()
    before = copy.deepcopy(everything(net))
    assert (named(net, {9: PLANTED[0]}), everything(net)) == ([9], before)


def test_no_hook_of_a_strategy_sees_the_computation(net, world):
    seen = []
    for weight in net.parameters():
        if weight.requires_grad:
            weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight))
    strategy = Exact(net, world)
    strategy.setup(3)
    assert named(net, {9: PLANTED[0]}, strategy.largest) == [9]
    assert (seen, [group.used for bucket in strategy._buckets for group in bucket.groups]) == ([], [set()])


def test_a_part_that_was_in_evaluation_mode_is_so_afterwards(net):
    net.norm.eval()
    named(net, {9: PLANTED[0]})
    assert net.norm.training is False
