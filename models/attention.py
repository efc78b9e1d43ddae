"""The attention of transformers' encoders: the host never waits for the device, and on the CPU dropout is cheap.

Legend: B samples, T tokens, H size of a head.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from utils.hardware.vendor import has_attention_with_dropout


def adapt_attention() -> None:
    """Put what follows in the place of transformers' own, for every model of this process."""
    AttentionInterface.register("sdpa", _attend)
    for name, make_mask in {"sdpa": sdpa_mask, "eager": eager_mask}.items():
        AttentionMaskInterface.register(name, _without_question(make_mask))


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, **options: Any
) -> tuple[Tensor, None]:
    """transformers' attention by torch's kernels, but by plain operations where torch has no kernel with dropout.

    There torch would compute the same in float32, whatever the precision; this takes two thirds of the time, and is
    what transformers calls "eager". query, key, value: [B, heads, T, H]. attention_mask: bool, as [B, 1, T, T].
    Returns [B, T, heads, H].
    """
    is_causal = options.get("is_causal")
    is_plain = not (getattr(module, "is_causal", True) if is_causal is None else is_causal) and (
        query.shape == key.shape and (attention_mask is None or attention_mask.dtype == torch.bool)
        and all(options.get(name) is None for name in ("position_bias", "softcap", "cache")))
    if not dropout or not is_plain or has_attention_with_dropout(query.device.type):
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **options)
    scores = query.mul(scaling or query.shape[-1] ** -0.5) @ key.transpose(2, 3)  # [B, heads, T, T]
    if attention_mask is not None:
        lowest = torch.finfo(scores.dtype).min
        scores = scores + torch.zeros_like(attention_mask, dtype=scores.dtype).masked_fill_(~attention_mask, lowest)
    return (F.dropout(scores.softmax(-1), dropout) @ value).transpose(1, 2).contiguous(), None


def _without_question(make_mask: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    """`make_mask` of transformers without its question whether anything is padded: the host would wait for it.

    A batch without padding has no mask (data.text.padded), so a mask that is there is needed.
    """
    return lambda attention_mask=None, allow_is_bidirectional_skip=False, **options: make_mask(
        attention_mask=attention_mask,
        allow_is_bidirectional_skip=allow_is_bidirectional_skip and attention_mask is None, **options)
