"""Several texts in one row of an encoder's input, each read as if it were alone.

Legend: R rows, T tokens of a row, P tokens that are compared, V vocabulary.
"""

import copy
from collections.abc import Iterable
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor, nn

from data.texts.text_set import TextSample, packed, padded

TOLERANCE = 1e-9  # of logits in float64: rounding gave 4e-16, one token outside a window of attention 9e-6
COMPARED = 16  # tokens of each text


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
