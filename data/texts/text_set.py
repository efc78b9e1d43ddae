"""Texts as a data set: token ids that were made once (data/texts/index.py) and are mapped into memory.

    TextSet(found.splits["train"])[epoch, index]             # TextSample(ids, types, label)

Legend: N samples of a split, B samples in a batch, T tokens in the longest of them, R rows of packed samples.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from data.batch import sample_digest
from data.labels import label_at
from utils.errors import UserError
from utils.rundir.digests import UNKNOWN


class TextSample(NamedTuple):
    """One sample as the model's input, before padding."""

    ids: np.ndarray  # [length] int64
    types: np.ndarray  # [length] uint8, or empty
    label: int | np.ndarray  # a class, or a row of labels or numbers
    digest: bytes = UNKNOWN  # see data.batch.sample_digest
    weight: float = 1.0  # 0: it is left out, and stands here as padding


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
    left_out: frozenset[int] = frozenset()  # indices, see data/left_out.py
    frame: tuple[list[int], list[int], list[int]] = ([], [0], [])  # of what stands in for them, see text_of_padding

    def __len__(self) -> int:
        return len(self.spans)

    def called(self, index: int) -> str:
        """See data.left_out.Named: the number of its row."""
        return str(self.texts[index])

    def find(self, lines: Iterable[str]) -> dict[str, list[int]]:
        """See data.left_out.Named."""
        line_of, found = {row_number(line): line for line in lines}, defaultdict(list)
        for index in np.flatnonzero(np.isin(self.texts, [*line_of])).tolist():
            found[line_of[int(self.texts[index])]].append(index)
        return found

    def leaving_out(self, indices: frozenset[int], frame: tuple[list[int], list[int], list[int]]) -> "TokenTable":
        """The same samples, of which some are left out. frame: see text_of_padding."""
        if not indices:
            return self
        num_ordinary, places = self.num_ordinary.copy(), sorted(indices)
        num_ordinary[places] = np.maximum(1, self.lengths[places] - len(frame[0]) - len(frame[2]))
        return replace(self, num_ordinary=num_ordinary, left_out=indices, frame=frame)

    def sample(self, index: int) -> TextSample:
        """Sample `index`, 0 <= index < N."""
        begin, end = self.spans[index]
        if index in self.left_out:
            first, pad, last = self.frame
            ids = np.array([*first, *pad * (end - begin - len(first) - len(last)), *last])[:end - begin]
            types = np.zeros(len(ids) if len(self.types) else 0, np.uint8)
            return TextSample(ids, types, label_at(self.labels, index) * 0, weight=0.0)
        ids, types, label = self.ids[begin:end], self.types[begin:end], label_at(self.labels, index)
        digest = sample_digest(b"%d" % self.texts[index], label, (ids.tobytes(), types.tobytes()))
        return TextSample(ids.astype(np.int64), types, label, digest)


def row_number(line: str) -> int:
    """What a line of --without means: the number of a row, as in TokenTable.texts, alone or as TextSet.name has it."""
    if not (match := re.fullmatch(r"(?:text )?(\d{1,18})", line.strip())):
        raise UserError(f"--without: {line}: give the number of a row, counted from 0 over the tables of train")
    return int(match[1])


class TextSet(Dataset):
    """A SampleSet; the epoch changes nothing here."""

    def __init__(self, table: TokenTable):
        self.table = self.index = table

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, item: tuple[int, int]) -> TextSample:
        return self.table.sample(int(item[1]))

    def name(self, index: int) -> str:
        """What a sample is called in messages."""
        return f"text {self.table.texts[index]}"

    def digest(self, index: int) -> bytes:
        """Of its tokens and its label, as they are in the cache."""
        return self.table.sample(index).digest


def padded(
    samples: Sequence[TextSample], pad_id: int, max_length: int, multiple: int, side: str | None = None
) -> dict[str, Tensor]:
    """An encoder's input: input_ids and, where needed, attention_mask and token_type_ids; all [B, T] int64.

    side: of the padding, see models.text.padding.find_padding_side; "left", or anything else for the right.

    T is a multiple of `multiple`, or max_length. If nothing is padded there is no attention_mask: an encoder would ask
    the device about it, and the host would wait.
    """
    width = _width(samples, max_length, multiple)
    starts = [row * width + (width - len(sample.ids) if side == "left" else 0) for row, sample in enumerate(samples)]
    inputs, owners = _laid_out(samples, starts, (len(samples), width), pad_id)
    is_padded = any(len(sample.ids) < width for sample in samples)
    return inputs | ({"attention_mask": (owners >= 0).long()} if is_padded else {})


def packed(
    samples: Sequence[TextSample], pad_id: int, max_length: int, multiple: int, first_position: int
) -> tuple[dict[str, Tensor], list[int]]:
    """The same with several samples in a row, each as if it were alone: input_ids, position_ids, owners, maybe types.

    All are [R, T] int64. position_ids: begin with first_position in each sample. owners: the index of a token's sample,
    -1 for padding; attention stays between tokens of one owner. Also returns where in the flattened [R x T] tokens each
    sample begins.
    """
    width = _width(samples, max_length, multiple)
    starts, num_rows = first_fit([len(sample.ids) for sample in samples], width)
    inputs, owners = _laid_out(samples, starts, (num_rows, width), pad_id)
    position_ids = torch.zeros(num_rows * width, dtype=torch.int64)
    for sample, start in zip(samples, starts, strict=True):
        position_ids[start:start + len(sample.ids)] = torch.arange(first_position, first_position + len(sample.ids))
    return inputs | {"position_ids": position_ids.view_as(owners), "owners": owners}, starts


def first_fit(lengths: Sequence[int], width: int) -> tuple[list[int], int]:
    """Where in the flattened [R x width] tokens each sample begins, and R.

    The longest first, each in the first row with room for it: at most 11/9 of the fewest rows, and one (Yue, 1991).
    """
    shortest, num_rows = min(lengths), 0
    room: dict[int, int] = {}  # by row: of those in which the shortest has room
    starts = [0] * len(lengths)
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        row = next((row for row, left in room.items() if left >= lengths[index]), num_rows)
        if row == num_rows:
            room[row], num_rows = width, num_rows + 1
        starts[index] = (row + 1) * width - room[row]
        room[row] -= lengths[index]
        if room[row] < shortest:
            del room[row]
    return starts, num_rows


def _width(samples: Sequence[TextSample], max_length: int, multiple: int) -> int:
    return min(max_length, -(-max(len(sample.ids) for sample in samples) // multiple) * multiple)


def _laid_out(
    samples: Sequence[TextSample], starts: Iterable[int], shape: tuple[int, int], pad_id: int
) -> tuple[dict[str, Tensor], Tensor]:
    """input_ids and, where the tokenizer has types, token_type_ids; and owners, see `packed`. All of that shape."""
    ids, owners = torch.full(shape, pad_id), torch.full(shape, -1)
    types = torch.zeros(shape, dtype=torch.int64)
    for index, (sample, start) in enumerate(zip(samples, starts, strict=True)):
        place = slice(start, start + len(sample.ids))
        ids.view(-1)[place], owners.view(-1)[place] = torch.from_numpy(sample.ids), index
        if len(sample.types):
            types.view(-1)[place] = torch.from_numpy(sample.types.astype(np.int64))
    return {"input_ids": ids} | ({"token_type_ids": types} if len(samples[0].types) else {}), owners
