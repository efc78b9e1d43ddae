"""What strategies share; those that keep all parameters and all optimizer state on every rank need little else.

Tests: tests/unit/utils/strategies/test_buffers.py
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from utils.strategies.base import AnyMicroBatch, MicroBatches, Strategy
from utils.strategies.buffers import Buffers
from utils.strategies.checksum import checksum


class Replicated(Strategy):
    """All of a Strategy except setup and the sum over ranks, which a subclass adds in grad_sync and finish."""

    least_forwards = 0  # of a rank in a step: it goes forward with stand-ins where it has fewer micro-batches
    is_watched = False  # what is computed now is a rank's first micro-batch in an audited step: see add_entered

    @cached_property
    def _buffers(self) -> Buffers:
        return Buffers(self.module)

    @property
    def trainable(self) -> list[nn.Parameter]:
        """The parameters that learn, in the order of the module's."""
        return [param for param in self.module.parameters() if param.requires_grad]

    def grad_sync(self, is_last: bool, scale: Tensor) -> AbstractContextManager:
        """The context of one micro-batch's forward and backward; the sum over ranks may start in a rank's last one."""
        return nullcontext()

    def finish(self, scale: Tensor) -> None:
        """Wait for the sums, after a rank's last backward, if it has one. Collective."""

    def require_all_grads(self) -> None:
        """Nothing to do if every rank uses every parameter in each step."""

    def with_stand_in(self, micro_batches: MicroBatches[AnyMicroBatch]) -> Iterator[AnyMicroBatch]:
        """The micro-batches, then a stand-in where this rank has fewer than least_forwards: of its last one.

        Shares differ by one at most; the warm-up has given every rank one.
        """
        for micro_batch in micro_batches:
            self._last = micro_batch
            yield micro_batch
        if len(micro_batches) < self.least_forwards:
            yield self._last.stand_in()

    def accumulate(self, micro_batches: MicroBatches[AnyMicroBatch],
                   scale: Tensor) -> Iterator[tuple[nn.Module, AnyMicroBatch]]:
        """Yield each micro-batch in its grad_sync context, from the buffers of the step's start. Collective."""
        self._buffers.begin()
        self.entered = torch.zeros((), dtype=torch.int64, device=self.world.device)
        self.is_own_finite = torch.ones_like(self.is_corrupted)
        for number, micro_batch in enumerate(self.with_stand_in(micro_batches), 1):
            self.is_watched = self.is_audited and number == 1
            with self.grad_sync(number >= len(micro_batches), scale):
                yield self.model, micro_batch.to(self.world.device)
            if micro_batch.index == 0 and len(micro_batches):
                self._buffers.keep()
            self._buffers.restore()
        self.is_watched = False
        self.finish(scale)

    def add_entered(self, tensors: Iterable[tuple[int, Tensor | None]]) -> None:
        """While `is_watched`, add the checksum of numbered tensors to `entered`: they go into the sums."""
        if self.is_watched:
            self.entered = self.entered + checksum(tensors)

    def again(self, loss: Tensor, scale: Tensor) -> Tensor:
        """Without communication, and no hook sees the gradient."""
        params = self.trainable
        grads = torch.autograd.grad(loss * scale, params, allow_unused=True)
        self._buffers.restore()
        return self.entered_by(dict(zip(params, grads, strict=True)), scale)

    def entered_by(self, grads: dict[nn.Parameter, Tensor | None], scale: Tensor) -> Tensor:
        """What `entered` would be after these gradients of a micro-batch; the sums are over for this step."""
        return checksum(enumerate(grads.values()))

    def weights_checksum(self) -> Tensor:
        """Without BatchNorm's running statistics, which only rank 0 keeps in a step."""
        return checksum(enumerate([*self.module.parameters(), *self._buffers.alike]))

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Without communication where every rank has the whole gradient."""
        params = [param for param in self.module.parameters() if param.grad is not None]
        norm = self.whole(torch.nn.utils.get_total_norm([param.grad for param in params]))
        if max_norm:
            torch.nn.utils.clip_grads_with_norm_(params, max_norm, norm)
        return norm.to(self.world.device)

    def whole(self, tensor: Tensor) -> Tensor:
        """A tensor of which each rank may have a part. All ranks or none."""
        return tensor

    def commit_buffers(self, is_finite: Tensor) -> None:
        """Send the buffers that the next forward reads; the others are sent before an evaluation. Collective."""
        self._buffers.commit(is_finite)
        for buffer in self._buffers.stepwise:
            self.world.broadcast(buffer)

    def broadcast_buffers(self) -> None:
        """One broadcast per buffer. Collective."""
        for buffer in self.module.buffers():
            self.world.broadcast(buffer)

    def model_state(self) -> dict[str, Tensor]:
        """The module's own tensors, not copies."""
        return self.own_state()

    def own_state(self) -> dict[str, Tensor]:
        """What this rank has of the model's state: the module's own tensors."""
        names: dict[int, str] = {}
        state = self.module.state_dict(keep_vars=True)
        return {name: tensor.detach() for name, tensor in state.items() if names.setdefault(id(tensor), name) == name}

    def load_model_state(self, state: dict[str, Tensor]) -> None:
        """Copy into the module's tensors, one by one."""
        own = self.own_state()
        wrong = sorted(set(own) ^ set(state)) or [name for name in own if own[name].shape != state[name].shape]
        if wrong:
            raise KeyError(f"{len(wrong)} tensors differ, for example {wrong[0]}")
        for name, tensor in state.items():
            own[name].copy_(self.placed(tensor, own[name]))

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
        """The optimizer's own tensors, not copies."""
        names = _names_by_index(optimizer)
        return {names[index]: state for index, state in optimizer.state_dict()["state"].items()}

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state: dict[str, dict[str, Any]]) -> None:
        """By name: the order of parameters may differ."""
        indices = {name: index for index, name in _names_by_index(optimizer).items()}
        params, full = dict(self.module.named_parameters()), optimizer.state_dict()
        full["state"] |= {  # parameters that begin to learn keep the initial one
            indices[name]: {key: self.placed(value, params[name]) if isinstance(value, Tensor) else value
                            for key, value in values.items()}
            for name, values in state.items()}
        optimizer.load_state_dict(full)

    def placed(self, tensor: Tensor, like: Tensor) -> Tensor:
        """`tensor` with the strides of `like`, if it has its shape: fused optimizers read memory in order."""
        if tensor.shape != like.shape or tensor.stride() == like.stride():
            return tensor
        return torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)


def _names_by_index(optimizer: torch.optim.Optimizer) -> dict[int, str]:
    groups = optimizer.state_dict()["param_groups"]
    return {index: name for group in groups for index, name in zip(group["params"], group["param_names"], strict=True)}
