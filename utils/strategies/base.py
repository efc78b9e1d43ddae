"""What a strategy is: how the ranks that compute one step share it. It knows no task."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from utils.distributed.world import World


class Strategy:
    """The contract, and what all strategies share. `module` is the plain model, `model` the one that a step calls."""

    largest = torch.finfo(torch.float32).max  # of a micro-batch's gradient; beyond it the sum counts as non-finite
    bytes_per_param = 0  # of the device's memory, besides the weight and its gradient
    is_invariant = False  # whether sums are the same bits on any number of ranks, also where some compute no micro-batch

    not_finite = "is not finite"  # what is wrong with a gradient that it refuses, for a message

    def __init__(self, module: nn.Module, world: World):
        self.module, self.world = module, world
        self.model: nn.Module = module
        self._buffers = Buffers(module)

    def setup(self, num_micro_batches: int) -> None:
        """Prepare `model` for training, from the weights that `module` has now; may be called again. Collective.

        num_micro_batches: in a global batch, over all ranks.
        """
        raise NotImplementedError

    def grad_sync(self, is_last: bool, scale: Tensor) -> AbstractContextManager:
        """The context of one micro-batch's forward and backward; gradients are summed over ranks with a rank's last."""
        raise NotImplementedError

    def expect_all(self) -> None:
        """After the warm-up: every trainable parameter gets a gradient in every step, zeros where no micro-batch used it."""

    def finish(self) -> None:
        """After a rank's last backward: every weight.grad is the sum over all micro-batches of all ranks. Collective."""

    def accumulate(self, micro_batches: Iterable[Any], count: int, scale: Tensor) -> Iterator[Any]:
        """This rank's micro-batches of one step, each computed in the context and from the buffers that it needs. Collective.

        count: how many there are. scale: scalar, the power of two that the losses are multiplied by. After the loop gradients
        are summed over ranks.
        """
        self._buffers.begin()
        for i, batch in enumerate(micro_batches, 1):
            with self.grad_sync(i == count, scale):
                yield batch
            if batch.index == 0:
                self._buffers.keep()
            self._buffers.restore()
        self.finish()

    def commit_buffers(self, is_finite: Tensor) -> None:
        """End the step for the buffers: those of micro-batch 0, or the old ones where the gradient was not finite. Collective."""
        self._buffers.commit(is_finite)
        for buffer in self._buffers.stepwise:
            self.world.broadcast(buffer)

    def broadcast_buffers(self) -> None:
        """Rank 0's buffers, which are the run's, on every rank: before an evaluation. Collective."""
        for buffer in self.module.buffers():
            self.world.broadcast(buffer)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Norm of the summed gradient before clipping, scalar, the same on every rank; clips in place unless max_norm is 0."""
        weights = [weight for weight in self.module.parameters() if weight.grad is not None]
        norm = torch.nn.utils.get_total_norm([weight.grad for weight in weights])
        if max_norm:
            torch.nn.utils.clip_grads_with_norm_(weights, max_norm, norm)
        return norm

    def model_state(self) -> dict[str, Tensor]:
        """Full weights and buffers by their plain names, a tied one by its first name only; the run's on rank 0."""
        names: dict[int, str] = {}
        state = self.module.state_dict(keep_vars=True)
        return {name: tensor.detach() for name, tensor in state.items() if names.setdefault(id(tensor), name) == name}

    def load_model_state(self, state: dict[str, Tensor]) -> None:
        """The inverse of model_state. Raises KeyError where a name is missing or unknown, or a shape another one."""
        own = self.model_state()
        wrong = sorted(set(own) ^ set(state)) or [name for name in own if own[name].shape != state[name].shape]
        if wrong:
            raise KeyError(f"{len(wrong)} tensors differ, {wrong[0]} for one")
        self.module.load_state_dict(state, strict=False)  # the other names of tied ones are not there

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
        """Full optimizer state by weight name. (Group settings are functions of config and step, and are not state.)"""
        names = _names_by_id(optimizer)
        return {names[number]: state for number, state in optimizer.state_dict()["state"].items()}

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state: dict[str, dict[str, Any]]) -> None:
        """The inverse of optimizer_state."""
        numbers = {name: number for number, name in _names_by_id(optimizer).items()}
        full = optimizer.state_dict()
        full["state"] = {numbers[name]: values for name, values in state.items()}
        optimizer.load_state_dict(full)


def _names_by_id(optimizer: torch.optim.Optimizer) -> dict[int, str]:
    groups = optimizer.state_dict()["param_groups"]
    return {number: name for group in groups for number, name in zip(group["params"], group["param_names"], strict=True)}


class Buffers:
    """Every micro-batch starts from the buffers of the step's start; the run's are those that micro-batch 0 leaves.

    Rank 0 always computes micro-batch 0. Stock DDP hands rank 0's buffers on, whatever share of the batch it saw: then
    BatchNorm's running statistics depend on the number of processes.
    """

    def __init__(self, module: nn.Module):
        batch_norms = {id(b) for m in module.modules() if isinstance(m, nn.modules.batchnorm._NormBase) for b in m.buffers(recurse=False)}
        self._live = list(module.buffers())
        # A spectral norm's vectors, say, enter the next forward; BatchNorm's statistics only the next evaluation.
        self.stepwise = [buffer for buffer in self._live if id(buffer) not in batch_norms and buffer.is_floating_point()]
        self._start: list[Tensor] = []
        self._kept: list[Tensor] = []

    def begin(self) -> None:
        """Remember the buffers as they are."""
        self._start = self._kept = [buffer.clone() for buffer in self._live]

    def keep(self) -> None:
        """These are the run's after this step."""
        self._kept = [buffer.clone() for buffer in self._live]

    def restore(self) -> None:
        """Back to the step's start."""
        self._copy(self._start)

    def commit(self, is_finite: Tensor) -> None:
        """Take the kept ones, where the gradient was finite (no wait for the device)."""
        self._copy([torch.where(is_finite, kept, start) for kept, start in zip(self._kept, self._start, strict=True)])

    def _copy(self, source: list[Tensor]) -> None:
        if source:
            torch._foreach_copy_(self._live, source)
