"""Several texts in one row of an encoder's input, each read as if it were alone.

Legend: R rows, T tokens of a row, V vocabulary.
"""

from contextlib import suppress

import numpy as np
import torch
from torch import Tensor, nn

from data.text import TextSample, packed, padded

TOLERANCE = 1e-5  # of logits in float32; with a wrong position or mask, 3e-4 and more was seen


def with_mask(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """An encoder's arguments: packed texts' `owners` [R, T] become attention_mask [R, 1, T, T], True within a text."""
    if "owners" not in inputs:
        return inputs
    owners = inputs["owners"][:, None]                                                 # [R, 1, T]
    others = {name: tensor for name, tensor in inputs.items() if name != "owners"}
    return others | {"attention_mask": owners[..., None] == owners[..., None, :]}


def find_first_position(model: nn.Module, ids: np.ndarray, pad_id: int) -> int | None:
    """The first of the position_ids with which `model` reads packed texts as each alone; None if it does not.

    Tried on two texts in a row: most encoders count from 0, RoBERTa's from the one after its padding token; some take
    no position_ids, or no mask between tokens. ids: [T] int64, as many ordinary tokens as a row has.
    """
    texts = [TextSample(part, np.zeros(0, np.uint8), 0) for part in np.split(ids, [len(ids) * 3 // 4])]
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            alone = torch.cat([model(**padded([text], pad_id, len(ids), 1)).logits[0] for text in texts])  # [T, V]
            for first in (0, pad_id + 1):
                inputs, _ = packed(texts, pad_id, len(ids), len(ids), first)
                with suppress(Exception):  # whatever a model raises that cannot read them
                    found = model(**with_mask(inputs)).logits[0]                       # [T, V]
                    if (found - alone).norm() <= TOLERANCE * alone.norm():
                        return first
    finally:
        model.train(was_training)
    return None
