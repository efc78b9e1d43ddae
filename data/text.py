"""Texts as token ids: made once, by one process per node, kept in the cache, memory-mapped by every process that reads them.

    tokenize(source, tokenizer, cache)                       # one process per node
    found = open_texts(source, cache)                        # TextIndex(classes, splits, fingerprint, notes)
    TextSet(found.splits["train"])[epoch, i]                 # TextSample(ids, types, label)

Legend: N samples, B samples in a batch, T tokens in the longest of them.
"""

import copy
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from data.splits import require_classes, sort_classes
from data.table import Row, choose_columns, find_tables, read_rows
from data.tokenizer import is_special, without_ends
from utils.array_folder import describe, digest_of, make_folder, open_arrays
from utils.errors import Exit, UserError, some

CACHE_VERSION = 2
ROWS_AT_ONCE = 2000  # handed to the tokenizer, which works on them in as many threads as there are cores
PAD_TO = 8  # tokens: widths of batches are multiples


@dataclass(frozen=True)
class TextSource:
    """What is read, and how: decides every token."""

    root: str  # see data/table.py: find_tables
    text_column: str
    label_column: str | None  # None: the texts have no labels
    tokenizer: str  # sha256 of it
    max_length: int  # tokens in a sample, special ones included
    split_long: bool  # a longer text becomes several samples; False: its end is left out
    skip_bad: bool  # an empty text or label is left out, with a note; False: it is an error
    split: str = "val"  # what is read besides train and val: test need have no labels until it is evaluated

    @property
    def files(self) -> dict[str, list[Path]]:
        """The files of each split."""
        return {split: files for split, files in find_tables(self.root)[0].items() if split in ("train", "val", self.split)}


@dataclass(frozen=True, eq=False)
class TokenTable:
    """The samples of a split. Arrays on disk, mapped into memory: processes share them, and only what is read is loaded."""

    per_sample: ClassVar = ("spans", "labels", "num_ordinary", "texts", "lengths")

    ids: np.ndarray  # uint16 or uint32: the tokens of all samples, one after the other
    types: np.ndarray  # uint8, as ids: token types; empty where the tokenizer has none
    spans: np.ndarray  # [N, 2] int64: begin and end of each sample in ids
    labels: np.ndarray  # [N] int32; 0 where there are no labels
    num_ordinary: np.ndarray  # [N] int32: tokens that are no special ones
    texts: np.ndarray  # [N] int32: the number of the text that it is, or is cut from
    lengths: np.ndarray  # [N] int32: tokens

    def __len__(self) -> int:
        return len(self.spans)

    def sample(self, i: int) -> "TextSample":
        """Sample i, 0 <= i < N."""
        begin, end = self.spans[i]
        return TextSample(self.ids[begin:end].astype(np.int64), self.types[begin:end], int(self.labels[i]))


DTYPES = {"ids": np.uint32, "types": np.uint8, "spans": np.int64, "labels": np.int32, "num_ordinary": np.int32,
          "texts": np.int32, "lengths": np.int32}


@dataclass(frozen=True, eq=False)
class TextIndex:
    """What a data folder or file holds. `splits` has train and, where there are such, val and test."""

    classes: tuple[str, ...]  # in label order; empty without labels
    text_columns: tuple[str, ...]
    splits: dict[str, TokenTable]
    fingerprint: str  # sha256 over classes, tokens and labels of train and val
    notes: tuple[str, ...]  # for the user, a line each
    folder: Path  # that holds it


class TextSample(NamedTuple):
    """One sample as the model's input, before padding."""

    ids: np.ndarray  # [length] int64
    types: np.ndarray  # [length] uint8, or empty
    label: int


class TextSet(Dataset):
    """Items are asked for as (epoch, i); the epoch changes nothing here."""

    def __init__(self, table: TokenTable):
        self.table = table

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, item: tuple[int, int]) -> TextSample:
        return self.table.sample(int(item[1]))

    def name(self, i: int) -> str:
        """What sample i is called in messages."""
        return f"text {self.table.texts[i]}"


def padded(samples: Sequence[TextSample], pad_id: int, max_length: int) -> dict[str, Tensor]:
    """The samples as what an encoder takes: input_ids, attention_mask and, where there are types, token_type_ids; [B, T] int64.

    T is a multiple of PAD_TO, or max_length. Where nothing is padded there is no attention_mask: an encoder would ask the
    device for that, and the host would wait.
    """
    width = min(max_length, -(-max(len(sample.ids) for sample in samples) // PAD_TO) * PAD_TO)
    ids, mask, types = torch.full((len(samples), width), pad_id), *torch.zeros(2, len(samples), width, dtype=torch.int64)
    for row, sample in enumerate(samples):
        ids[row, :len(sample.ids)] = torch.from_numpy(sample.ids)
        mask[row, :len(sample.ids)] = 1
        types[row, :len(sample.types)] = torch.from_numpy(sample.types.astype(np.int64))
    is_padded = any(len(sample.ids) < width for sample in samples)
    return ({"input_ids": ids} | ({"attention_mask": mask} if is_padded else {})
            | ({"token_type_ids": types} if len(samples[0].types) else {}))


def tokenize(source: TextSource, tokenizer: Any, cache: Path) -> None:
    """Make the token ids of `source` under `cache`, unless they are there. Raises UserError (65, 66, 73, 74).

    They appear whole or not at all; of several processes at once one works, and the others wait.
    """
    folder = _folder(source, cache)
    try:
        make_folder(folder, lambda partial: _Writer(source, tokenizer, partial).write())
    except OSError as error:
        raise UserError(f"cannot keep token ids in {folder}: {error.strerror}; set LOCKSTEP_CACHE to a folder with"
                        " room", Exit.CANNOT_CREATE) from None


def open_texts(source: TextSource, cache: Path) -> TextIndex:
    """What `tokenize` made. Raises UserError (74) if it is not there any more."""
    folder = _folder(source, cache)
    if (found := open_arrays(folder)) is None:
        raise UserError(f"{folder} was removed or damaged as it was about to be read; start again", Exit.IO)
    about, arrays = found
    splits = {split: TokenTable(**{name: arrays[f"{split}.{name}"] for name in DTYPES}) for split in about["splits"]}
    return TextIndex(tuple(about["classes"]), tuple(about["text_columns"]), splits, about["fingerprint"],
                     tuple(about["notes"]), folder)


def _folder(source: TextSource, cache: Path) -> Path:
    """Its name holds all that decides what is in it: no need to compare."""
    files = [(split, str(path.absolute()), path.stat().st_size, path.stat().st_mtime_ns)
             for split, paths in source.files.items() for path in paths]
    settings = asdict(replace(source, split=""))  # which is in the files
    return cache / f"texts-{digest_of(CACHE_VERSION, files, settings)}"


def read_texts(source: TextSource) -> Iterator[str]:
    """The training texts, one by one. Raises UserError (65, 74), before the first one if the labels are no classes."""
    _check_labels(source)
    return (text for row in _train_rows(source) for text in row.texts)


def _train_rows(source: TextSource) -> Iterator[Row]:
    files = source.files["train"]
    columns = choose_columns(files[0], source.text_column, source.label_column)
    return (row for path in files for row in read_rows(path, columns))


def _check_labels(source: TextSource) -> None:
    """Before the work that it may save: this takes a twentieth of the time that tokenizing does."""
    if source.label_column is not None:
        counts = Counter(row.label for row in _train_rows(source))
        require_classes(np.array(list(counts.values())), f"--data {source.root}: the column {source.label_column}",
                        "name the column with the classes by --label-column")


class _Writer:
    """Reads the tables, and writes the arrays of every split into `folder`."""

    def __init__(self, source: TextSource, tokenizer: Any, folder: Path):
        _check_labels(source)
        self._source, self._folder = source, folder
        self._tokenizer = copy.deepcopy(tokenizer)  # it keeps the truncation that it is called with
        self._files, self._notes = source.files, find_tables(source.root)[1]
        self._columns = choose_columns(self._files["train"][0], source.text_column, source.label_column)
        self._special = is_special(tokenizer)
        self._dtypes = DTYPES | {"ids": np.uint16 if len(self._special) <= 2**16 else np.uint32}
        self._labels: dict[str, int] = {}  # of train, in the order in which they appear
        self._first_bad = ""
        self._num_texts = self._num_long = self._num_bad = 0

    def write(self) -> None:
        """All splits, train first, for it says which classes there are. Raises UserError."""
        for split in self._files:
            self._write_split(split)
        classes = self._sort_classes()
        if self._num_bad:
            self._notes.append(f"left out {self._num_bad} samples ({self._first_bad}, for one)")
        if self._num_long:
            what = "cut into several samples" if self._source.split_long else "cut off there"
            self._notes.append(f"{self._num_long} of {self._num_texts} texts have more than --max-length {self._source.max_length}"
                               f" tokens and are {what}")
        digest = hashlib.sha256(json.dumps(classes).encode())
        for split in [split for split in self._files if split != "test"]:  # a run is the same whether it is read or not
            for name in [name for name in DTYPES if name != "lengths"]:  # which are in spans
                with (self._folder / f"{split}.{name}").open("rb") as file:
                    digest.update(hashlib.file_digest(file, "sha256").digest())
        about = {"classes": classes, "text_columns": self._columns.texts, "splits": list(self._files), "notes": self._notes,
                 "fingerprint": digest.hexdigest()}
        describe(self._folder, about, {f"{split}.{name}": (dtype, (2,) if name == "spans" else ())
                                       for split in self._files for name, dtype in self._dtypes.items()})

    def _write_split(self, split: str) -> None:
        rows, end = self._rows(split), 0
        with ExitStack() as stack:
            files = {name: stack.enter_context((self._folder / f"{split}.{name}").open("wb")) for name in DTYPES}
            while chunk := list(islice(rows, ROWS_AT_ONCE)):
                arrays = self._encode(chunk)
                arrays["spans"] += end
                end += len(arrays["ids"])
                for name, values in arrays.items():
                    files[name].write(values.astype(self._dtypes[name]).tobytes())
        if not end:
            raise UserError(f"{some(map(str, self._files[split]))}: there are no texts in it", Exit.BAD_DATA)

    def _encode(self, rows: list[Row]) -> dict[str, np.ndarray]:
        """The arrays of a TokenTable for these rows."""
        texts = [[row.texts[i] for row in rows] for i in range(len(self._columns.texts))]
        if len(texts) == 2:
            texts = [without_ends(self._tokenizer, column, self._source.max_length) for column in texts]
        encoded = self._tokenizer(*texts, truncation=True, max_length=self._source.max_length).encodings
        has_types = "token_type_ids" in self._tokenizer.model_input_names
        samples = [(np.array(piece.ids, np.int64), piece.type_ids if has_types else [], self._labels.get(row.label, 0), number)
                   for number, (one, row) in enumerate(zip(encoded, rows, strict=True), self._num_texts)
                   for piece in ([one, *one.overflowing] if self._source.split_long else [one])]
        self._num_texts += len(encoded)
        self._num_long += sum(bool(one.overflowing) for one in encoded)
        num_ordinary = np.array([np.count_nonzero(~self._special[ids]) for ids, *_ in samples])
        if self._source.label_column is None:  # of odd characters nothing is left, and nothing could be predicted
            samples, num_ordinary = [samples[i] for i in np.flatnonzero(num_ordinary)], num_ordinary[num_ordinary > 0]
        ends = np.cumsum([0, *(len(ids) for ids, *_ in samples)], dtype=np.int64)
        return {
            "ids": np.concatenate([np.zeros(0, np.int64), *(ids for ids, *_ in samples)]),
            "types": np.concatenate([np.zeros(0, np.uint8), *(np.array(types, np.uint8) for _, types, *_ in samples)]),
            "spans": np.stack([ends[:-1], ends[1:]], axis=1),
            "labels": np.array([label for *_, label, _ in samples]),
            "num_ordinary": num_ordinary,
            "texts": np.array([number for *_, number in samples]),
            "lengths": np.diff(ends)}

    def _rows(self, split: str) -> Iterator[Row]:
        for path in self._files[split]:
            for row in read_rows(path, self._columns):
                problem = self._problem(split, row)
                if problem and not self._source.skip_bad:
                    raise UserError(f"{path} line {row.line}: {problem}; mend or remove the row, or pass --bad-samples skip", Exit.BAD_DATA)
                if problem:
                    self._first_bad = self._first_bad or f"{path} line {row.line}: {problem}"
                    self._num_bad += 1
                else:
                    yield row

    def _problem(self, split: str, row: Row) -> str:
        if empty := [name for name, text in zip(self._columns.texts, row.texts, strict=True) if not text.strip()]:
            return f"{some(empty)} is empty"
        if row.label == "":
            return f"{self._columns.label} is empty"
        if split == "train" and row.label is not None:
            self._labels.setdefault(row.label, len(self._labels))
        elif row.label is not None and row.label not in self._labels:
            return f"the label {row.label} does not occur in train, which has {some(sort_classes(self._labels))}"
        return ""

    def _sort_classes(self) -> list[str]:
        """The classes in label order; the labels on disk are renumbered to it. Raises UserError where there is only one."""
        if self._source.label_column is None:
            return []
        classes = sort_classes(self._labels)
        if len(classes) == 1:
            raise UserError(f"--data {self._source.root}: there is only one class, {classes[0]}, in {self._columns.label};"
                            " a classifier needs two or more", Exit.BAD_DATA)
        number = {label: i for i, label in enumerate(classes)}
        new = np.array([number[label] for label in self._labels], dtype=DTYPES["labels"])
        for split in self._files:
            file = self._folder / f"{split}.labels"
            file.write_bytes(new[np.fromfile(file, DTYPES["labels"])].tobytes())
        return classes
