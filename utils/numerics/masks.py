"""Dropout masks on the CPU: on an AMD EPYC torch's own take a sixth to a fourth of the time of a BERT's step.

torch draws one value at a time there, and on Intel's CPUs by MKL, with other results. These are the same on any CPU.
"""

import warnings

import torch
from torch import Tensor

BITS = 16  # for a value
_library = torch.library.Library("aten", "IMPL")  # while it lives, the kernel is ours


def draw_16_bits() -> None:
    """Make torch draw random bits of tensors on the CPU by `bernoulli_`, until the process ends."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
        _library.impl("bernoulli_.float", bernoulli_, "CPU", allow_override=True)


def bernoulli_(tensor: Tensor, p: float = 0.5, *, generator: torch.Generator | None = None) -> Tensor:
    """Fill `tensor` with ones and zeros, ones with probability p, rounded to 16 binary digits: 0.9 becomes 0.899994.

    Each random number of 64 bits gives four values. They do not depend on the number of threads.
    Raises RuntimeError, as torch's own, if p is not between 0 and 1.
    """
    if not 0 <= p <= 1:
        raise RuntimeError(f"bernoulli_ expects p to be in [0, 1], but got p={p}")
    level = round(p * 2**BITS)
    if not 0 < level < 2**BITS:
        return tensor.fill_(level > 0)
    numbers = torch.empty(-(-tensor.numel() * BITS // 64), dtype=torch.int64, device=tensor.device)
    numbers.random_(-2**63, None, generator=generator)
    values = numbers.view(torch.int16)[:tensor.numel()].view(tensor.shape)
    return tensor.copy_(values < level - 2 ** (BITS - 1))
