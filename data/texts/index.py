"""The token ids of a data set: made once, by one process per node, kept in the cache, mapped by every process.

    found = open_texts(source, tokenizer, cache)             # TextIndex(classes, splits, fingerprint, notes)
"""

import copy
import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from data.labels import LabelReader, require_several
from data.tables.source import RowReader, TableSource
from data.tables.table import Row
from data.texts.text_set import TokenTable
from data.texts.tokenizer import is_special, without_ends
from utils.array_folder import describe, open_arrays
from utils.errors import Exit, UserError
from utils.files import make_folder

CACHE_VERSION = 3
ROWS_AT_ONCE = 2000  # the tokenizer works on them in one thread per core
ARRAYS = {"ids": np.uint32, "types": np.uint8, "spans": np.int64, "labels": np.int32, "num_ordinary": np.int32,
          "texts": np.int32, "lengths": np.int32}


@dataclass(frozen=True, kw_only=True)
class TextSource(TableSource):
    """What is read, and how: decides every token."""

    tokenizer: str  # its sha256
    max_length: int  # tokens in a sample, special ones included
    split_long: bool  # a longer text becomes several samples; False: its end is left out


@dataclass(frozen=True, eq=False)
class TextIndex:
    """What a data folder or file holds. `splits` has train and, if the data has them, val and test."""

    classes: tuple[str, ...]  # what the model predicts, see LabelReader; empty without labels
    text_columns: tuple[str, ...]
    splits: dict[str, TokenTable]
    fingerprint: str  # sha256 over classes, tokens and labels of train and val
    notes: tuple[str, ...]  # for the user, a line each
    groups: np.ndarray | None  # [N of train] int32: samples that are held out together; None = each alone
    folder: Path  # in the cache


def open_texts(source: TextSource, tokenizer: PreTrainedTokenizerBase, cache: Path) -> TextIndex:
    """The token ids of `source` under `cache`, made if they are not there. Raises UserError (65, 66, 73, 74).

    They appear whole or not at all; of several processes at once one works, and the others wait.
    """
    folder = cache / f"texts-{source.digest(CACHE_VERSION)}"  # the name holds all that decides what is in it
    try:
        make_folder(folder, lambda partial: _Writer(source, tokenizer, partial).write(), open_arrays)
    except OSError as error:
        raise UserError(f"cannot keep token ids in {folder}: {error.strerror}; set LOCKSTEP_CACHE to a folder with"
                        " room", Exit.CANNOT_CREATE) from None
    if (found := open_arrays(folder)) is None:
        raise UserError(f"{folder} was removed or damaged before it could be read; start again", Exit.IO)
    about, arrays = found
    splits = {split: TokenTable(**{name: arrays[f"{split}.{name}"] for name in ARRAYS}) for split in about["splits"]}
    return TextIndex(tuple(about["classes"]), tuple(about["text_columns"]), splits, about["fingerprint"],
                     tuple(about["notes"]), arrays.get("groups"), folder)


def read_texts(source: TextSource, without: Collection[int] = ()) -> Iterator[str]:
    """The training texts, one by one. Raises UserError (65, 74), before the first one if the labels are not classes.

    without: numbers of rows that are left out, as in TokenTable.texts: counted over those that are samples.
    """
    source.require_labels()
    labels = LabelReader(source.label_kind, source.label_columns)
    rows = (row for _, row in source.rows("train"))
    if without:
        rows = (row for row in rows if not source.problem(row, labels, is_train=True))
    return (text for number, row in enumerate(rows) if number not in without for text in row.texts)


def sample_rows(source: TextSource, classes: Sequence[str], numbers: np.ndarray) -> dict[int, Row]:
    """{number: row} of the samples of source.split with these numbers (TokenTable.texts).

    Reads the files of labelled texts again. Raises UserError (65, 74) if they cannot be read as before.
    """
    # texts are numbered over all splits, those of train first
    split = source.split if source.split in source.splits else "train"  # it is held out of train
    first = 0 if split == "train" else int(numbers.min())
    wanted, every = set(numbers.tolist()), enumerate(source.samples(split, classes), first)
    found = {number: row for number, row in every if number in wanted}
    if len(found) < len(wanted):
        raise UserError(f"--data {source.root}: its texts changed since the start; start again", Exit.BAD_DATA)
    return found


def texts_of(source: TextSource, classes: Sequence[str], splits: Iterable[str]) -> Iterator[str]:
    """The texts of these splits that are samples, read again; a pair as A<tab>B. classes: of train."""
    return ("\t".join(row.texts) for split in splits for row in source.samples(split, classes))


class _Writer:
    """Reads the tables, and writes the arrays of every split into `folder`."""

    def __init__(self, source: TextSource, tokenizer: PreTrainedTokenizerBase, folder: Path):
        self._source, self._folder = source, folder
        self._reader = RowReader(source)
        self._tokenizer = copy.deepcopy(tokenizer)  # a call changes its truncation for good
        self._has_types = "token_type_ids" in tokenizer.model_input_names
        self._is_special = is_special(tokenizer)  # [V]
        self._dtypes = ARRAYS | {"ids": np.uint16 if len(self._is_special) <= 2**16 else np.uint32}
        self._num_texts = self._num_long = 0

    def write(self) -> None:
        """All splits, train first: it decides which classes there are. Raises UserError."""
        # arrays
        source = self._source
        for split in source.splits:
            self._write_split(split)
        classes, labels = self._reader.labels.encoded() if source.label_columns else ((), {})
        require_several(source.label_kind, classes, source.root, source.label_columns)
        layout = {f"{split}.{name}": (dtype, (2,) if name == "spans" else ())
                  for split in source.splits for name, dtype in self._dtypes.items()}
        for split, array in labels.items():
            (self._folder / f"{split}.labels").write_bytes(array.tobytes())
            layout[f"{split}.labels"] = (array.dtype, array.shape[1:])

        # notes
        notes = source.notes + self._reader.notes
        if self._num_long:
            what = "cut into several samples" if source.split_long else "cut off there"
            notes.append(f"{self._num_long} of {self._num_texts} texts have more than --max-length"
                         f" {source.max_length} tokens and are {what}")

        # fingerprint: of what training and validation read, without test; lengths follow from spans
        digest = hashlib.sha256(json.dumps(classes).encode())
        for split in [split for split in source.splits if split != "test"]:
            for name in [name for name in ARRAYS if name != "lengths"]:
                with (self._folder / f"{split}.{name}").open("rb") as file:
                    digest.update(hashlib.file_digest(file, "sha256").digest())

        # groups, numbered anew, as a row may have no sample
        if (of_rows := self._reader.groups) is not None:
            rows = np.fromfile(self._folder / "train.texts", self._dtypes["texts"])
            groups = np.unique(of_rows[rows], return_inverse=True)[1].astype(np.int32)
            (self._folder / "groups").write_bytes(groups)
            layout["groups"] = (np.int32, ())
            digest.update(groups)  # they decide what is held out

        # description
        about = {"classes": classes, "text_columns": source.columns.texts, "splits": source.splits, "notes": notes,
                 "fingerprint": digest.hexdigest()}
        describe(self._folder, about, layout)

    def _write_split(self, split: str) -> None:
        rows, end = self._reader.rows(split), 0
        with ExitStack() as stack:
            files = {name: stack.enter_context((self._folder / f"{split}.{name}").open("wb")) for name in ARRAYS}
            while chunk := list(islice(rows, ROWS_AT_ONCE)):
                arrays = self._encode(chunk)
                arrays["spans"] += end
                end += len(arrays["ids"])
                for name, values in arrays.items():
                    files[name].write(values.astype(self._dtypes[name]).tobytes())
        if not end:
            raise self._reader.no_samples(split)

    def _encode(self, rows: list[Row]) -> dict[str, np.ndarray]:
        """The arrays of the samples made of these rows, which begin at 0."""
        # tokenize
        columns = [[row.texts[i] for row in rows] for i in range(len(self._source.columns.texts))]
        columns = without_ends(self._tokenizer, columns, self._source.max_length)
        encoded = self._tokenizer(*columns, truncation=True, max_length=self._source.max_length).encodings

        # cut: a long text becomes several samples, or keeps its beginning
        ids, types, nums_ordinary, texts = [np.zeros(0, np.int64)], [np.zeros(0, np.uint8)], [], []
        for first in encoded:
            for one in [first, *first.overflowing] if self._source.split_long else [first]:
                num_ordinary = np.count_nonzero(~self._is_special[one.ids])
                # A text of odd characters may have special tokens alone: without a label there is nothing to predict.
                if num_ordinary or self._source.label_columns:
                    ids.append(np.array(one.ids, np.int64))
                    types.append(np.array(one.type_ids if self._has_types else [], np.uint8))
                    nums_ordinary.append(num_ordinary)
                    texts.append(self._num_texts)
            self._num_texts += 1
            self._num_long += bool(first.overflowing)

        # as a TokenTable has them; labels come last, if there are any
        ends = np.cumsum([len(each) for each in ids], dtype=np.int64)
        return {"ids": np.concatenate(ids), "types": np.concatenate(types),
                "spans": np.stack([ends[:-1], ends[1:]], axis=1), "labels": np.zeros(len(texts)),
                "num_ordinary": np.array(nums_ordinary), "texts": np.array(texts), "lengths": np.diff(ends)}
