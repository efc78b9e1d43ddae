"""Batches that are tried on this rank and change nothing: for sizes that fit into memory, and for a precision.

An attempt takes part in no collective, so that a rank that fails alone keeps no other rank waiting. Where a forward is
collective, callers make none, but all ranks together in the warm-up.
"""

import torch
from torch import Tensor, nn

from engine.start import Start
from engine.step import forward
from utils.strategies.buffers import Buffers


class Attempts:
    """Batches of a size, tried on this rank. They leave model and optimizer as they were between steps."""

    def __init__(self, start: Start, model: nn.Module, optimizer: torch.optim.Optimizer | None = None,
                 bytes_per_param: int = 0):
        """optimizer: None = train() computes gradients alone. bytes_per_param: of a strategy's sums."""
        self._start, self._model, self._optimizer, self._bytes_per_param = start, model, optimizer, bytes_per_param

    def train(self, size: int) -> None:
        """A micro-batch of `size`, beside all that a run keeps: optimizer state, gradients, the strategy's sums."""
        # what a run keeps
        self._model.train(size > 1)  # BatchNorm would refuse one sample
        params = [param for param in self._model.parameters() if param.requires_grad]
        num_bytes = self._bytes_per_param * sum(map(nn.Parameter.numel, params))
        sums = torch.empty(num_bytes, dtype=torch.uint8, device=self._start.world.device)
        buffers, optimizer = Buffers(self._model), self._optimizer
        state = dict(optimizer.state) if optimizer else {}
        buffers.begin()

        # two steps that change nothing
        try:
            for _ in range(2):  # the first makes the optimizer allocate its state
                grads = torch.autograd.grad(self._loss(size), params, allow_unused=True)  # no hook sees it
                if optimizer:
                    for param, grad in zip(params, grads, strict=True):
                        param.grad = grad
                    self._start.precision.void_step(optimizer)
        finally:
            del sums
            buffers.restore()
            self._model.zero_grad(set_to_none=True)
            if optimizer:
                optimizer.state.clear()
                optimizer.state.update(state)

    @torch.no_grad()
    def evaluate(self, size: int) -> None:
        """An evaluation batch of `size`."""
        self._model.eval()
        self._loss(size)

    def _loss(self, size: int) -> Tensor:
        """The loss of a batch of `size`, summed, in the mode that the model is in: scalar."""
        return forward(self._start, self._model, self._start.task.example(size).to(self._start.world.device), step=0)
