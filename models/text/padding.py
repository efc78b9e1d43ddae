"""Texts of different lengths in one batch, padded or several in a row, each read as if it were alone.

Legend: B samples, C outputs, R rows, T tokens of a row, P tokens that are compared, V vocabulary.
"""

import copy
from collections.abc import Iterable, Sequence
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from data.texts.text_set import TextSample, packed, padded
from data.texts.tokenizer import is_special, without_ends

TRIED = (4, 24)  # tokens of two texts that are read side by side
TOLERANCE = 1e-9  # of logits in float64: rounding gave 4e-16, one token outside a window of attention 9e-6
COMPARED = 16  # tokens of each packed text
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


def with_mask(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """An encoder's arguments: packed texts' `owners` [R, T] become attention_mask [R, 1, T, T], True within a text."""
    if "owners" not in inputs:
        return inputs
    owners = inputs["owners"]
    others = {name: tensor for name, tensor in inputs.items() if name != "owners"}
    return others | {"attention_mask": owners[:, None, :, None] == owners[:, None, None, :]}


def find_first_position(model: nn.Module, ids: np.ndarray, pad_id: int) -> int | None:
    """The first of the position_ids with which `model` reads packed texts as each alone; None if it does not.

    Tried on two full rows, of one text and of two: most encoders count from 0, RoBERTa's from the one after its padding
    token; some take no position_ids, or no mask between tokens, or look at near tokens only.
    model: with SparsePrediction's hooks. ids: [T] int64, T ordinary tokens, as many as a text may have.
    """
    parts = (ids, *np.split(ids, [len(ids) * 3 // 4]))
    texts = [TextSample(part, np.zeros(0, np.uint8), 0) for part in parts]
    places = [torch.linspace(0, len(part) - 1, COMPARED).long() for part in parts]
    model = copy.deepcopy(model).double().eval()  # reading changes some: BigBird, for example

    def read(inputs: dict[str, Tensor], starts: Iterable[int]) -> Tensor:  # [P, V]
        positions = torch.cat([start + place for start, place in zip(starts, places, strict=True)])
        return model(**with_mask(inputs), positions=positions).logits

    for first in (0, pad_id + 1):
        with torch.random.fork_rng(devices=[]), torch.no_grad(), suppress(Exception):  # whatever a model raises
            alone = read(padded(texts, pad_id, len(ids), 1), range(0, len(texts) * len(ids), len(ids)))
            found = read(*packed(texts, pad_id, len(ids), 1, first))
            if (found - alone).norm() <= TOLERANCE * alone.norm():
                return first
    return None
