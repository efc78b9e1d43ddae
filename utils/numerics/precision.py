"""Precision: autocast, the fp16 loss scale, and an optimizer step that a non-finite gradient turns into no step at all.

A single NaN that reaches the weights ruins the run, and asking the device before each step would make it wait. So the
optimizer itself skips the update on the device, and the host reads the answer one step later.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from utils.numerics.optimizers import require_skippable

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def hardware_precision(device: torch.device) -> str:
    """What `--precision auto` means on this host: bf16 if the hardware computes in it, else fp32."""
    if device.type != "cpu":
        ask = getattr(torch.get_device_module(device), "is_bf16_supported", None)
        return "bf16" if ask and ask(including_emulation=False) else "fp32"
    has_bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()  # torch 2.15: none is public
    return "bf16" if has_bf16 else "fp32"


class Precision:
    """How numbers are computed: "fp32", "bf16" or "fp16" on `device`."""

    def __init__(self, name: str, device: torch.device):
        self.name, self._dtype, self._device = name, DTYPES.get(name), device
        self.scaler = torch.amp.GradScaler(device.type, enabled=name == "fp16")
        self._one = torch.ones((), device=device)
        self._scale_before: tuple[Tensor, Tensor] | None = None  # fp16: loss scale and growth before the last step

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

    def step(self, optimizer: torch.optim.Optimizer, grad_norm: Tensor) -> Tensor:
        """Apply the update, unless the gradient is not finite.

        grad_norm: scalar, as clip_grad_norm_ returns it. All ranks decide alike, unless a device or a link is at fault:
        if one saw something wrong, all compare what they saw two steps later (engine/wrong.py).
        Returns is_finite: scalar bool on the device; to read it on the host now would wait.
        Raises TypeError if the optimizer cannot skip a step.
        """
        is_finite = torch.isfinite(grad_norm)
        if self.scaler.is_enabled():
            require_skippable(optimizer)  # for any other one GradScaler would wait for the device
            # GradScaler's state_dict() would wait for the device.
            self._scale_before = self.scaler._scale.clone(), self.scaler._growth_tracker.clone()
            self.scaler.step(optimizer)
            self.scaler.update()
        else:
            _step_unless(optimizer, (~is_finite).float())
        return is_finite

    def is_usual(self, is_finite: Tensor) -> Tensor:
        """Whether the last step is one of a run that goes well: scalar bool on the device. is_finite: of step().

        With fp16, steps that are not finite are how the scale finds its level: they count only once it is below 1.
        """
        # GradScaler's get_scale() would wait, too
        return is_finite | (self.scaler._scale >= 1) if self.scaler.is_enabled() else is_finite

    def void_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Take a step that changes nothing, so that the optimizer allocates its state for parameters with gradients."""
        _step_unless(optimizer, self._one)

    def undo(self) -> None:
        """Restore the loss scale from before the last step, whose gradient was not finite."""
        if self.scaler.is_enabled():
            self.scaler._scale, self.scaler._growth_tracker = self._scale_before


def _step_unless(optimizer: torch.optim.Optimizer, found_inf: Tensor) -> None:
    """Step, but leave parameters and state as they are if found_inf is 1. found_inf: scalar float32 on the device.

    Source: the protocol between torch.amp.GradScaler and the fused optimizers.
    """
    require_skippable(optimizer)
    optimizer.grad_scale, optimizer.found_inf = None, found_inf
    optimizer.step()
    del optimizer.grad_scale, optimizer.found_inf
