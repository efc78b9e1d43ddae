"""Texts as a data set: token ids that were made once (data/text_index.py) and are mapped into memory.

    TextSet(found.splits["train"])[epoch, index]             # TextSample(ids, types, label)

Legend: N samples of a split, B samples in a batch, T tokens in the longest of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from data.labels import label_at


class TextSample(NamedTuple):
    """One sample as the model's input, before padding."""

    ids: np.ndarray  # [length] int64
    types: np.ndarray  # [length] uint8, or empty
    label: int | np.ndarray  # a class, or a row of labels or numbers


@dataclass(frozen=True, eq=False)
class TokenTable:
    """The samples of a split. Arrays on disk, mapped into memory: processes share them and load what they read."""

    per_sample: ClassVar = ("spans", "labels", "num_ordinary", "texts", "lengths")

    ids: np.ndarray  # uint16 or uint32: the tokens of all samples, one after the other
    types: np.ndarray  # uint8, like ids: token types; empty where the tokenizer has none
    spans: np.ndarray  # [N, 2] int64: begin and end of each sample in ids
    labels: np.ndarray  # [N] int32 classes, 0 where there are no labels; or rows, see data.labels.LabelReader
    num_ordinary: np.ndarray  # [N] int32: non-special tokens
    texts: np.ndarray  # [N] int32: index of the text that a sample is, or is cut from
    lengths: np.ndarray  # [N] int32: tokens

    def __len__(self) -> int:
        return len(self.spans)

    def sample(self, index: int) -> TextSample:
        """Sample `index`, 0 <= index < N."""
        begin, end = self.spans[index]
        return TextSample(self.ids[begin:end].astype(np.int64), self.types[begin:end], label_at(self.labels, index))


class TextSet(Dataset):
    """A SampleSet; the epoch changes nothing here."""

    def __init__(self, table: TokenTable):
        self.table = table

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, item: tuple[int, int]) -> TextSample:
        return self.table.sample(int(item[1]))

    def name(self, index: int) -> str:
        """What a sample is called in messages."""
        return f"text {self.table.texts[index]}"


def padded(samples: Sequence[TextSample], pad_id: int, max_length: int, multiple: int) -> dict[str, Tensor]:
    """An encoder's input: input_ids and, where needed, attention_mask and token_type_ids; all [B, T] int64.

    T is a multiple of `multiple`, or max_length. If nothing is padded there is no attention_mask: an encoder would ask
    the device about it, and the host would wait.
    """
    width = min(max_length, -(-max(len(sample.ids) for sample in samples) // multiple) * multiple)
    ids = torch.full((len(samples), width), pad_id)                            # [B, T]
    mask, types = torch.zeros(2, len(samples), width, dtype=torch.int64)       # [B, T] each
    for row, sample in enumerate(samples):
        ids[row, :len(sample.ids)] = torch.from_numpy(sample.ids)
        mask[row, :len(sample.ids)] = 1
        types[row, :len(sample.types)] = torch.from_numpy(sample.types.astype(np.int64))
    is_padded = any(len(sample.ids) < width for sample in samples)
    return ({"input_ids": ids} | ({"attention_mask": mask} if is_padded else {})
            | ({"token_type_ids": types} if len(samples[0].types) else {}))
