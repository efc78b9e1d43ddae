"""Precision: autocast, the fp16 loss scale, and an optimizer step that leaves everything as it was if the gradient is not finite."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from utils.hardware.devices import Arriving

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def hardware_precision(device: torch.device) -> str:
    """What `--precision auto` means here: bf16 where the hardware computes in it, else fp32."""
    if device.type != "cpu":
        ask = getattr(torch.get_device_module(device), "is_bf16_supported", None)
        return "bf16" if ask and ask(including_emulation=False) else "fp32"
    has_bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()  # no public question exists (torch 2.15)
    return "bf16" if has_bf16 else "fp32"


class Precision:
    """How numbers are computed: "fp32", "bf16" or "fp16" on `device`."""

    def __init__(self, name: str, device: torch.device):
        self.name, self._dtype, self._device = name, DTYPES.get(name), device
        self.scaler = torch.amp.GradScaler(device.type, enabled=name == "fp16")
        self._one = torch.ones((), device=device)
        self._last: tuple[Any, Arriving] | None = None  # a position, whether its step's gradient was finite: not yet looked at
        self._scale_before: tuple[Tensor, Tensor] | None = None  # fp16: the loss scale and its growth, before the last step

    def autocast(self) -> AbstractContextManager:
        """The context of a forward."""
        return torch.autocast(self._device.type, self._dtype) if self._dtype else nullcontext()

    @property
    def scale(self) -> Tensor:
        """The factor on losses and gradients until unscale_: a power of two, scalar float32; 1 without fp16."""
        return self.scaler.scale(self._one)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the summed gradients by the scale, in place; before clipping."""
        self.scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, position: Any, grad_norm: Tensor) -> Tensor:
        """Apply the update of the step at `position`, unless the gradient is not finite. Returns whether it was: scalar bool on the device.

        The summed gradient is the same on all ranks, so no collective is needed. The host reads the answer of one step before
        it issues the next (pop_nonfinite), so that the device never waits.
        """
        is_finite = torch.isfinite(grad_norm)
        if self.scaler.is_enabled():
            self._scale_before = self.scaler._scale.clone(), self.scaler._growth_tracker.clone()  # state_dict() would wait
            self.scaler.step(optimizer)
            self.scaler.update()
        else:
            # The fused optimizers' own protocol (GradScaler's too): found_inf = 1 leaves weights and state as they were.
            optimizer.grad_scale, optimizer.found_inf = None, (~is_finite).float()
            optimizer.step()
        self._last = (position, Arriving(is_finite))
        return is_finite

    def void_step(self, optimizer: torch.optim.Optimizer) -> None:
        """A step that changes nothing, for memory: the optimizer allocates what it keeps for the parameters that have gradients."""
        optimizer.grad_scale, optimizer.found_inf = None, torch.ones((), device=self._device)
        optimizer.step()
        del optimizer.grad_scale, optimizer.found_inf

    def undo(self) -> Any:
        """The position of the last step, whose gradient was not finite: with it, the loss scale too is as it was before."""
        (position, _), self._last = self._last, None
        if self.scaler.is_enabled():
            self.scaler._scale, self.scaler._growth_tracker = self._scale_before
        return position

    def pop_nonfinite(self) -> Any | None:
        """The position of the last step if its gradient was not finite, once; before the next step and before any save.

        With fp16 that is how the scale finds its level, and tells nothing until the scale has fallen below 1.
        """
        (position, answer), self._last = self._last or (None, None), None
        is_finite = answer is None or bool(answer.wait()[0])
        return None if is_finite or (self.scaler.is_enabled() and self.scaler.get_scale() >= 1) else position
