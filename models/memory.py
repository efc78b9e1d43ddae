"""The memory of a device: sizes of batches that fit are found before the training starts, by trying, and again where it runs out later.

An attempt takes part in no collective, so that a rank whose memory runs out keeps no other waiting.
"""

import socket
import traceback
from collections.abc import Callable

import torch
from torch import nn

from data.sampler import BatchPlan
from models.tasks.base import Task
from utils.distributed import World
from utils.errors import UserError, is_out_of_memory
from utils.parallel.base import Buffers, Strategy
from utils.precision import Precision


class Attempts:
    """Batches of a size, tried on this rank. They leave the model as it was, and .grad as it is between steps: None."""

    def __init__(self, task: Task, model: nn.Module, optimizer: torch.optim.Optimizer, precision: Precision,
                 strategy: type[Strategy], device: torch.device):
        self._task, self._model, self._optimizer, self._precision, self._device = task, model, optimizer, precision, device
        self._bytes_per_weight = strategy.bytes_per_weight

    def train(self, size: int) -> None:
        """A micro-batch of `size`, beside all that a run keeps: the optimizer's state, gradients, the strategy's sums."""
        self._model.train()
        weights = [weight for weight in self._model.parameters() if weight.requires_grad]
        sums = torch.empty(self._bytes_per_weight * sum(map(nn.Parameter.numel, weights)), dtype=torch.uint8, device=self._device)
        buffers = Buffers(self._model)
        buffers.begin()
        try:
            for _ in range(2):  # the first makes the optimizer allocate its state
                with self._precision.autocast():
                    loss = self._task.forward(self._model, self._task.example(size).to(self._device)).loss_sum
                for weight, grad in zip(weights, torch.autograd.grad(loss, weights, allow_unused=True), strict=True):  # no hook sees it
                    weight.grad = grad
                self._precision.void_step(self._optimizer)
        finally:
            del sums
            buffers.restore()
            self._optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def evaluate(self, size: int) -> None:
        """An evaluation batch of `size`."""
        self._model.eval()
        with self._precision.autocast():
            self._task.forward(self._model, self._task.example(size).to(self._device))


def largest_fit(attempt: Callable[[int], None], size: int) -> int:
    """The largest of size, size / 2, ... for which this rank's memory is enough; 0 if it is not for one sample."""
    while size and _lack_of_memory(attempt, size):
        size //= 2
    return size


def fit_micro_batch(plan: BatchPlan, attempts: Attempts, is_free: bool, settle: Callable[[int], BatchPlan], world: World) -> BatchPlan:
    """The plan, or `settle(size)` where its micro-batches do not fit into the memory of every rank's device. Collective.

    is_free: the size may change: it is `auto`, and does not decide about bits. Else raises UserError (64) with a size that fits.
    """
    fit, reason = _agreed_fit(attempts.train, plan.sizes[1], world)  # Collective.
    if fit == plan.sizes[1]:
        return plan
    if not fit or not is_free:
        raise UserError(f"micro-batches of {plan.sizes[1]} samples do not fit: {reason}; {_way_out('--micro-batch-size', fit)}")
    return settle(fit)


def fit_eval_batch(size: int, attempts: Attempts, world: World) -> None:
    """Raise UserError (64), with a size that fits, where evaluation batches of `size` samples do not. Collective."""
    fit, reason = _agreed_fit(attempts.evaluate, size, world)  # Collective.
    if fit < size:
        raise UserError(f"evaluation batches of {size} samples do not fit: {reason}; {_way_out('--eval-batch-size', fit)}")


def _agreed_fit(attempt: Callable[[int], None], size: int, world: World) -> tuple[int, str]:
    """largest_fit over all ranks, and what a device said of a size that does not. (The CPU's is not tried out.) Collective."""
    first = ""
    while size and world.device.type != "cpu":
        lack = _lack_of_memory(attempt, size)
        told = world.gather(f"{socket.gethostname()}, {world.device}: {lack}" if lack else "")  # Collective.
        if not any(told):
            break
        size, first = size // 2, first or next(filter(None, told))
    return size, first


def _lack_of_memory(attempt: Callable[[int], None], size: int) -> str:
    """What the device said where its memory is not enough for the attempt; "" where it is."""
    try:
        attempt(size)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        traceback.clear_frames(error.__traceback__)  # which hold what was allocated
        return str(error).partition("\n")[0] or "out of memory"
    return ""


def _way_out(flag: str, fit: int) -> str:
    return f"{flag} {fit} fits" if fit else "and neither does one: use a smaller --model, or smaller samples"
