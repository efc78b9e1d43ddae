"""Two operations on the CPU in place of torch's own: random masks, which dropout takes, and attention's softmax."""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

BITS = 16  # of randomness for a value of a mask
_library = torch.library.Library("aten", "IMPL")  # while it lives, the kernels are ours


def replace_kernels() -> None:
    """Make torch use the two below on the CPU, until the process ends."""
    _replace("bernoulli_.float", bernoulli_)
    _replace("_safe_softmax", safe_softmax)


def _replace(operator: str, kernel: Callable[..., Tensor]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
        _library.impl(operator, kernel, "CPU", allow_override=True)


def bernoulli_(tensor: Tensor, p: float = 0.5, *, generator: torch.Generator | None = None) -> Tensor:
    """Fill `tensor` with ones and zeros, ones with probability p, rounded to 16 binary digits: 0.9 becomes 0.899994.

    torch draws one value at a time, or on Intel's CPUs by MKL, with other results. Here each random number of 64 bits
    gives four values, the same on any CPU and any number of threads.
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
    return torch.lt(values, level - 2 ** (BITS - 1), out=tensor)


def safe_softmax(scores: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Softmax, and zeros where all scores along `dim` are -inf: torch's bits, for tensors of one dimension or more.

    torch looks for such rows in all scores. Softmax gives NaN for all of such a row, so that the first result of each
    row shows whether there may be one.
    """
    probabilities = scores.softmax(dim, dtype)
    if not probabilities.narrow(dim, 0, min(1, probabilities.shape[dim])).isnan().any():
        return probabilities
    return probabilities.masked_fill((scores == -torch.inf).all(dim, keepdim=True), 0.0)
