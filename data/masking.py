"""Masked tokens: which tokens of a sample are predicted, and what stands in their place.

Source: BERT (Devlin et al., 2019): of the chosen tokens 80 % become [MASK], 10 % a random token, 10 % stay. The number of
tokens that are chosen depends on the sample's length alone, so that the weight of any batch is known without looking at it.
"""

from typing import Any, NamedTuple

import numpy as np
import torch

from data.text import TextSample, TextSet, TokenTable
from data.tokenizer import is_special
from utils.numerics.seed import derive_seed, seeded


def num_predicted(num_ordinary: np.ndarray, probability: float) -> np.ndarray:
    """[n] int64: predicted tokens of samples, max(1, round(probability x num_ordinary)).

    num_ordinary: [n], their non-special tokens.
    """
    return np.maximum(1, np.rint(probability * num_ordinary)).astype(np.int64)


class MaskedSample(NamedTuple):
    """A sample with some of its tokens replaced."""

    text: TextSample
    positions: np.ndarray  # [p] int64: the predicted tokens' places in it, ascending
    targets: np.ndarray  # [p] int64: what stood there


class MaskedTextSet(TextSet):
    """Items are asked for as (epoch, i); masks are a pure function of (seed, epoch, i)."""

    def __init__(self, table: TokenTable, tokenizer: Any, probability: float, seed: int):
        super().__init__(table)
        self._probability, self._seed, self._mask_id = probability, seed, tokenizer.mask_token_id
        self._is_special = is_special(tokenizer)
        self._ordinary = np.flatnonzero(~self._is_special)

    def __getitem__(self, item: tuple[int, int]) -> MaskedSample:
        epoch, i = map(int, item)
        text = self.table.sample(i)
        count = int(num_predicted(self.table.num_ordinary[i], self._probability))
        with seeded(derive_seed(self._seed, "masking", epoch, i)):
            maskable = np.flatnonzero(~self._is_special[text.ids])
            positions = np.sort(maskable[torch.randperm(len(maskable))[:count].numpy()])
            draw = torch.rand(count).numpy()
            others = self._ordinary[torch.randint(len(self._ordinary), (count,)).numpy()]
        ids = text.ids.copy()
        ids[positions] = np.where(draw < 0.8, self._mask_id, np.where(draw < 0.9, others, ids[positions]))
        return MaskedSample(text._replace(ids=ids), positions, text.ids[positions])
