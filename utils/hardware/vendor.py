"""What one vendor's devices alone have (CUDA; torch calls AMD's GPUs by that name, too). All else is torch.accelerator's business.

Nothing here does anything to another device.
"""

import os
import re
import socket
from collections.abc import Sequence

import torch

from utils.errors import UserError

ENVIRONMENT = "CUDA|NCCL|HIP|HSA|ROCR|ZE_|ONEAPI|CCL|PYTORCH"  # how variables begin that decide about devices; kept in RUN/env.txt
FLIGHT_RECORD = "2000"  # collectives that NCCL's flight recorder keeps; 0, which is torch's default, keeps none


def require_code(device_type: str, count: int) -> None:
    """Raise UserError (64) if torch has no code for one of the first `count` GPUs. (AMD's name their architectures in another way.)"""
    if device_type == "cuda" and not torch.version.hip:
        for index in range(count):
            require_architecture(torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index), torch.cuda.get_arch_list())


def require_architecture(name: str, capability: tuple[int, int], built_for: Sequence[str]) -> None:
    """Raise UserError (64) if torch has no code for a GPU of this compute capability.

    built_for: torch.cuda.get_arch_list(). Binaries (sm_86) run on later minor versions of their major one, PTX (compute_90)
    on all later ones (CUDA C++ Programming Guide, "Compute capability compatibility").
    """
    found = re.findall(r"(sm|compute)_(\d+)(\d)", " ".join(built_for))
    binaries, texts = ([(int(major), int(minor)) for kind, major, minor in found if kind == wanted]
                       for wanted in ("sm", "compute"))
    runs = any(major == capability[0] and minor <= capability[1] for major, minor in binaries)
    if not runs and not any(each <= capability for each in texts):
        raise UserError(f"{socket.gethostname()}: {name} is sm_{capability[0]}{capability[1]}, and this torch has code for"
                        f" {', '.join(built_for) or 'no GPU'} only: install one that fits (https://pytorch.org), or use"
                        " --device cpu")


def record_collectives(device_type: str) -> None:
    """Have NCCL keep what its last collectives were (World.write_flight_record); before the process group is made."""
    if device_type == "cuda" and "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ:  # its former name, which torch still reads
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", FLIGHT_RECORD)


def set_determinism(is_deterministic: bool) -> None:
    """Whether cuDNN may choose its algorithms by timing them, and what cuBLAS needs to give the same bits again."""
    torch.backends.cudnn.benchmark = not is_deterministic
    if is_deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def set_tf32(is_allowed: bool) -> None:
    """Whether float32 products and convolutions are computed in TF32, which has three decimals. The CPU never does.

    By torch's older switches, here alone: they set the newer ones (fp32_precision) as well. The newer ones leave the
    older as they were, and then reading these raises, which torch.compile does (torch 2.11 and 2.15).
    """
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = is_allowed
