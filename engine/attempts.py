"""Batches that are tried on this rank and change nothing: for sizes that fit into memory, and for a precision.

An attempt takes part in no collective, so that a rank that fails alone keeps no other rank waiting. Where a forward is
collective, callers make none, but all ranks together in the warm-up. It leaves model and optimizer as they were between
steps.

Tests: tests/device/test_memory.py
"""

import torch
from torch import Tensor, nn

from engine.start import Start
from engine.step import forward
from utils.strategies.buffers import Buffers


def try_training(start: Start, model: nn.Module, size: int, optimizer: torch.optim.Optimizer | None = None,
                 bytes_per_param: int = 0) -> None:
    """A micro-batch of `size`, beside all that a run keeps: optimizer state, gradients, the strategy's sums.

    optimizer: None = gradients alone. bytes_per_param: of the strategy's sums.
    """
    # what a run keeps
    model.train(size > 1)  # BatchNorm would refuse one sample
    params = [param for param in model.parameters() if param.requires_grad]
    num_bytes = bytes_per_param * sum(map(nn.Parameter.numel, params))
    sums = torch.empty(num_bytes, dtype=torch.uint8, device=start.world.device)
    buffers, state = Buffers(model), dict(optimizer.state) if optimizer else {}
    buffers.begin()

    # two steps that change nothing
    try:
        for _ in range(2):  # the first makes the optimizer allocate its state
            grads = torch.autograd.grad(_loss(start, model, size), params, allow_unused=True)  # no hook sees it
            if optimizer:
                for param, grad in zip(params, grads, strict=True):
                    param.grad = grad
                start.precision.void_step(optimizer)
    finally:
        del sums
        buffers.restore()
        model.zero_grad(set_to_none=True)
        if optimizer:
            optimizer.state.clear()
            optimizer.state.update(state)


@torch.no_grad()
def try_evaluation(start: Start, model: nn.Module, size: int) -> None:
    """An evaluation batch of `size`."""
    model.eval()
    _loss(start, model, size)


def _loss(start: Start, model: nn.Module, size: int) -> Tensor:
    """The loss of a batch of `size`, summed, in the mode that the model is in: scalar."""
    return forward(start, model, start.task.example(size).to(start.world.device), step=0)
