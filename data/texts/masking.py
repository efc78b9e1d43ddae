"""Masked tokens: which tokens of a sample are predicted, and what replaces them.

Of the chosen tokens 80 % become [MASK], 10 % a random token, 10 % stay. How many are chosen depends on the sample's
length alone, so that the normalizer of any batch is known without reading it.
Source: BERT (Devlin et al., 2019).
Legend: N samples, P predicted tokens of a sample.
"""

from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from data.texts.text_set import TextSample, TextSet, TokenTable
from data.texts.tokenizer import is_special
from utils.numerics.seed import derive_seed, seeded

MASK_PROBABILITY = 0.15  # that a token is predicted; of BERT


def num_predicted(num_ordinary: np.ndarray, probability: float) -> np.ndarray:
    """[N] int64: predicted tokens of samples, max(1, round(probability x num_ordinary)).

    num_ordinary: [N], their non-special tokens.
    """
    return np.maximum(1, np.rint(probability * num_ordinary)).astype(np.int64)


class MaskedSample(NamedTuple):
    """A sample with some of its tokens replaced."""

    text: TextSample
    positions: np.ndarray  # [P] int64: places of the predicted tokens in the sample, ascending
    targets: np.ndarray  # [P] int64: the tokens that were there


class MaskedTextSet(TextSet):
    """A SampleSet; masks are a pure function of (seed, epoch, index)."""

    def __init__(self, table: TokenTable, tokenizer: PreTrainedTokenizerBase, probability: float, seed: int):
        super().__init__(table)
        self._probability, self._seed, self._mask_id = probability, seed, tokenizer.mask_token_id
        self._is_special = is_special(tokenizer)
        self._ordinary = np.flatnonzero(~self._is_special)

    def __getitem__(self, item: tuple[int, int]) -> MaskedSample:
        # draw
        epoch, index = map(int, item)
        text = self.table.sample(index)
        count = int(num_predicted(self.table.num_ordinary[index], self._probability))
        with seeded(derive_seed(self._seed, "masking", epoch, index)):
            maskable = np.flatnonzero(~self._is_special[text.ids] | (text.weight == 0))
            positions = np.sort(maskable[torch.randperm(len(maskable))[:count].numpy()])          # [P]
            draw = torch.rand(count).numpy()                                                      # [P]
            others = self._ordinary[torch.randint(len(self._ordinary), (count,)).numpy()]         # [P]

        # replace
        ids = text.ids.copy()
        ids[positions] = np.where(draw < 0.8, self._mask_id, np.where(draw < 0.9, others, ids[positions]))
        return MaskedSample(text._replace(ids=ids), positions, text.ids[positions])
