"""What tar files hold together: the index of a folder of images, whose files lie in them.

    index = build_image_index("DIR", ValSplit(fraction=0.1, seed=0), cache, note=print)       # a FolderIndex

DIR holds train/*.tar and val/*.tar (or validation, test, ...), or *-train-*.tar and *-val-*.tar, or just *.tar; or it
is one .tar, or a pattern. Samples are sorted as ImageFolder sorts: by class, then by folder and name, in whichever tar
file they lie. So a folder that was packed has the order, the names and the fingerprint that it had.

Legend: N samples, M of one tar file.

Tests: tests/end_to_end/test_shards.py
"""

import gc
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import ClassVar

import numpy as np

from data.images.index import FolderIndex, Found, ImageIndex, kept_index
from data.images.scan import build_index
from data.labels import lacking
from data.shards.files import files_by_split, used_splits
from data.shards.headers import shown
from data.shards.parquet import imported, is_parquet
from data.shards.shard import CACHE_VERSION, ENDING, Shard, member_of, open_shard, stat_of
from data.shards.writing import CLASSES, read_classes
from data.splits import SPLIT_NAMES, ValSplit, hint_at, plain, require_classes, sort_classes
from utils.array_folder import digest_of
from utils.errors import Exit, UserError, counted, some
from utils.hardware.cores import available_cores

SAID_EVERY = 100_000  # samples


@dataclass(frozen=True, eq=False)
class ShardIndex(ImageIndex):
    """A split in tar files: `names` are those that the samples would have in a folder."""

    per_sample: ClassVar = (*ImageIndex.per_sample, "shard_of")
    arrays: ClassVar = (*ImageIndex.arrays, "shards", "shard_of")

    shards: np.ndarray = field(default_factory=lambda: np.zeros(0, np.bytes_))  # paths, relative to root
    shard_of: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))  # [N], of each sample

    def paths(self, index: int) -> list[str]:
        """SHARD.tar/MEMBER, absolute."""
        shard, first = (os.fsdecode(self.shards[number]) for number in (self.shard_of[index], 0))
        member = member_of(self.name(index).removeprefix(_prefix(first)))
        return [os.path.join(self.root, shard, os.fsdecode(member))]

    def all_names(self, index: int) -> set[str]:
        """As in a folder, or SHARD.tar/MEMBER."""
        return {self.called(index), os.path.relpath(self.path(index), self.root)}


def build_image_index(root: str, val: ValSplit, cache: Path, note: Callable[[str], None],
                      columns: tuple[str, str] = ("auto", "label")) -> FolderIndex:
    """The index of a folder of classes, of tar files, or of Parquet files, which are imported. See kept_index().

    note: told how far a first scan is. columns: of Parquet files, --image-column and --label-column.
    """
    if is_parquet(root):
        root = imported(root, *columns, cache, note)
    by_split = files_by_split(os.path.abspath(root), ENDING)
    if not by_split and (os.path.isdir(root) or not root.endswith(ENDING)):
        return build_index(root, val, cache)
    root = os.path.abspath(root)
    every = [path for paths in by_split.values() for path in paths]
    if not every:
        raise UserError(f"--data {root}: there is no such file", Exit.NO_INPUT)
    place = root if os.path.isdir(root) else os.path.dirname(every[0])
    try:
        states = [[path, *stat_of(path)] for path in every + _file_of_classes(place)]
    except OSError as error:
        raise UserError(f"--data {root}: cannot read {error.filename}: {error.strerror}", Exit.IO) from None
    file = cache / f"shards-{digest_of(CACHE_VERSION, place, states, val.only)}.json"
    return kept_index(file, lambda: _read(place, root, by_split, val.only, note), val, root, ShardIndex)


def _read(root: str, data: str, by_split: Mapping[str, list[str]], only: str, note: Callable[[str], None]) -> Found:
    """For kept_index(). only: see ValSplit. Raises UserError (65, 66, 74)."""
    # the splits, and all tar files
    has_labels = any((shard.labels != b"").any() for shard in _open_all(by_split.get("test", []), note).values())
    unlabelled = ["test"] * ({"train", "test"} <= by_split.keys() and not has_labels and only != "test")  # as the hub's
    paths, notes = used_splits(data, {name: each for name, each in by_split.items() if name not in unlabelled}, only)
    notes += [f"{name} has no labels, and is not used" for name in unlabelled]
    first = next(iter(paths))
    opened = _open_all([path for each in paths.values() for path in each], note)

    # classes: those of the first split; or in classes.txt, of which a label is the name or the number
    words = {}  # by split: its labels, and the place of each sample's among them
    for split, each in paths.items():
        labels = np.concatenate([opened[path].labels for path in each])
        if not len(labels):
            raise UserError(f"--data {data}: {some(each)}: no images in it; a sample is KEY.jpg and KEY.cls",
                            Exit.BAD_DATA)
        for path in each:
            for place in np.flatnonzero(opened[path].labels == b"")[:1]:
                raise UserError(f"{path}: {shown(opened[path].names[place])} has no label; it needs KEY.cls, or"
                                ' KEY.json with {"label": ...}', Exit.BAD_DATA)
        words[split] = np.unique(labels, return_inverse=True, return_counts=True)
    labels_of_first = [label.decode() for label in words[first][0].tolist()]
    named = _named_classes(root, data)
    classes = named or sort_classes(labels_of_first)
    number_of = {name: number for number, name in enumerate(classes) if not (named and name.isdecimal())} | {
        str(number): number for number in range(len(named))}  # with classes.txt, what looks like a number is one
    if len(classes) == 1 and not only:
        raise UserError(f"--data {data}: there is only one class, {classes[0]}; add another", Exit.BAD_DATA)
    require_classes(words[first][2], f"--data {data}: {first}", "a label is a class")

    # each split, sorted
    splits, digest = {}, hashlib.sha256()
    for split in sorted(words):
        in_words, inverse, _ = words[split]
        if unknown := [word.decode() for word in in_words.tolist() if word.decode() not in number_of]:
            raise UserError(f"--data {data}: {split} has the label {some(unknown)}, which {first} (or {CLASSES}) lacks"
                            f"{hint_at(unknown[0], number_of)}; correct one of them", Exit.BAD_DATA)
        labels = np.array([number_of[word.decode()] for word in in_words.tolist()], np.int32)[inverse.ravel()]
        splits[split] = index = _sorted_index(root, data, paths[split], [opened[path] for path in paths[split]], labels)
        digest.update(index.names)
        digest.update(np.ascontiguousarray(index.spans[:, 1]))
        if not _are_named_by_class(index, classes):
            digest.update("\0".join(classes).encode() + index.labels.tobytes())
    notes += lacking(classes, splits[first].labels, first)
    if num_others := sum(int(shard.others[0]) for shard in opened.values()):
        notes.append(f"skipped {counted(num_others, 'member')} of the tar files, neither images nor their labels")
    about = {"root": root, "classes": classes, "fingerprint": digest.hexdigest(), "notes": notes, "columns": ["image"],
             "directories": {}}
    return about, {split: splits[split] for split in paths if split in splits}, None


def _open_all(paths: list[str], note: Callable[[str], None]) -> dict[str, Shard]:
    """The index of each tar file, by its path; scanned by all cores. Raises UserError."""
    num_samples, said = 0, SAID_EVERY
    # no multiprocessing.Pool: it ends its processes by SIGTERM, which the watchdog has blocked in them, too
    # gc.freeze: a scan makes many objects, and what a process has inherited holds no garbage to look for each time
    try:
        with ProcessPoolExecutor(min(available_cores(), len(paths) or 1), get_context("fork"), gc.freeze) as pool:
            for number, count in enumerate(pool.map(_num_samples, paths), 1):
                num_samples += count
                if num_samples >= said:
                    note(f"{num_samples} samples in {number} of {counted(len(paths), 'tar file')}")
                    said = num_samples + SAID_EVERY
    except BrokenProcessPool:
        raise UserError("a process that scanned tar files was killed, perhaps because the memory ended; start again",
                        Exit.IO) from None
    return {path: open_shard(path) for path in paths}


def _num_samples(path: str) -> int:
    return len(open_shard(path))


def _file_of_classes(root: str) -> list[str]:
    """The path of classes.txt, which lies beside the tar files, or above the folder of their split; [] without one."""
    above = [os.path.dirname(root)] * (os.path.basename(root) in SPLIT_NAMES)
    return [path for path in (os.path.join(place, CLASSES) for place in (root, *above)) if os.path.isfile(path)][:1]


def _named_classes(root: str, data: str) -> list[str]:
    """The names in classes.txt; [] without one. Raises UserError (65)."""
    names = []
    for file in _file_of_classes(root):
        try:
            names = read_classes(file)
        except UnicodeDecodeError:
            names = [""]
        if len({*names}) < len(names) or "" in names:
            raise UserError(f"--data {data}: {file} must have the name of a class on each line, in UTF-8, and none"
                            " twice", Exit.BAD_DATA)
    return names


def _sorted_index(root: str, data: str, paths: Sequence[str], shards: Sequence[Shard], labels: np.ndarray
                  ) -> ShardIndex:
    """The samples of a split as ImageFolder sorts them. Raises UserError (65) for one that is there twice."""
    keys = np.concatenate([shard.keys for shard in shards])                                  # [N]
    shard_of = np.repeat(np.arange(len(shards), dtype=np.int32), [*map(len, shards)])        # [N]
    order = np.lexsort((keys, labels))
    keys, labels, shard_of = keys[order], labels[order], shard_of[order]
    twice = np.flatnonzero((keys[1:] == keys[:-1]) & (labels[1:] == labels[:-1]))[:1]
    for place in twice.tolist():
        raise UserError(f"--data {data}: {os.fsdecode(_name(keys[place]))!a} is in"
                        f" {some(paths[shard_of[place + side]] for side in (0, 1))}; a KEY must be one sample",
                        Exit.BAD_DATA)
    relative = [os.fsencode(os.path.relpath(path, root)) for path in paths]
    prefix = _prefix(os.fsdecode(relative[0]))
    index = ImageIndex.of(root, [prefix + _name(key) for key in keys.tolist()], labels)
    return ShardIndex(root, index.names, index.spans, labels, shards=np.array(relative, np.bytes_), shard_of=shard_of)


def _are_named_by_class(index: ShardIndex, classes: Sequence[str]) -> bool:
    """Whether each name says the class, as in a folder: then the fingerprint is that of a folder."""
    begin = len(_prefix(os.fsdecode(index.shards[0])))

    @cache
    def is_class(folder: bytes, label: int) -> bool:
        return plain(os.fsdecode(folder)) == classes[label]

    return all(is_class(index.name(number)[begin:].partition(b"/")[0], label)
               for number, label in enumerate(index.labels.tolist()))


def _name(key: bytes) -> bytes:
    """See Shard.keys."""
    return key.replace(b"\0", b"/").removeprefix(b"/")


def _prefix(shard: str) -> bytes:
    """With what the names of the samples in a tar file begin: its folder, a split's."""
    folder = os.path.dirname(shard)
    return os.fsencode(folder) + b"/" if folder else b""
