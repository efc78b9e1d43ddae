"""A folder of images as a data set: ROOT/train/CLASS/**, ROOT/val/CLASS/**, or ROOT/CLASS/**.

    folders = build_index("photos", val_fraction=0.1, seed=0, cache=Path("~/.cache/lockstep"))
    train_set = ImageFolder(folders.splits["train"], transform, seed=0)
    train_set[epoch, i]                      # Sample(image, label, bad)

The tree is scanned once; the result is kept in the cache, from where all processes map it. Classes and order are those
of torchvision.datasets.ImageFolder.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from data.augment import Transform
from data.image_decode import EncodedImage, UnreadableImage
from data.splits import SPLIT_NAMES, VAL_NAMES, hold_out, require_classes
from utils.array_folder import digest_of, kept_arrays, one_at_a_time, open_arrays
from utils.errors import Exit, UserError, some
from utils.files import read_checked, sync, write_checked
from utils.numerics.seed import derive_seed, seeded

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp", ".gif")
CACHE_VERSION = 2
ARRAYS = ("names", "spans", "labels")
MID_GREY = 128  # of the stand-in for an unreadable image


@dataclass(frozen=True, eq=False)
class ImageIndex:
    """Paths and labels of a split in three arrays, which processes share: no Python object per file."""

    per_sample: ClassVar = ("spans", "labels")

    root: str
    names: np.ndarray  # uint8: paths relative to root, as bytes, joined; there may be more than those of this split
    spans: np.ndarray  # [N, 2] int64: begin and end of each in `names`
    labels: np.ndarray  # [N] int32

    def __len__(self) -> int:
        return len(self.spans)

    def path(self, i: int) -> str:
        """Absolute path of image i, 0 <= i < N."""
        begin, end = self.spans[i]
        return os.path.join(self.root, os.fsdecode(self.names[begin:end].tobytes()))


@dataclass(frozen=True, eq=False)
class FolderIndex:
    """What a data folder holds. `splits` has train, val and, where it is another folder than val's, test."""

    classes: tuple[str, ...]  # in label order, of every split
    splits: dict[str, ImageIndex]
    fingerprint: str  # sha256 over the relative paths of all splits' folders; held-out images do not change it
    notes: tuple[str, ...]  # for the user, a line each


class Sample(NamedTuple):
    """One image as the model's input, before scaling."""

    image: Tensor  # [H, W, 3] uint8
    label: int
    bad: str | None  # "path: reason" where the image could not be read; `image` is a grey stand-in then


class ImageFolder(Dataset):
    """Items are asked for as (epoch, i): augmentation is a pure function of (seed, epoch, i). Never raises on a bad image."""

    def __init__(self, index: ImageIndex, transform: Transform, seed: int):
        self.index, self.transform, self.seed = index, transform, seed

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, item: tuple[int, int]) -> Sample:
        epoch, i = map(int, item)
        path, label = self.index.path(i), int(self.index.labels[i])
        try:
            with seeded(derive_seed(self.seed, "augmentation", epoch, i)):
                return Sample(self.transform(EncodedImage(path)), label, None)
        except UnreadableImage as error:
            side = self.transform.size
            return Sample(torch.full((side, side, 3), MID_GREY, dtype=torch.uint8), label, f"{path}: {error}")

    def name(self, i: int) -> str:
        """What sample i is called in messages."""
        return self.index.path(i)


def build_index(root: str, val_fraction: float, seed: int, cache: Path) -> FolderIndex:
    """The index of a data folder, from the cache if no directory of it has changed since.

    val_fraction: share of each class held out of train where there is no folder for val. One process per node should
    come first, so that the others find its cache; any number at once is safe. Raises UserError (64, 65, 66, 74).
    """
    root = os.path.abspath(root)
    # Nodes with local data differ in this time, nodes that share the data do not (inodes may differ then, under FUSE).
    time = os.stat(root).st_mtime_ns if os.path.exists(root) else 0
    file = Path(cache) / f"images-{digest_of(CACHE_VERSION, root, time)}.json"
    found = _load(file, root)
    if found is None:
        with one_at_a_time(file):
            found = _load(file, root) or _scan(file, root)
    if "val" in found.splits:
        return found
    folder = file.with_name(f"{_name(found.classes, found.splits, found.fingerprint)}-val-{val_fraction}-{seed}")
    splits, note = hold_out(found.splits, root, val_fraction, seed, folder)
    return replace(found, splits=splits, notes=(*found.notes, note))


def list_images(inputs: Sequence[str]) -> list[str]:
    """Files as they are given; for a folder, the images in it and below, sorted by path. Raises UserError (66)."""
    paths = []
    for name in inputs:
        if not os.path.exists(name):
            raise UserError(f"there is no file or folder {name}", Exit.NO_INPUT)
        paths += _images_in(name) if os.path.isdir(name) else [name]
    return paths


def _images_in(root: str) -> list[str]:
    images, others, seen = [], [], set()
    for folder, folders, files in os.walk(root, onerror=_raise, followlinks=True):
        stat = os.stat(folder)
        is_loop = (stat.st_dev, stat.st_ino) in seen  # by links
        seen.add((stat.st_dev, stat.st_ino))
        folders[:] = [] if is_loop else sorted(name for name in folders if not name.startswith((".", "__MACOSX")))
        for name in [] if is_loop else files:
            is_image = name.lower().endswith(EXTENSIONS) and not name.startswith(".")
            (images if is_image else others).append(os.path.join(folder, name))
    if not images:
        raise UserError(f"{root} holds no images ({' '.join(EXTENSIONS)}); it holds {some(sorted(others))}", Exit.NO_INPUT)
    return sorted(images)


class _Scan:
    """One walk over the tree."""

    def __init__(self, root: str):
        self.root = root
        self.directories: dict[str, int] = {}  # visited -> st_mtime_ns
        self.strays: list[str] = []

    def read(self) -> FolderIndex:
        """Index of all splits. Raises UserError."""
        root = self.root
        if not os.path.exists(root):
            raise UserError(f"--data {root}: there is no such folder", Exit.NO_INPUT)
        if not os.path.isdir(root):
            raise UserError(f"--data {root}: is a file; give the folder that holds train/CLASS/* (or CLASS/*)", Exit.BAD_DATA)
        try:
            return self._read()
        except OSError as error:
            raise UserError(f"--data {root}: cannot list {error.filename}: {error.strerror}", Exit.IO) from None

    def _read(self) -> FolderIndex:
        folders, _ = self._list(self.root)
        notes = []
        where = {"train": "train"}
        if "train" in folders:
            if val := next((name for name in VAL_NAMES if name in folders), None):
                where["val"] = val
                notes += [f"validation uses {val}/, for there is no val/"] if val != "val" else []
            if "test" in folders and val != "test":
                where["test"] = "test"
        elif similar := [name for name in folders if name.lower() in SPLIT_NAMES]:
            raise UserError(f"--data {self.root}: has {some(similar)} but no train/; the training folder must be named train",
                            Exit.BAD_DATA)
        else:
            where = {"train": ""}
            notes += ["there is no train/, so the classes are the folders directly in --data"] if folders else []
        class_names, splits = {}, {}
        for split, folder in where.items():
            class_names[split], splits[split] = self._split(folder, optional=split == "test")
        classes = class_names["train"]
        if len(classes) == 1:
            raise UserError(f"--data {self.root}: there is only one class, {classes[0]}; a classifier needs two or more", Exit.BAD_DATA)
        require_classes(np.bincount(splits["train"].labels), f"--data {self.root}: {_shown(where['train'])}",
                        "put all images of a class into one folder")
        label_of = {name: label for label, name in enumerate(classes)}
        for split in [split for split in splits if split != "train"]:
            if not class_names[split]:
                notes.append(f"{where[split]}/ holds no class folders and is left out")
                del splits[split]
                continue
            self._compare(where["train"], classes, where[split], class_names[split], subset=split == "test")
            labels = np.array([label_of[name] for name in class_names[split]], dtype=np.int32)[splits[split].labels]
            splits[split] = replace(splits[split], labels=labels)
        if self.strays:
            notes.append(f"passed over {len(self.strays)} that are no images in class folders ({self.strays[0]}, for one)")
        digest = hashlib.sha256()
        for split in sorted(splits):
            digest.update(splits[split].names)
            digest.update(np.ascontiguousarray(splits[split].spans[:, 1]))
        return FolderIndex(tuple(classes), splits, digest.hexdigest(), tuple(notes))

    def _split(self, folder: str, optional: bool) -> tuple[list[str], ImageIndex]:
        """Class names and images of ROOT/folder; labels count its own classes. None at all is an error unless `optional`."""
        classes, files = self._list(os.path.join(self.root, folder))
        if not classes and not optional:
            found = f"only {some(files)}" if files else "nothing"
            raise UserError(f"--data {self.root}: {_shown(folder)} holds no class folders, {found}; images belong into one folder per"
                            f" class, {os.path.join(folder, 'CLASS')}/*", Exit.BAD_DATA)
        self.strays += [os.path.join(folder, name) for name in files] if classes else []
        names, lengths, counts = [], [], []
        for class_name in classes:
            found = sorted(self._walk(os.path.join(folder, class_name), ()))
            encoded = [os.fsencode(f"{place}/{name}") for place, images in found for name in images]
            if not encoded:
                raise UserError(f"--data {self.root}: the class folder {os.path.join(folder, class_name)} holds no images"
                                f" ({' '.join(EXTENSIONS)}); remove it or fill it", Exit.BAD_DATA)
            names.append(b"".join(encoded))
            lengths.append(np.fromiter(map(len, encoded), np.int64, len(encoded)))
            counts.append(len(encoded))
        ends = np.cumsum(np.concatenate([np.zeros(1, np.int64), *lengths]))
        return classes, ImageIndex(
            self.root, np.frombuffer(b"".join(names), np.uint8), np.stack([ends[:-1], ends[1:]], axis=1),
            np.repeat(np.arange(len(classes), dtype=np.int32), counts))

    def _walk(self, folder: str, parents: tuple) -> Iterator[tuple[str, list[str]]]:
        """(folder, its images) for ROOT/folder and all below; links that lead to a folder above are not followed."""
        path = os.path.join(self.root, folder)
        stat = os.stat(path)
        if (identity := (stat.st_dev, stat.st_ino)) in parents:
            return
        folders, files = self._list(path)
        yield folder, [name for name in files if name.lower().endswith(EXTENSIONS)]
        self.strays += [os.path.join(folder, name) for name in files if not name.lower().endswith(EXTENSIONS)]
        for name in folders:
            yield from self._walk(os.path.join(folder, name), (*parents, identity))

    def _list(self, path: str) -> tuple[list[str], list[str]]:
        """Names of the folders and the files in `path`, sorted, hidden ones left out."""
        self.directories[path] = os.stat(path).st_mtime_ns  # before the listing: what comes later must make it outdated
        with os.scandir(path) as entries:
            seen = sorted((entry.name, entry.is_dir()) for entry in entries if not entry.name.startswith((".", "__MACOSX")))
        return [name for name, is_folder in seen if is_folder], [name for name, is_folder in seen if not is_folder]

    def _compare(self, train: str, train_classes: list[str], other: str, other_classes: list[str], subset: bool) -> None:
        """All splits have the classes of train; test may lack some. Raises UserError."""
        extra = sorted(set(other_classes) - set(train_classes))
        lacking = [] if subset else sorted(set(train_classes) - set(other_classes))
        if not extra and not lacking:
            return
        found = [f"{other}/ has {some(extra)}, which {train}/ lacks"] if extra else []
        found += [f"{train}/ has {some(lacking)}, which {other}/ lacks"] if lacking else []
        same = {name.casefold() for name in extra} & {name.casefold() for name in set(train_classes) - set(other_classes)}
        hint = "rename those that differ only in case" if same else "every split needs the same class folders: move, rename or remove some"
        raise UserError(f"--data {self.root}: {'; '.join(found)}; {hint}", Exit.BAD_DATA)


def _scan(file: Path, root: str) -> FolderIndex:
    """The index of a tree that is read anew. `file` names its arrays, and is valid until a directory changes."""
    scan = _Scan(root)
    found = scan.read()
    arrays = kept_arrays(file.with_name(_name(found.classes, found.splits, found.fingerprint)), lambda: {
        f"{split}.{name}": getattr(index, name) for split, index in found.splits.items() for name in ARRAYS})
    with suppress(OSError):  # every process scans for itself then
        write_checked(file, [found.classes, list(found.splits), found.fingerprint, found.notes, scan.directories])
        sync(file.parent)
    return replace(found, splits=_splits(root, found.splits, arrays))


def _load(file: Path, root: str) -> FolderIndex | None:
    """The cached index; None if there is none, it is damaged, or a directory has changed."""
    with suppress(OSError, ValueError):
        classes, splits, fingerprint, notes, directories = read_checked(file)
        found = open_arrays(file.with_name(_name(classes, splits, fingerprint)))
        if found and all(os.stat(path).st_mtime_ns == time for path, time in directories.items()):
            return FolderIndex(tuple(classes), _splits(root, splits, found[1]), fingerprint, tuple(notes))
    return None


def _name(classes: Iterable[str], splits: Iterable[str], fingerprint: str) -> str:
    """Of the folder with the arrays: the same for these images wherever they are, so copies of the data share it."""
    return f"images-{digest_of(CACHE_VERSION, list(classes), list(splits), fingerprint)}"


def _splits(root: str, splits: Iterable[str], arrays: Mapping[str, np.ndarray]) -> dict[str, ImageIndex]:
    return {split: ImageIndex(root, *(arrays[f"{split}.{name}"] for name in ARRAYS)) for split in splits}


def _shown(folder: str) -> str:
    return f"{folder}/" if folder else "it"


def _raise(error: OSError) -> NoReturn:
    raise error
