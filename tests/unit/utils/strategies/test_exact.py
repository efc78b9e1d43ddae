"""utils/strategies/exact.py: sums of gradients do not depend on the order, and lose no NaN, inf or overflow.

On several processes: tests/distributed. M micro-batches per step.
"""

from itertools import combinations, permutations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tests.harness.strategies import OnCpu
from utils.strategies import exact
from utils.strategies.exact import LIMIT, Exact

M = 3
ONE = torch.ones(())
NAN, INF = float("nan"), float("inf")


class Net(nn.Module):
    """A small conv net with the awkward cases: channels_last, a transposed and a scalar param, one used twice."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.second = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, padding=1)
        self.head, self.turned = nn.Linear(8, 5), nn.Parameter(torch.randn(5, 4).t())
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, images):
        hidden = F.relu(self.norm(self.first(images)))
        hidden = self.second(self.second(hidden)).mean(dim=(2, 3))
        return self.head(hidden) @ self.turned.t() * self.scale


def build(num_micro_batches=M, world=None, model=None):
    strategy = Exact((model or Net()).to(memory_format=torch.channels_last), world)
    strategy.setup(num_micro_batches)
    return strategy


def batch_of(index, plant=None):
    """plant: {(param name, flat index): value}, added to the micro-batch's gradient there."""
    images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(index))
    return OnCpu(index=index, images=images.to(memory_format=torch.channels_last), plant=plant or {})


def loss_of(model, batch):
    loss = model(batch.images).square().mean() / M
    for (name, at), value in batch.plant.items():
        loss = loss + model.get_parameter(name).flatten()[at] * value  # whose gradient is `value` there
    return loss


def step(strategy, batches, scale=ONE):
    """{name: gradient or None} after one step."""
    strategy.module.zero_grad(set_to_none=True)
    for model, batch in strategy.accumulate(batches, scale):
        (loss_of(model, batch) * scale).backward()
    return {name: None if param.grad is None else param.grad.clone()
            for name, param in strategy.module.named_parameters()}


def bits(gradients):
    return {name: None if grad is None else grad.flatten().view(torch.int32).tolist()
            for name, grad in gradients.items()}


def plain_gradients(batches):
    """[M] {name: gradient}, each micro-batch by plain autograd."""
    found = []
    for batch in batches:
        model = Net().to(memory_format=torch.channels_last)
        loss_of(model, batch).backward()
        found.append({name: param.grad for name, param in model.named_parameters()})
    return found


BATCHES = [batch_of(index) for index in range(M)]


# --- the sums


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_gradient_is_that_of_plain_autograd(world, count):
    plain = Net().to(memory_format=torch.channels_last)
    sum(loss_of(plain, batch) for batch in BATCHES[:count]).backward()
    expected = torch.cat([param.grad.flatten() for param in plain.parameters()])
    found = torch.cat([grad.flatten() for grad in step(build(world=world), BATCHES[:count]).values()])
    assert (found - expected).abs().max() <= 1e-6 * expected.abs().max()  # a few roundings of float32, 6e-8 each


def test_a_gradient_has_the_strides_of_its_parameter(world):
    """Fused optimizers read both in the order of memory."""
    strategy = build(world=world)
    step(strategy, BATCHES)
    strides = {name: (param.stride(), param.grad.stride()) for name, param in strategy.module.named_parameters()}
    assert strides["second.weight"][0] != strategy.module.second.weight.contiguous().stride()
    assert [name for name, (ours, of_grad) in strides.items() if ours != of_grad] == []


def test_the_gradient_is_the_sum_of_those_rounded_to_the_grid(world):
    each = plain_gradients(BATCHES)
    rounded = {name: [torch.round(grads[name].double() * 2**50) / 2**50 for grads in each] for name in each[0]}
    # in float64, sums of grid points below 4 are exact
    expected = {name: sum(values).float() for name, values in rounded.items()}
    assert bits(step(build(world=world), BATCHES)) == bits(expected)


@pytest.mark.parametrize("order", list(permutations(range(M)))[1:])
def test_the_order_of_micro_batches_changes_no_bit(world, order):
    reordered = step(build(world=world), [BATCHES[index] for index in order])
    assert bits(reordered) == bits(step(build(world=world), BATCHES))


def test_sizes_of_buckets_and_chunks_change_no_bit(world, monkeypatch):
    expected = bits(step(build(world=world), BATCHES))
    for name, size in {"BUCKET": 105, "CHUNK": 21, "WIDTH": 7}.items():
        monkeypatch.setattr(exact, name, size)
    small = build(world=world)
    assert (len(small._buckets) > 3, bits(step(small, BATCHES))) == (True, expected)


def test_a_step_leaves_nothing_to_the_next(world):
    strategy = build(world=world)
    first = bits(step(strategy, BATCHES))
    step(strategy, [batch_of(7), batch_of(8, {("head.weight", 0): NAN})])
    assert bits(step(strategy, BATCHES)) == first


def test_setting_up_again_does_not_count_twice(world):
    strategy = build(world=world)
    first = bits(step(strategy, BATCHES))
    strategy.setup(M)
    assert bits(step(strategy, BATCHES)) == first


@pytest.mark.parametrize("power", [-3, 5, 16])
def test_a_power_of_two_as_scale_changes_no_bit(world, power):
    scale = torch.tensor(2.0**power)
    scaled = step(build(world=world), BATCHES, scale)
    assert bits({name: grad / scale for name, grad in scaled.items()}) == bits(step(build(world=world), BATCHES))


class Operations(TorchDispatchMode):
    """How many there are, without those that compute nothing."""

    number = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.number += not function.is_view
        return function(*arguments, **options or {})


def operations_of_sums(world, num_layers):
    """Those of a step, without those of its forward and backward passes."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(num_layers)))

    def loss_of():
        return model(torch.ones(2, 4)).sum()

    with Operations() as of_plain:
        torch.autograd.grad(loss_of(), list(model.parameters()))
    strategy = build(world=world, model=model)
    with Operations() as of_step:
        for _ in strategy.accumulate([OnCpu(index=index) for index in range(M)], ONE):
            loss_of().backward()
    return of_step.number - M * of_plain.number


def test_many_small_params_take_few_operations(world):
    """On an accelerator each is a kernel: there a bucket's parameters are added together, whatever their size."""
    assert operations_of_sums(world, 40) == operations_of_sums(world, 4)


# --- params without a gradient


class Optional(nn.Module):
    """Param `a` is used always, `b` in the batches that ask for it, `c` never."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.ones(2)) for _ in range(3))

    def forward(self, uses_b):
        return (self.a + (self.b if uses_b else 0)).sum()


def optional_step(strategy, *uses_b):
    strategy.module.zero_grad(set_to_none=True)
    batches = [OnCpu(index=index, uses_b=use) for index, use in enumerate(uses_b)]
    for model, batch in strategy.accumulate(batches, ONE):
        model(batch.uses_b).backward()
    return [None if param.grad is None else param.grad.tolist() for param in strategy.module.parameters()]


def test_a_param_without_a_gradient_keeps_none(world):
    assert optional_step(build(world=world, model=Optional()), False, False) == [[2, 2], None, None]


@pytest.mark.parametrize("uses_b", [(True, False), (False, True)])
def test_a_param_that_one_micro_batch_uses_has_its_gradient(world, uses_b):
    assert optional_step(build(world=world, model=Optional()), *uses_b) == [[2, 2], [1, 1], None]


def test_a_bucket_is_sent_in_the_last_backward_when_it_is_complete(world):
    """A step that lacks one is sent afterwards, and leaves nothing behind that keeps the next one waiting."""
    model = Optional()
    model.c.requires_grad_(False)
    strategy, is_sent = build(world=world, model=model), []
    for uses_b in (False, True, False, True):
        model.zero_grad(set_to_none=True)
        for _ in strategy.accumulate([OnCpu(index=index) for index in range(2)], ONE):
            strategy.model(uses_b).backward()
            is_sent.append([bucket.work is not None for bucket in strategy._buckets])
    assert is_sent == [[False], [False], [False], [True]] * 2


def test_a_param_that_a_step_does_not_use_keeps_nothing_of_the_last_step(world):
    strategy = build(world=world, model=Optional())
    optional_step(strategy, True, True)
    assert optional_step(strategy, False, False) == [[2, 2], [0, 0], None]


def test_a_frozen_param_does_not_change(world):
    model = Optional()
    model.b.requires_grad_(False)
    assert optional_step(build(world=world, model=model), True, True) == [[2, 2], None, None]


# --- what an integer sum would lose


BELOW, ABOVE = LIMIT / M * (1 - 2**-8), LIMIT / M * (1 + 2**-8)  # by 5, more than what the net itself adds
PLANTS = [NAN, INF, -INF, ABOVE, -ABOVE, 2.0**12, 2.0**13, -(2.0**13), 2.0**14, -(2.0**14), 3e38, -3e38]


def norm_with(world, *planted, name="second.weight", at=5, scale=ONE):
    """Norm of the step's gradient with one value planted in each micro-batch (None: nothing), at a flat index."""
    plants = [{} if value is None else {(name, at): value} for value in planted]
    strategy = build(world=world)
    step(strategy, [batch_of(index, plant) for index, plant in enumerate(plants)], scale)
    return strategy.clip_grad_norm_(0.0).item()


@pytest.mark.parametrize("value", PLANTS)
@pytest.mark.parametrize("index", range(M))
def test_one_bad_value_in_one_micro_batch_makes_the_sum_non_finite(world, value, index):
    norm = norm_with(world, *[value if other == index else None for other in range(M)])
    assert not torch.isfinite(torch.tensor(norm))


@pytest.mark.parametrize("one, other", [*combinations(PLANTS, 2), *[(value, value) for value in PLANTS]])
def test_two_bad_values_in_different_micro_batches_do_not_cancel(world, one, other):
    """x86 converts NaN, inf and overflow to INT64_MIN, and two of these add to 0. 2^14 is 2^64 grid units: also 0."""
    norm = norm_with(world, one, None, other)
    assert not torch.isfinite(torch.tensor(norm))


@pytest.mark.parametrize("name, at", [
    ("first.weight", 0), ("second.bias", 7), ("head.weight", 39), ("turned", 19), ("scale", 0)])
def test_a_bad_value_is_found_in_any_param(world, name, at):
    assert not torch.isfinite(torch.tensor(norm_with(world, None, NAN, None, name=name, at=at)))


def test_a_bad_value_is_found_in_any_chunk(world, monkeypatch):
    monkeypatch.setattr(exact, "CHUNK", 100)
    monkeypatch.setattr(exact, "WIDTH", 10)
    norms = [norm_with(world, None, NAN, None, at=at) for at in (0, 99, 100, 300, 575)]
    assert not torch.isfinite(torch.tensor(norms)).any()


def test_values_just_below_the_limit_in_every_micro_batch_are_added(world):
    planted, plain = ([batch_of(index, plant) for index in range(M)] for plant in ({("head.bias", 1): BELOW}, None))
    found, without = (step(build(world=world), batches)["head.bias"][1].item() for batches in (planted, plain))
    assert found == pytest.approx(M * BELOW + without, abs=2e-3)  # float32's spacing at 4096 is 5e-4


@pytest.mark.parametrize("value, expected", [
    (BELOW, True), (-BELOW, True), (ABOVE, False), (-ABOVE, False), (NAN, False), (INF, False)])
def test_with_a_scale_the_limit_is_on_the_gradient_without_it(world, value, expected):
    norm = norm_with(world, None, value, None, scale=torch.tensor(2.0**16))
    assert torch.isfinite(torch.tensor(norm)) == expected


def test_the_step_after_a_non_finite_one_is_finite(world):
    strategy = build(world=world)
    step(strategy, [batch_of(0, {("scale", 0): NAN})])
    step(strategy, BATCHES)
    assert torch.isfinite(strategy.clip_grad_norm_(0.0))


@pytest.mark.parametrize("names", [["ab", "a"], ["a", "ab"], ["ab", ""], ["b", "b"]])
def test_params_that_micro_batches_skip_are_no_corruption(world, monkeypatch, names):
    """names: the layers of each micro-batch. Each layer is a group of its own, whose columns the checksum is of."""
    monkeypatch.setattr(exact, "CHUNK", 16)
    monkeypatch.setattr(exact, "WIDTH", 4)
    strategy = build(2, world, nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in "ab"}))
    for _ in range(2):
        for model, batch in strategy.accumulate([OnCpu(index=index, layers=each) for index, each in enumerate(names)],
                                                ONE):
            if batch.layers:
                sum(model[name](torch.ones(1, 4)).sum() for name in batch.layers).backward()
        assert not strategy.is_corrupted
