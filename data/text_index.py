"""The token ids of a data set: made once, by one process per node, kept in the cache, mapped by every process.

    tokenize(source, tokenizer, cache)                       # one process per node
    found = open_texts(source, cache)                        # TextIndex(classes, splits, fingerprint, notes)
"""

import copy
import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from data.splits import require_classes, require_no_targets, sort_classes
from data.table import Columns, Row, choose_columns, read_rows
from data.table_files import find_tables
from data.text import TokenTable
from data.tokenizer import is_special, without_ends
from utils.array_folder import describe, digest_of, open_arrays
from utils.errors import Exit, UserError, counted, some
from utils.files import make_folder

CACHE_VERSION = 2
ROWS_AT_ONCE = 2000  # the tokenizer works on them in one thread per core
DTYPES = {"ids": np.uint32, "types": np.uint8, "spans": np.int64, "labels": np.int32, "num_ordinary": np.int32,
          "texts": np.int32, "lengths": np.int32}


@dataclass(frozen=True)
class TextSource:
    """What is read, and how: decides every token."""

    root: str  # see data/table_files.py: find_tables
    text_column: str
    label_column: str | None  # None: the texts have no labels
    tokenizer: str  # its sha256
    max_length: int  # tokens in a sample, special ones included
    split_long: bool  # a longer text becomes several samples; False: its end is left out
    skip_bad: bool  # an empty text or label is left out, with a note; False: it is an error
    split: str = "val"  # read besides train and val: test needs no labels until it is evaluated

    @property
    def files(self) -> dict[str, list[Path]]:
        """The files of each split."""
        files, _ = find_tables(self.root)
        return {split: paths for split, paths in files.items() if split in ("train", "val", self.split)}


@dataclass(frozen=True, eq=False)
class TextIndex:
    """What a data folder or file holds. `splits` has train and, if the data has them, val and test."""

    classes: tuple[str, ...]  # in label order; empty without labels
    text_columns: tuple[str, ...]
    splits: dict[str, TokenTable]
    fingerprint: str  # sha256 over classes, tokens and labels of train and val
    notes: tuple[str, ...]  # for the user, a line each
    folder: Path  # in the cache


def tokenize(source: TextSource, tokenizer: PreTrainedTokenizerBase, cache: Path) -> None:
    """Make the token ids of `source` under `cache`, unless they are there. Raises UserError (65, 66, 73, 74).

    They appear whole or not at all; of several processes at once one works, and the others wait.
    """
    folder = _folder(source, cache)
    try:
        make_folder(folder, lambda partial: _Writer(source, tokenizer, partial).write(), open_arrays)
    except OSError as error:
        raise UserError(f"cannot keep token ids in {folder}: {error.strerror}; set LOCKSTEP_CACHE to a folder with"
                        " room", Exit.CANNOT_CREATE) from None


def open_texts(source: TextSource, cache: Path) -> TextIndex:
    """What `tokenize` made. Raises UserError (74) if it is not there any more."""
    folder = _folder(source, cache)
    if (found := open_arrays(folder)) is None:
        raise UserError(f"{folder} was removed or damaged before it could be read; start again", Exit.IO)
    about, arrays = found
    splits = {split: TokenTable(**{name: arrays[f"{split}.{name}"] for name in DTYPES}) for split in about["splits"]}
    return TextIndex(tuple(about["classes"]), tuple(about["text_columns"]), splits, about["fingerprint"],
                     tuple(about["notes"]), folder)


def _folder(source: TextSource, cache: Path) -> Path:
    """The name holds all that decides what is in it, so nothing needs to be compared."""
    files = [(split, str(path.absolute()), path.stat().st_size, path.stat().st_mtime_ns)
             for split, paths in source.files.items() for path in paths]
    settings = asdict(replace(source, split=""))  # `files` says which splits
    return cache / f"texts-{digest_of(CACHE_VERSION, files, settings)}"


def read_texts(source: TextSource) -> Iterator[str]:
    """The training texts, one by one. Raises UserError (65, 74), before the first one if the labels are not classes."""
    _check_labels(source)
    return (text for row in _train_rows(source) for text in row.texts)


def sample_texts(source: TextSource, classes: Sequence[str], numbers: np.ndarray) -> dict[int, str]:
    """{number: text} of the samples of source.split with these numbers (TokenTable.texts); a pair as A<tab>B.

    Reads the files of labelled texts again. Raises UserError (65, 74) if they cannot be read as before.
    """
    # texts are numbered over all files, those of train first
    split = source.split if source.split in source.files else "train"  # it is held out of train
    first = 0 if split == "train" else int(numbers.min())
    columns = choose_columns(source.files["train"][0], source.text_column, source.label_column)
    rows = (row for path in source.files[split] for row in read_rows(path, columns)
            if not _problem(row, columns, classes))

    # those that are wanted
    wanted = set(numbers.tolist())
    found = {number: "\t".join(row.texts) for number, row in enumerate(rows, first) if number in wanted}
    if len(found) < len(wanted):
        raise UserError(f"--data {source.root}: the texts changed since they were tokenized; start again",
                        Exit.BAD_DATA)
    return found


def _problem(row: Row, columns: Columns, classes: Collection[str]) -> str:
    """Why a row cannot be a sample; "" if it can. classes: those that a label may be; empty = any."""
    if empty := [name for name, text in zip(columns.texts, row.texts, strict=True) if not text.strip()]:
        return f"{some(empty)} is empty"
    if row.label == "":
        return f"{columns.label} is empty"
    if classes and row.label is not None and row.label not in classes:
        return f"the label {row.label} does not occur in train, which has {some(sort_classes(classes))}"
    return ""


def _train_rows(source: TextSource) -> Iterator[Row]:
    files = source.files["train"]
    columns = choose_columns(files[0], source.text_column, source.label_column)
    return (row for path in files for row in read_rows(path, columns))


def _check_labels(source: TextSource) -> None:
    """Before tokenizing, which takes twenty times as long."""
    if source.label_column is not None:
        counts = Counter(row.label for row in _train_rows(source))
        place = f"--data {source.root}: the column {source.label_column}"
        way_out = "give --label-column the name of the column with the classes"
        require_no_targets(counts, place, way_out)
        require_classes(np.array(list(counts.values())), place, way_out)


class _Piece(NamedTuple):
    """A sample to be: a text, or a part of a long one."""

    ids: np.ndarray  # [length] int64
    types: list[int]  # [length], or empty
    label: int
    text: int  # index of its text
    num_ordinary: int  # non-special tokens


class _Writer:
    """Reads the tables, and writes the arrays of every split into `folder`."""

    def __init__(self, source: TextSource, tokenizer: PreTrainedTokenizerBase, folder: Path):
        _check_labels(source)
        self._source, self._folder = source, folder
        self._tokenizer = copy.deepcopy(tokenizer)  # a call changes its truncation for good
        self._has_types = "token_type_ids" in tokenizer.model_input_names
        self._is_special = is_special(tokenizer)  # [V]
        self._dtypes = DTYPES | {"ids": np.uint16 if len(self._is_special) <= 2**16 else np.uint32}
        self._files, self._notes = source.files, find_tables(source.root)[1]
        self._columns = choose_columns(self._files["train"][0], source.text_column, source.label_column)
        self._labels: dict[str, int] = {}  # of train, in the order in which they appear
        self._first_bad = ""
        self._num_texts = self._num_long = self._num_bad = 0

    def write(self) -> None:
        """All splits, train first: it decides which classes there are. Raises UserError."""
        # arrays
        for split in self._files:
            self._write_split(split)
        classes = self._sort_labels()

        # notes
        if joined := [name for name in classes if "|" in name]:
            self._notes.append(f"{counted(len(joined), 'class')} with | in the name, for example {joined[0]}: if these"
                               " are several labels of a sample, note that each such combination is one class here")
        if self._num_bad:
            self._notes.append(f"left out {counted(self._num_bad, 'sample')}, for example {self._first_bad}")
        if self._num_long:
            what = "cut into several samples" if self._source.split_long else "cut off there"
            self._notes.append(f"{self._num_long} of {self._num_texts} texts have more than --max-length"
                               f" {self._source.max_length} tokens and are {what}")

        # fingerprint: of what training and validation read, without test; lengths follow from spans
        digest = hashlib.sha256(json.dumps(classes).encode())
        for split in [split for split in self._files if split != "test"]:
            for name in [name for name in DTYPES if name != "lengths"]:
                with (self._folder / f"{split}.{name}").open("rb") as file:
                    digest.update(hashlib.file_digest(file, "sha256").digest())

        # description
        about = {"classes": classes, "text_columns": self._columns.texts, "splits": list(self._files),
                 "notes": self._notes, "fingerprint": digest.hexdigest()}
        describe(self._folder, about, {f"{split}.{name}": (dtype, (2,) if name == "spans" else ())
                                       for split in self._files for name, dtype in self._dtypes.items()})

    def _write_split(self, split: str) -> None:
        rows, end = self._rows(split), 0
        with ExitStack() as stack:
            files = {name: stack.enter_context((self._folder / f"{split}.{name}").open("wb")) for name in DTYPES}
            while chunk := list(islice(rows, ROWS_AT_ONCE)):
                arrays = _as_arrays(self._encode(chunk))
                arrays["spans"] += end
                end += len(arrays["ids"])
                for name, values in arrays.items():
                    files[name].write(values.astype(self._dtypes[name]).tobytes())
        if not end:
            raise UserError(f"{some(map(str, self._files[split]))}: there are no texts in it", Exit.BAD_DATA)

    def _encode(self, rows: list[Row]) -> list[_Piece]:
        """The samples made of these rows."""
        # tokenize
        columns = [[row.texts[i] for row in rows] for i in range(len(self._columns.texts))]
        if len(columns) == 2:
            columns = [without_ends(self._tokenizer, column, self._source.max_length) for column in columns]
        encoded = self._tokenizer(*columns, truncation=True, max_length=self._source.max_length).encodings

        # cut: a long text becomes several pieces, or keeps its first one
        pieces = []
        for row, first in zip(rows, encoded, strict=True):
            for one in [first, *first.overflowing] if self._source.split_long else [first]:
                ids = np.array(one.ids, np.int64)
                num_ordinary = np.count_nonzero(~self._is_special[ids])
                pieces.append(_Piece(ids, one.type_ids if self._has_types else [], self._labels.get(row.label, 0),
                                     self._num_texts, num_ordinary))
            self._num_texts += 1
            self._num_long += bool(first.overflowing)

        # A text of odd characters may have special tokens alone: without a label there is nothing to predict.
        return [piece for piece in pieces if piece.num_ordinary or self._source.label_column is not None]

    def _rows(self, split: str) -> Iterator[Row]:
        for path in self._files[split]:
            for row in read_rows(path, self._columns):
                problem = _problem(row, self._columns, {} if split == "train" else self._labels)
                if problem and not self._source.skip_bad:
                    raise UserError(f"{path} line {row.line}: {problem}; correct or remove the row, or pass"
                                    " --bad-samples skip", Exit.BAD_DATA)
                if problem:
                    self._first_bad = self._first_bad or f"{path} line {row.line}: {problem}"
                    self._num_bad += 1
                    continue
                if split == "train" and row.label is not None:
                    self._labels.setdefault(row.label, len(self._labels))
                yield row

    def _sort_labels(self) -> list[str]:
        """The classes in label order; renumbers the labels on disk. Raises UserError if there is only one class."""
        if self._source.label_column is None:
            return []
        classes = sort_classes(self._labels)
        if len(classes) == 1:
            raise UserError(f"--data {self._source.root}: there is only one class, {classes[0]}, in"
                            f" {self._columns.label}; a classifier needs two or more", Exit.BAD_DATA)
        label_of = {name: label for label, name in enumerate(classes)}
        new_labels = np.array([label_of[name] for name in self._labels], dtype=DTYPES["labels"])
        for split in self._files:
            file = self._folder / f"{split}.labels"
            file.write_bytes(new_labels[np.fromfile(file, DTYPES["labels"])].tobytes())
        return classes


def _as_arrays(pieces: list[_Piece]) -> dict[str, np.ndarray]:
    """The arrays of a TokenTable, for samples that begin at 0."""
    ends = np.cumsum([0, *(len(piece.ids) for piece in pieces)], dtype=np.int64)
    return {
        "ids": np.concatenate([np.zeros(0, np.int64), *(piece.ids for piece in pieces)]),
        "types": np.concatenate([np.zeros(0, np.uint8), *(np.array(piece.types, np.uint8) for piece in pieces)]),
        "spans": np.stack([ends[:-1], ends[1:]], axis=1),
        "labels": np.array([piece.label for piece in pieces]),
        "num_ordinary": np.array([piece.num_ordinary for piece in pieces]),
        "texts": np.array([piece.text for piece in pieces]),
        "lengths": np.diff(ends)}
