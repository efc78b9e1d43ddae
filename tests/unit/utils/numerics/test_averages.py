"""utils/numerics/averages.py: torch's formula, a void step, what a checkpoint continues."""

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from utils.numerics.averages import Averages

YES, NO = torch.tensor(True), torch.tensor(False)


def model_of(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to(memory_format=torch.channels_last)


def move(model):
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.add_(1 if tensor.dtype == torch.int64 else torch.randn_like(tensor))


@pytest.mark.parametrize("decay", [0.3, 0.999])
def test_steps_are_torchs_formula_with_a_decay_that_grows(decay):
    """Both round once or twice per step in float32 (6e-8)."""
    model = model_of()
    averages = Averages(model.state_dict(), decay)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items() if tensor.is_floating_point()}
    for step in range(30):
        move(model)
        averages.update(step, YES)
        share = min(decay, (1 + step) / (10 + step))
        get_ema_multi_avg_fn(share)(list(expected.values()), [model.state_dict()[name] for name in expected], None)
    assert "1.running_var" in expected and "1.num_batches_tracked" not in expected
    torch.testing.assert_close(averages.values, expected, rtol=1e-5, atol=1e-6)


def test_the_decay_reaches_its_limit():
    model = model_of()
    averages = Averages(model.state_dict(), 0.9)
    before = averages.values["0.bias"].clone()
    move(model)
    averages.update(10_000, YES)
    torch.testing.assert_close(averages.values["0.bias"], 0.9 * before + 0.1 * model[0].bias.detach())


def test_a_step_that_changed_nothing_moves_no_average_by_a_bit():
    model = model_of()
    averages = Averages(model.state_dict(), 0.9)
    move(model)
    averages.update(3, YES)
    before = {name: value.clone() for name, value in averages.values.items()}
    averages.update(4, NO)
    assert all(torch.equal(value, before[name]) for name, value in averages.values.items())


def test_swapping_in_and_out_leaves_both_bit_for_bit():
    model = model_of()
    averages = Averages(model.state_dict(), 0.9)
    move(model)
    averages.update(0, YES)
    weights, values = ({name: tensor.clone() for name, tensor in each.items()}
                       for each in (model.state_dict(), averages.values))
    with averages.swapped_in():
        assert all(torch.equal(model.state_dict()[name], value) for name, value in values.items())
        assert all(torch.equal(averages.values[name], weights[name]) for name in values)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    assert all(torch.equal(averages.values[name], value) for name, value in values.items())


def test_without_kept_values_the_average_starts_from_the_weights_of_now():
    model = model_of()
    averages = Averages(model.state_dict(), 0.9)
    move(model)
    averages.load({})
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in averages.values.items())


def test_a_decay_of_0_keeps_nothing():
    model = model_of()
    averages = Averages(model.state_dict(), 0.0)
    averages.update(0, YES)
    averages.load({})
    assert averages.values == {}
