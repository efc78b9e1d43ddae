"""What only one vendor's devices have (CUDA; torch uses that name for AMD's GPUs too). torch.accelerator does the rest.

Nothing here has an effect on another device, except allow_16_bit_attention.
"""

import os
import re
import socket
from collections.abc import Sequence

import torch

from utils.errors import UserError

# Beginnings of the environment variables that configure devices; RUN/env.txt lists them.
ENVIRONMENT = "CUDA|NCCL|HIP|HSA|ROCR|ZE_|ONEAPI|CCL|PYTORCH"
TILE = 8  # numbers, in 16 bits: what matrices should be a multiple of. Source: NVIDIA, Train With Mixed Precision


def require_code(device_type: str, count: int) -> None:
    """Raise UserError (64) if torch has no code for one of the first `count` GPUs. AMD's GPUs are not checked."""
    if device_type == "cuda" and not torch.version.hip:
        for index in range(count):
            capability = torch.cuda.get_device_capability(index)
            require_architecture(torch.cuda.get_device_name(index), capability, torch.cuda.get_arch_list())


def require_architecture(name: str, capability: tuple[int, int], built_for: Sequence[str]) -> None:
    """Raise UserError (64) if torch has no code for a GPU of this compute capability.

    built_for: torch.cuda.get_arch_list(). A binary (sm_86) runs on the same major version with the same or a later
    minor one, PTX (compute_90) on any later version.
    Source: CUDA C++ Programming Guide, "Compute capability compatibility".
    """
    found = re.findall(r"(sm|compute)_(\d+)(\d)", " ".join(built_for))
    binaries, ptx = ([(int(major), int(minor)) for kind, major, minor in found if kind == wanted]
                     for wanted in ("sm", "compute"))
    runs = any(major == capability[0] and minor <= capability[1] for major, minor in binaries)
    if not runs and not any(each <= capability for each in ptx):
        raise UserError(
            f"{socket.gethostname()}: {name} is sm_{capability[0]}{capability[1]}, but this torch has code only for"
            f" {', '.join(built_for) or 'the CPU'}; install a torch that supports this GPU (https://pytorch.org), or"
            " use --device cpu")


def set_determinism(is_deterministic: bool) -> None:
    """Set cuDNN's choice of algorithms by timing (off if deterministic), and what cuBLAS needs to repeat its bits."""
    torch.backends.cudnn.benchmark = not is_deterministic
    if is_deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def set_tf32(is_allowed: bool) -> None:
    """Set whether float32 products and convolutions are computed in TF32 (three decimal digits); not on the CPU.

    Uses torch's older switches, which also set the newer ones (fp32_precision). The newer ones do not set the older
    ones, and reading the older ones then raises; torch.compile reads them (torch 2.11 and 2.15).
    """
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = is_allowed


def width_multiple(device_type: str) -> int:
    """Of how many tokens the width of a batch of texts should be a multiple."""
    return TILE if device_type == "cuda" else 1


def allow_16_bit_attention(is_allowed: bool) -> None:
    """Set whether attention composed of plain operations stays in bf16 or fp16; without this it is in float32.

    On the CPU attention with dropout is composed: torch 2.15 has no kernel for it. torch keeps this switch under CUDA's
    name; it holds for every device.
    """
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(is_allowed)
