"""utils/numerics/optimizers.py: schedules are formulas; which params decay; optimizers that can skip a step."""

import math
import typing

import pytest
import torch
from torch import nn

from utils.numerics.optimizers import build_optimizer, build_schedule, set_lr
from utils.settings.run_options import OptimOptions

OPTIMIZERS = typing.get_args(typing.get_type_hints(OptimOptions)["optimizer"])  # every --optimizer


def rates(total_steps, **options):
    schedule = build_schedule(OptimOptions(**{"lr": 0.001} | options), total_steps)
    return [schedule(step) for step in range(total_steps + 1)]


def test_the_warm_up_rises_linearly_to_lr():
    assert rates(100, lr=1.0, warmup_steps=4)[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


@pytest.mark.parametrize("total_steps, expected", [(100, 5), (10, 0), (1000, 50), (30, 2)])
def test_the_automatic_warm_up_is_a_twentieth_of_the_run(total_steps, expected):
    found = rates(total_steps, lr=1.0, schedule="constant")
    assert sum(rate < 1.0 for rate in found) == expected


def test_cosine_falls_by_the_formula_to_0_at_the_end():
    found = rates(50, lr=0.3, warmup_steps=10)
    expected = [0.3 * (1 + math.cos(math.pi * (step - 10) / 40)) / 2 for step in range(10, 51)]
    assert found[10:] == pytest.approx(expected) and found[50] == 0


def test_linear_falls_by_the_formula_to_0_at_the_end():
    found = rates(50, lr=0.3, warmup_steps=10, schedule="linear")
    assert found[10:] == pytest.approx([0.3 - 0.3 * (step - 10) / 40 for step in range(10, 51)])


def test_constant_stays_at_lr():
    assert rates(20, lr=0.3, warmup_steps=0, schedule="constant") == [0.3] * 21


@pytest.mark.parametrize("warmup", [0, 4])
def test_step_is_torchs_step_lr_once_the_warm_up_is_over(warmup):
    """StepLR counts in steps here, and its rates differ by rounding: it multiplies again and again."""
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.3)
    oracle, expected = torch.optim.lr_scheduler.StepLR(optimizer, step_size=14, gamma=0.1), []
    for _ in range(43):
        expected += oracle.get_last_lr()
        optimizer.step()
        oracle.step()
    found = rates(42, lr=0.3, warmup_steps=warmup, schedule="step")
    assert found[warmup:] == pytest.approx(expected[warmup:], rel=1e-12) and len(set(expected)) == 4
    assert found[:warmup] == pytest.approx([0.3 * (step + 1) / (warmup + 1) for step in range(warmup)])


@pytest.mark.parametrize("schedule", ["cosine", "linear", "step"])
def test_without_a_warm_up_the_first_step_has_lr(schedule):
    assert rates(20, lr=0.3, warmup_steps=0, schedule=schedule)[0] == 0.3


@pytest.mark.parametrize("warmup", [5, 9])
def test_a_warm_up_as_long_as_the_run_has_a_rate_for_every_step(warmup):
    assert rates(5, lr=1.0, warmup_steps=warmup)[:5] == pytest.approx([(step + 1) / (warmup + 1) for step in range(5)])


def test_the_rate_is_a_function_of_the_step_alone():
    schedule = build_schedule(OptimOptions(lr=0.001), 100)
    assert [schedule(step) for step in (7, 99, 7)] == [schedule(7), schedule(99), schedule(7)]


def test_set_lr_sets_it_in_all_groups():
    optimizer = build_optimizer(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), OptimOptions(lr=0.001))
    set_lr(optimizer, 0.125)
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.125]


def test_factors_make_groups_and_set_lr_multiplies_by_them():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = build_optimizer(model, OptimOptions(lr=0.001, weight_decay=0.3), {"0.weight": 0.5, "0.bias": 0.5})
    set_lr(optimizer, 0.1)
    found = [(group["param_names"], group["weight_decay"], group["lr"]) for group in optimizer.param_groups]
    assert found == [(["0.weight"], 0.3, 0.05), (["1.weight"], 0.3, 0.1), (["0.bias"], 0.0, 0.05),
                     (["1.bias"], 0.0, 0.1)]


def test_without_factors_there_are_two_groups_decayed_first():
    optimizer = build_optimizer(nn.Linear(2, 2), OptimOptions(lr=0.001, weight_decay=0.3))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]


# --- optimizers


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.table = nn.Parameter(torch.ones(2, 2))


MODEL = [("conv", nn.Conv2d(1, 2, 1)), ("batch", nn.BatchNorm2d(2)), ("group", nn.GroupNorm(1, 2)),
         ("layer", nn.LayerNorm((2, 2))), ("rms", nn.RMSNorm((2, 2))), ("embed", nn.Embedding(3, 2)), ("own", Scaled()),
         ("head", nn.Linear(2, 2))]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_norms_and_biases_do_not_decay_and_every_other_param_does(name):
    optimizer = build_optimizer(nn.ModuleDict(dict(MODEL)), OptimOptions(optimizer=name, lr=0.001, weight_decay=0.3))
    decays = {name: group["weight_decay"] for group in optimizer.param_groups for name in group["param_names"]}
    assert decays == {
        "conv.weight": 0.3, "conv.bias": 0.0, "batch.weight": 0.0, "batch.bias": 0.0, "group.weight": 0.0,
        "group.bias": 0.0, "layer.weight": 0.0, "layer.bias": 0.0, "rms.weight": 0.0, "embed.weight": 0.3,
        "own.scale": 0.0, "own.table": 0.3, "head.weight": 0.3, "head.bias": 0.0}


def stepped(build):
    """A model's params after three steps with the optimizer that `build` makes."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = build(model)
    for _ in range(3):
        model(torch.randn(4, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def plain_groups(model):
    return [{"params": [model.weight], "weight_decay": 0.1}, {"params": [model.bias], "weight_decay": 0.0}]


@pytest.mark.parametrize("options, plain", [
    (OptimOptions(optimizer="sgd", lr=0.1, momentum=0.8, weight_decay=0.1),
     lambda model: torch.optim.SGD(plain_groups(model), lr=0.1, momentum=0.8, nesterov=True)),
    (OptimOptions(optimizer="sgd", lr=0.1, momentum=0.0, weight_decay=0.1),
     lambda model: torch.optim.SGD(plain_groups(model), lr=0.1)),
    (OptimOptions(optimizer="adam", lr=0.1, betas=(0.7, 0.8), weight_decay=0.1),
     lambda model: torch.optim.Adam(plain_groups(model), lr=0.1, betas=(0.7, 0.8))),
    (OptimOptions(optimizer="adamw", lr=0.1, betas=(0.7, 0.8), weight_decay=0.1),
     lambda model: torch.optim.AdamW(plain_groups(model), lr=0.1, betas=(0.7, 0.8)))])
def test_the_fused_optimizer_steps_as_torchs_plain_one(options, plain):
    """Fused kernels contract multiply and add: the tolerance is a few ulp of float32 (6e-8) per step."""
    fused = stepped(lambda model: build_optimizer(model, options))
    torch.testing.assert_close(fused, stepped(plain), rtol=1e-5, atol=1e-6)


def test_frozen_params_do_not_change():
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    before = model.bias.clone()
    optimizer = build_optimizer(model, OptimOptions(optimizer="sgd", lr=1.0))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert torch.equal(model.bias, before)


def test_a_model_without_decayed_params_has_one_group():
    assert len(build_optimizer(nn.LayerNorm(3), OptimOptions(lr=0.001)).param_groups) == 1


def test_an_optimizer_that_ignores_found_inf_is_refused_when_it_is_built(monkeypatch):
    """Whoever adds one to build_optimizer meets the message at the first start."""
    monkeypatch.setattr(torch.optim, "AdamW", lambda groups, lr, betas, fused: torch.optim.RMSprop(groups, lr=lr))
    with pytest.raises(TypeError, match=r"RMSprop ignores found_inf, .*; use torch's SGD, Adam or AdamW"):
        build_optimizer(nn.Linear(2, 2), OptimOptions(lr=0.001))


def test_rmsprop_does_apply_a_gradient_that_is_not_finite():
    """Why it is refused; once this fails, torch has changed and RMSprop may be offered."""
    param = nn.Parameter(torch.ones(1))
    param.grad = torch.tensor([float("nan")])
    optimizer = torch.optim.RMSprop([param])
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert param.isnan().all()
