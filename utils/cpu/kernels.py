"""Operations on the CPU in place of torch's own: dropout's masks, attention's softmax, the gradients of filters."""

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

BITS = 16  # of randomness for a value of a mask
_libraries: list[torch.library.Library] = []  # while one lives, the kernels are ours


def replace_kernels(are_ours: bool) -> None:
    """Make torch use those below on the CPU from here on; or, if not are_ours, its own again.

    The third only on a CPU that computes in bf16 by AVX-512: on no other is it measured; by AMX oneDNN's are others.
    """
    _libraries.clear()
    if not are_ours:
        return
    _libraries.append(torch.library.Library("aten", "IMPL"))
    _replace("bernoulli_.float", bernoulli_)
    _replace("_safe_softmax", safe_softmax)
    if torch.cpu._is_avx512_bf16_supported() and not torch.cpu._is_amx_tile_supported():
        _replace("convolution_backward", convolution_backward, with_keyset=True)


def _replace(operator: str, kernel: Callable[..., object], with_keyset: bool = False) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
        _libraries[0].impl(operator, kernel, "CPU", allow_override=True, with_keyset=with_keyset)


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


_torchs_convolution_backward = torch.library.get_kernel("aten::convolution_backward", "CPU")


def convolution_backward(
    keys: torch.DispatchKeySet, grad: Tensor, images: Tensor, filters: Tensor, bias_sizes: Sequence[int] | None,
    stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], is_transposed: bool,
    output_padding: Sequence[int], groups: int, wanted: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of a convolution's images, filters and bias, those that are wanted: torch's but for rounding.

    oneDNN's kernel for the gradient of large filters in bf16 takes milliseconds even on images of one pixel. Where
    there are no more output positions than values in a filter, it is a product of matrices here, which takes at most
    2 bytes times this number, squared (512 x 3 x 3: 42 MB). Figures: benchmarks/README.md.
    Legend: B images of H x W, I, O channels of images and of grad, h, w height and width of grad, k, l of a filter.
    """
    given = grad, images, filters, bias_sizes, stride, padding, dilation, is_transposed, output_padding, groups
    is_plain = len(stride) == len(padding) == 2 and groups == max(dilation) == 1 and not is_transposed
    # A gradient must have its filters' order in memory, and a product gives channels_last. Under fsdp it is another.
    is_in_order = filters.dtype == torch.bfloat16 and filters.is_contiguous(memory_format=torch.channels_last)
    if not (wanted[1] and is_plain and is_in_order and grad[:, 0].numel() <= filters[0].numel()):
        return _torchs_convolution_backward.call_boxed(keys, *given, wanted)

    # images and bias
    of_bias = grad.sum((0, 2, 3)) if wanted[2] else None                                # [O]
    of_images = None
    if wanted[0]:
        of_images, _, _ = _torchs_convolution_backward.call_boxed(keys, *given, (True, False, False))

    # filters
    size = filters.shape[2:]
    padded = F.pad(images.permute(0, 2, 3, 1), (0, 0, padding[1], padding[1], padding[0], padding[0]))  # [B, H, W, I]
    boxes = padded.unfold(1, size[0], stride[0]).unfold(2, size[1], stride[1])          # [B, h, w, I, k, l]
    rows = boxes.permute(0, 1, 2, 4, 5, 3).flatten(3).flatten(0, 2)                     # [B * h * w, k * l * I]
    product = grad.permute(1, 0, 2, 3).flatten(1) @ rows                                # [O, k * l * I]
    return of_images, product.view(len(filters), *size, -1).permute(0, 3, 1, 2), of_bias
