"""The module torch.sim: what torch, and a program, look for under the name of a device type, as in torch.cuda."""

import contextlib
import os

import torch
from torch import Event, Stream  # noqa: F401
from torch.accelerator import current_stream, synchronize  # noqa: F401

from tests.harness.accelerator.device import PROCESS, require_own_process
from tests.harness.accelerator.operations import DEVICES, NAME

_lazy_init = require_own_process


def _index(device: torch.device | str | int | None) -> int:
    device = torch.device(NAME, device) if isinstance(device, int) else torch.device(device or NAME)
    return current_device() if device.index is None else device.index


def _is_in_bad_fork() -> bool:
    return os.getpid() != PROCESS


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def device_count() -> int:
    return len(DEVICES)


def current_device() -> int:
    return torch._C._accelerator_getDeviceIndex()


def set_device(device: torch.device | str | int) -> None:
    require_own_process()
    torch._C._accelerator_setDeviceIndex(_index(device))


def device(device: torch.device | str | int | None) -> contextlib.AbstractContextManager:
    return torch.accelerator.device_index(_index(device))


def stream(stream: Stream) -> contextlib.AbstractContextManager:
    return contextlib.nullcontext(stream)  # a device has one


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def manual_seed(seed: int) -> None:
    set_rng_state(torch.Generator().manual_seed(seed).get_state())


def manual_seed_all(seed: int) -> None:
    for index in range(len(DEVICES)):
        set_rng_state(torch.Generator().manual_seed(seed).get_state(), index)


def get_rng_state(device: torch.device | str | int | None = None) -> torch.Tensor:
    return DEVICES[_index(device)].random_state.clone()


def set_rng_state(new_state: torch.Tensor, device: torch.device | str | int | None = None) -> None:
    DEVICES[_index(device)].random_state = new_state.clone()
