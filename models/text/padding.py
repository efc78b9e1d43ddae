"""Texts of different lengths in one batch, each read as if it were alone. (Several in one row: models/text/packing.py.)

Legend: B samples, C outputs.
"""

import copy
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from data.texts.text_set import TextSample, padded
from data.texts.tokenizer import is_special, without_ends

TRIED = (4, 24)  # tokens of two texts that are read side by side
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4}  # some models compute a part, or all, in float32


def encode_texts(
    tokenizer: PreTrainedTokenizerBase, max_length: int, side: str | None, texts: Sequence[Sequence[str]]
) -> dict[str, Tensor]:
    """What a model takes, see padded(). side: of the padding. texts: B tuples of a text, or of the two of a pair."""
    columns = without_ends(tokenizer, [list(column) for column in zip(*texts, strict=True)], max_length)
    encoded = tokenizer(*columns, truncation=True, max_length=max_length).encodings
    has_types = "token_type_ids" in tokenizer.model_input_names
    samples = [TextSample(np.array(one.ids), np.array(one.type_ids if has_types else [], np.uint8), 0)
               for one in encoded]
    return padded(samples, tokenizer.pad_token_id, max_length, 1, side)


@torch.inference_mode()
def outputs_for_texts(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, max_length: int, side: str | None,
    texts: Sequence[Sequence[str]]
) -> Tensor:
    """What the model gives of B texts, [B, C]: see encode_texts."""
    inputs, device = encode_texts(tokenizer, max_length, side, texts), next(model.parameters()).device
    return model(**{name: tensor.to(device) for name, tensor in inputs.items()}).logits


def find_padding_side(model: nn.Module, tokenizer: PreTrainedTokenizerBase, max_length: int) -> str | None:
    """The side of padding with which `model` gives a text what it gives it alone: "right" or "left".

    None for neither, "" if the model fails on the texts. Tried on a short text beside a longer one. Most encoders read
    the first token, and decoders look for the last one before the padding. XLNet reads the last position, whatever
    stands there. FNet has no mask.
    """
    model, tokenizer = copy.deepcopy(model).eval(), copy.deepcopy(tokenizer)  # reading changes some
    ordinary, max_length = np.flatnonzero(~is_special(tokenizer)), min(TRIED[1], max_length)
    texts = [(tokenizer.decode(ordinary[:count]),) for count in TRIED]
    for dtype, tolerance in TOLERANCES.items():
        found = ""
        for side in ("right", "left"):
            with torch.random.fork_rng(devices=[]), suppress(Exception):  # whatever a model raises
                alone, beside = (outputs_for_texts(model.to(dtype), tokenizer, max_length, side, part)[0]
                                 for part in (texts[:1], texts))
                found = None
                if (beside - alone).norm() <= tolerance * alone.norm():
                    return side
        if found is None:
            break
    return found
