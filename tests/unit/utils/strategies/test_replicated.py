"""What a strategy that keeps the whole model loads into the optimizer."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from utils.numerics.optimizers import build_optimizer
from utils.settings.run_options import OptimOptions
from utils.strategies.replicated import Replicated

pytestmark = pytest.mark.unit


def test_parameters_that_begin_to_learn_keep_the_optimizers_first_state():
    """A branch may free what its parent had frozen: SGD's momentum of that begins with zeros, not without a buffer."""
    model = nn.Linear(3, 2)
    optimizer = build_optimizer(model, OptimOptions(optimizer="sgd", lr=0.1))
    strategy = SimpleNamespace(module=model, placed=lambda tensor, like: tensor)
    saved = torch.full((2,), 0.5)
    Replicated.load_optimizer_state(strategy, optimizer, {"bias": {"momentum_buffer": saved}})
    buffers = {name: optimizer.state[param]["momentum_buffer"] for name, param in model.named_parameters()}
    assert torch.equal(buffers["bias"], saved) and torch.equal(buffers["weight"], torch.zeros(2, 3))
