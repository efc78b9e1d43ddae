"""The index of images: classes, and the path and label of every image. Made once, kept in the cache.

scan.py and table.py make it; all processes map the arrays in the cache.
Legend: N images.

Tests: tests/unit/data/images/test_folder.py
"""

import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from data.splits import ValSplit, hold_out
from utils.array_folder import Kept, digest_of, kept_arrays, open_arrays
from utils.files import one_at_a_time, read_checked, sync, write_checked

CACHE_VERSION = 5
EXTENSIONS = (".jpg", ".jpeg", ".jfif", ".jpe", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp", ".gif")
ARRAYS = ("names", "spans", "labels")


@dataclass(frozen=True, eq=False)
class ImageIndex:
    """Paths and labels of a split in three arrays, which processes share: no Python object per file."""

    per_sample: ClassVar = ("spans", "labels")
    arrays: ClassVar = ARRAYS  # that the cache keeps

    root: str
    names: np.ndarray  # uint8: paths relative to root, as bytes, joined; may hold more paths than this split has
    spans: np.ndarray  # [N, 2] int64: begin and end of each path in `names`; of several, which are joined by NUL
    labels: np.ndarray  # [N] int32 classes; or rows, see data.labels.LabelReader
    num_images: int = 1  # of a sample
    left_out: frozenset[int] = frozenset()  # indices, see data/left_out.py

    @classmethod
    def of(cls, root: str, samples: Sequence[bytes], labels: np.ndarray, num_images: int = 1) -> "ImageIndex":
        """samples: [N], the path of each, relative to root; or its paths, joined by NUL, which none can hold."""
        ends = np.cumsum([0, *map(len, samples)], dtype=np.int64)
        spans = np.stack([ends[:-1], ends[1:]], axis=1)
        return cls(root, np.frombuffer(b"".join(samples), np.uint8), spans, labels, num_images)

    def __len__(self) -> int:
        return len(self.spans)

    def name(self, index: int) -> bytes:
        """What stands in `names` of sample `index`, 0 <= index < N."""
        begin, end = self.spans[index]
        return self.names[begin:end].tobytes()

    def paths(self, index: int) -> list[str]:
        """Absolute paths of its images."""
        joined = os.fsdecode(self.name(index))
        return [os.path.normpath(os.path.join(self.root, path)) for path in joined.split("\0")]

    def path(self, index: int) -> str:
        """That of the first of them."""
        return self.paths(index)[0]

    def called(self, index: int) -> str:
        """See data.left_out.Named: its paths, relative to root."""
        return ",".join(map(os.path.normpath, os.fsdecode(self.name(index)).split("\0")))

    def find(self, lines: Iterable[str]) -> dict[str, list[int]]:
        """See data.left_out.Named: a path, or all of a sample. An absolute path may end at ": ", as in bad_samples.txt.
        """
        lines_of, indices_of = defaultdict(list), defaultdict(list)
        for line in lines:
            for name in (line.partition(": ")[0], line) if os.path.isabs(line) else (line,):
                paths = name.split(",") if self.num_images > 1 else [name]
                wanted = ",".join(os.path.relpath(os.path.join(self.root, path), self.root) for path in paths)
                lines_of[wanted].append(line)
        for index in range(len(self) if lines_of else 0):
            for line in {line for name in self.all_names(index) & lines_of.keys() for line in lines_of[name]}:
                indices_of[line].append(index)
        return indices_of

    def all_names(self, index: int) -> set[str]:
        """What a sample may be called: its paths together, or each of them; relative to root."""
        called = self.called(index)
        return {called, *(called.split(",") if self.num_images > 1 else ())}


def without_left_out(index: ImageIndex) -> ImageIndex:
    """Those that something may be learnt from."""
    left_out = sorted(index.left_out)
    return replace(index, **{name: np.delete(getattr(index, name), left_out, axis=0) for name in index.per_sample},
                   left_out=frozenset()) if left_out else index


@dataclass(frozen=True, eq=False)
class FolderIndex:
    """What a data folder holds. `splits` has train, val and, if its folder is not used as val, test."""

    classes: tuple[str, ...]  # in label order, of every split
    splits: dict[str, ImageIndex]
    fingerprint: str  # sha256 over the relative paths in all splits' folders; held-out images do not change it
    notes: tuple[str, ...]  # for the user, a line each
    columns: tuple[str, ...]  # of tables: those with the images; else "image"

    def labelled(self, classes: Sequence[str]) -> "FolderIndex":
        """The same samples, with labels that count `classes`, among which are all of its own."""
        label_of = {name: label for label, name in enumerate(classes)}
        new = np.array([label_of[name] for name in self.classes], np.int32)
        splits = {name: replace(split, labels=new[split.labels]) for name, split in self.splits.items()}
        return replace(self, classes=tuple(classes), splits=splits)


# Of the data: the fields of FolderIndex (without splits), the root of its paths, and {directory: st_mtime_ns}; the
# splits that are there; and the group of each sample of train, if there are groups.
Found = tuple[dict[str, Any], dict[str, ImageIndex], np.ndarray | None]


def kept_index(
    file: Path, read: Callable[[], Found], val: ValSplit, data: str, kind: type[ImageIndex] = ImageIndex
) -> FolderIndex:
    """What read() finds, from the cache if no directory changed since; val is held out of train if the data lack it.

    One process per node should come first, so that the others find its cache; any number at once is safe.
    file: of the cache; its name holds all else that decides what is found. It names the folder with the arrays, whose
    own name is that of its content: copies of the data share it, and who has mapped an older one keeps it.
    data: the value of --data, for messages. kind: of a split. Raises UserError (64, 65, 66, 74).
    """
    # the index of what is there
    if (found := _opened(file)) is None:
        with one_at_a_time(file):
            found = _opened(file) or _kept(file, *read())
    about, arrays = found
    splits = {split: kind(about["root"], num_images=len(about["columns"]),
                          **{name: arrays[f"{split}.{name}"] for name in kind.arrays}) for split in about["splits"]}
    index = FolderIndex(tuple(about["classes"]), splits, about["fingerprint"], tuple(about["notes"]),
                        tuple(about["columns"]))

    # val
    if {"val", val.only} & splits.keys():  # what alone is evaluated stands for train, too
        return replace(index, splits={"train": next(iter(splits.values()))} | splits)
    splits, note = hold_out(splits, val, data, val.folder(file.with_name(about["folder"])), arrays.get("groups"))
    return replace(index, splits=splits, notes=(*index.notes, note))


def _opened(file: Path) -> Kept | None:
    """What is kept; None if nothing is, it is damaged, or a directory has changed."""
    with suppress(OSError, ValueError):
        about = read_checked(file)
        found = open_arrays(file.with_name(about["folder"]))
        if found and all(os.stat(path).st_mtime_ns == time for path, time in about["directories"].items()):
            return about, found[1]
    return None


def _kept(file: Path, about: dict[str, Any], splits: dict[str, ImageIndex], groups: np.ndarray | None) -> Kept:
    arrays = {f"{split}.{name}": getattr(index, name) for split, index in splits.items() for name in index.arrays}
    arrays |= {} if groups is None else {"groups": groups}
    about["splits"] = list(splits)
    content = {name: hashlib.sha256(array).hexdigest() for name, array in arrays.items()}
    about["folder"] = f"images-{digest_of(CACHE_VERSION, content)}"
    arrays = kept_arrays(file.with_name(about["folder"]), lambda: arrays)
    with suppress(OSError):  # without a cache every process reads for itself
        write_checked(file, about)
        sync(file.parent)
    return about, arrays
