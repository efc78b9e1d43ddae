"""models/attention.py: attention with dropout on the CPU is what torch composes, by fewer operations."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import models.attention
from models.attention import _attend
from utils.numerics.masks import draw_16_bits

B, HEADS, T, H = 3, 2, 7, 4
ENCODER = SimpleNamespace(is_causal=False)
NEVER = 1e-9  # a dropout that drops nothing


@pytest.fixture(autouse=True)
def seeded():
    draw_16_bits()
    torch.manual_seed(0)


def inputs(keys: int = T) -> list[torch.Tensor]:
    """Query, key, value."""
    return [torch.randn(B, HEADS, number, H, requires_grad=True) for number in (T, keys, keys)]


def padding() -> torch.Tensor:
    """The mask of texts of 7, 5 and 1 tokens."""
    return (torch.arange(T) < torch.tensor([7, 5, 1])[:, None])[:, None, None].expand(B, 1, T, T)


@pytest.mark.parametrize("mask", [None, padding()])
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_outputs_and_gradients_are_those_of_torch(mask, scaling):
    """In float32 both compute the same; with a dropout above 0, of which no value falls, ours is the plain way."""
    tensors = inputs()
    ours, nothing = _attend(ENCODER, *tensors, mask, NEVER, scaling)
    torchs, _ = sdpa_attention_forward(ENCODER, *tensors, mask, 0.0, scaling)
    direction = torch.randn_like(ours)
    gradients = [torch.autograd.grad(each, tensors, direction) for each in (ours, torchs)]
    assert nothing is None and ours.shape == (B, T, HEADS, H)
    torch.testing.assert_close(ours, torchs)
    torch.testing.assert_close(*gradients)


def test_dropout_falls_on_the_weights_of_attention():
    """The same masks fall on the weights by hand."""
    query, key, value = inputs()
    torch.manual_seed(5)
    ours, _ = _attend(ENCODER, query, key, value, None, 0.5)
    torch.manual_seed(5)
    weights = F.dropout((query @ key.transpose(2, 3) / H**0.5).softmax(-1), 0.5)
    assert (weights == 0).any()
    torch.testing.assert_close(ours, (weights @ value).transpose(1, 2))


@pytest.mark.parametrize(("module", "keys", "mask", "dropout", "options"), [
    (ENCODER, T, None, 0.0, {}),  # torch has a kernel
    (SimpleNamespace(is_causal=True), T, None, 0.1, {}),
    (SimpleNamespace(), T, None, 0.1, {}),  # transformers takes it for causal
    (ENCODER, T, None, 0.1, {"is_causal": True}),
    (ENCODER, T + 1, None, 0.1, {}),
    (ENCODER, T, torch.zeros(B, 1, T, T), 0.1, {}),  # added to the scores
    (ENCODER, T, None, 0.1, {"position_bias": torch.zeros(1, HEADS, T, T)}),
])
def test_what_is_not_an_encoders_dropout_is_left_to_transformers(module, keys, mask, dropout, options):
    tensors = inputs(keys)
    torch.manual_seed(5)
    ours, _ = _attend(module, *tensors, mask, dropout, **options)
    torch.manual_seed(5)
    assert torch.equal(ours, sdpa_attention_forward(module, *tensors, mask, dropout, **options)[0])


def test_a_device_with_a_kernel_for_dropout_uses_it(monkeypatch):
    monkeypatch.setattr(models.attention, "has_attention_with_dropout", lambda device_type: device_type == "cpu")
    tensors = inputs()
    torch.manual_seed(5)
    ours, _ = _attend(ENCODER, *tensors, None, 0.5)
    torch.manual_seed(5)
    assert torch.equal(ours, sdpa_attention_forward(ENCODER, *tensors, None, 0.5)[0])
