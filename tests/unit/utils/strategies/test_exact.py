"""utils/strategies/exact.py: sums of gradients whose bits know no order, and which lose no NaN, inf or overflow.

On several processes: tests/distributed. M micro-batches per step.
"""

from itertools import combinations, permutations
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from utils.strategies import exact
from utils.strategies.exact import LIMIT, Exact

M = 3
ONE = torch.ones(())
NAN, INF = float("nan"), float("inf")


class Net(nn.Module):
    """A small conv net with what is awkward: channels_last, a transposed and a scalar weight, one weight used twice."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.second = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, padding=1)
        self.head, self.turned, self.scale = nn.Linear(8, 5), nn.Parameter(torch.randn(5, 4).t()), nn.Parameter(torch.tensor(0.7))

    def forward(self, images):
        hidden = F.relu(self.norm(self.first(images)))
        hidden = self.second(self.second(hidden)).mean(dim=(2, 3))
        return self.head(hidden) @ self.turned.t() * self.scale


def build(num_micro_batches=M, world=None, model=None):
    strategy = Exact((model or Net()).to(memory_format=torch.channels_last), world)
    strategy.setup(num_micro_batches)
    return strategy


def batch_of(number, plant=None):
    """plant: {(weight name, place): value}, added to the micro-batch's gradient there."""
    images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(number)).to(memory_format=torch.channels_last)
    return SimpleNamespace(index=number, images=images, plant=plant or {})


def loss_of(model, batch):
    loss = model(batch.images).square().mean() / M
    for (name, place), value in batch.plant.items():
        loss = loss + model.get_parameter(name).flatten()[place] * value  # whose gradient is `value` there
    return loss


def step(strategy, batches, scale=ONE):
    """{name: gradient or None} after one step."""
    strategy.module.zero_grad(set_to_none=True)
    for batch in strategy.accumulate(batches, len(batches), scale):
        (loss_of(strategy.model, batch) * scale).backward()
    return {name: None if weight.grad is None else weight.grad.clone() for name, weight in strategy.module.named_parameters()}


def bits(gradients):
    return {name: None if grad is None else grad.flatten().view(torch.int32).tolist() for name, grad in gradients.items()}


def plain_gradients(batches):
    """[M] {name: gradient}, each micro-batch by plain autograd."""
    found = []
    for batch in batches:
        model = Net().to(memory_format=torch.channels_last)
        loss_of(model, batch).backward()
        found.append({name: weight.grad for name, weight in model.named_parameters()})
    return found


BATCHES = [batch_of(number) for number in range(M)]


# --- the sums


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_gradient_is_that_of_plain_autograd(world, count):
    plain = Net().to(memory_format=torch.channels_last)
    sum(loss_of(plain, batch) for batch in BATCHES[:count]).backward()
    expected = torch.cat([weight.grad.flatten() for weight in plain.parameters()])
    found = torch.cat([grad.flatten() for grad in step(build(world=world), BATCHES[:count]).values()])
    assert (found - expected).abs().max() <= 1e-6 * expected.abs().max()  # a few roundings of float32, 6e-8 each


def test_the_gradient_is_the_sum_of_those_rounded_to_the_grid_bit_for_bit(world):
    each = plain_gradients(BATCHES)
    rounded = {name: [torch.round(grads[name].double() * 2**50) / 2**50 for grads in each] for name in each[0]}
    expected = {name: sum(values).float() for name, values in rounded.items()}  # in float64 sums of grid points below 4 are exact
    assert bits(step(build(world=world), BATCHES)) == bits(expected)


@pytest.mark.parametrize("order", list(permutations(range(M)))[1:])
def test_the_order_of_micro_batches_changes_no_bit(world, order):
    assert bits(step(build(world=world), [BATCHES[v] for v in order])) == bits(step(build(world=world), BATCHES))


def test_neither_buckets_nor_chunks_change_a_bit(world, monkeypatch):
    expected = bits(step(build(world=world), BATCHES))
    monkeypatch.setattr(exact, "BUCKET", 100)
    monkeypatch.setattr(exact, "CHUNK", 7)
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
    strategy.setup()
    assert bits(step(strategy, BATCHES)) == first


@pytest.mark.parametrize("power", [-3, 5, 16])
def test_a_power_of_two_as_scale_changes_no_bit(world, power):
    scale = torch.tensor(2.0**power)
    scaled = step(build(world=world), BATCHES, scale)
    assert bits({name: grad / scale for name, grad in scaled.items()}) == bits(step(build(world=world), BATCHES))


# --- weights without a gradient


class Optional(nn.Module):
    """Weights `a` that always count, `b` in the batches that ask for it, `c` never."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.ones(2)) for _ in range(3))

    def forward(self, uses_b):
        return (self.a + (self.b if uses_b else 0)).sum()


def optional_step(strategy, *uses_b):
    strategy.module.zero_grad(set_to_none=True)
    batches = [SimpleNamespace(index=number, uses_b=use) for number, use in enumerate(uses_b)]
    for batch in strategy.accumulate(batches, len(batches), ONE):
        strategy.model(batch.uses_b).backward()
    return [None if weight.grad is None else weight.grad.tolist() for weight in strategy.module.parameters()]


def test_a_weight_without_a_gradient_keeps_none(world):
    assert optional_step(build(world=world, model=Optional()), False, False) == [[2, 2], None, None]


@pytest.mark.parametrize("uses_b", [(True, False), (False, True)])
def test_a_weight_that_only_one_micro_batch_uses_has_its_gradient(world, uses_b):
    assert optional_step(build(world=world, model=Optional()), *uses_b) == [[2, 2], [1, 1], None]


def test_a_weight_that_a_step_does_not_use_gets_nothing_of_the_step_before(world):
    strategy = build(world=world, model=Optional())
    optional_step(strategy, True, True)
    assert optional_step(strategy, False, False) == [[2, 2], [0, 0], None]


def test_a_frozen_weight_is_left_alone(world):
    model = Optional()
    model.b.requires_grad_(False)
    assert optional_step(build(world=world, model=model), True, True) == [[2, 2], None, None]


# --- what an integer sum would lose


BELOW, ABOVE = LIMIT / M * (1 - 2**-8), LIMIT / M * (1 + 2**-8)  # by 5, more than what the net itself adds
PLANTS = [NAN, INF, -INF, ABOVE, -ABOVE, 2.0**12, 2.0**13, -(2.0**13), 2.0**14, -(2.0**14), 3e38, -3e38]


def norm_with(world, *planted, name="second.weight", places=None, scale=ONE):
    """Norm of the step's gradient with one value planted in each micro-batch (None: nothing)."""
    places = places or [5] * len(planted)
    plants = [{} if value is None else {(name, place): value} for value, place in zip(planted, places, strict=True)]
    strategy = build(world=world)
    step(strategy, [batch_of(number, plant) for number, plant in enumerate(plants)], scale)
    return strategy.clip_grad_norm_(0.0).item()


@pytest.mark.parametrize("value", PLANTS)
@pytest.mark.parametrize("number", range(M))
def test_one_bad_value_in_one_micro_batch_makes_the_gradient_not_finite(world, value, number):
    norm = norm_with(world, *[value if v == number else None for v in range(M)])
    assert not torch.isfinite(torch.tensor(norm))


@pytest.mark.parametrize("one, other", [*combinations(PLANTS, 2), *[(value, value) for value in PLANTS]])
def test_two_bad_values_in_different_micro_batches_do_not_cancel(world, one, other):
    # NaN, +-inf and what is beyond int64 all convert to INT64_MIN on x86, and two of these add to 0; 2^14 is 2^64 grid units, 0 modulo 2^64
    norm = norm_with(world, one, None, other)
    assert not torch.isfinite(torch.tensor(norm))


@pytest.mark.parametrize("name, place", [("first.weight", 0), ("second.bias", 7), ("head.weight", 39), ("turned", 19), ("scale", 0)])
def test_a_bad_value_is_found_in_any_weight(world, name, place):
    assert not torch.isfinite(torch.tensor(norm_with(world, None, NAN, None, name=name, places=[place] * M)))


def test_a_bad_value_is_found_in_any_chunk(world, monkeypatch):
    monkeypatch.setattr(exact, "CHUNK", 100)
    norms = [norm_with(world, None, NAN, None, places=[place] * M) for place in (0, 99, 100, 300, 575)]
    assert not torch.isfinite(torch.tensor(norms)).any()


def test_values_just_below_the_limit_in_every_micro_batch_are_added(world):
    planted, plain = ([batch_of(number, plant) for number in range(M)] for plant in ({("head.bias", 1): BELOW}, None))
    found, without = (step(build(world=world), batches)["head.bias"][1].item() for batches in (planted, plain))
    assert found == pytest.approx(M * BELOW + without, abs=2e-3)  # float32's spacing at 4096 is 5e-4


@pytest.mark.parametrize("value, expected", [(BELOW, True), (-BELOW, True), (ABOVE, False), (-ABOVE, False), (NAN, False), (INF, False)])
def test_with_a_scale_the_limit_is_on_the_gradient_without_it(world, value, expected):
    norm = norm_with(world, None, value, None, scale=torch.tensor(2.0**16))
    assert torch.isfinite(torch.tensor(norm)) == expected


def test_after_a_gradient_that_was_not_finite_a_finite_one_is(world):
    strategy = build(world=world)
    step(strategy, [batch_of(0, {("scale", 0): NAN})])
    step(strategy, BATCHES)
    assert torch.isfinite(strategy.clip_grad_norm_(0.0))
