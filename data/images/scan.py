"""What a folder of images holds: one walk over the tree.

    index = build_index("photos", ValSplit(fraction=0.1, seed=0), cache=Path("~/.cache/lockstep"))
    index.splits["train"].path(0)

A folder is ROOT/train/CLASS/**, ROOT/val/CLASS/**, or ROOT/CLASS/**. Classes and order are those of
torchvision.datasets.ImageFolder.

Tests: tests/unit/data/images/test_folder.py
"""

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import numpy as np

from data.images.index import CACHE_VERSION, EXTENSIONS, FolderIndex, Found, ImageIndex, kept_index
from data.splits import SPLIT_NAMES, ClassNames, ValSplit, hint_at, require_classes, require_split, splits_in
from utils.array_folder import digest_of
from utils.errors import Exit, UserError, counted, some
from utils.files import is_users

NOT_READ = {".avif", ".dcm", ".dng", ".heic", ".heif", ".jp2", ".jxl", ".svg"}  # pictures, too


def build_index(root: str, val: ValSplit, cache: Path) -> FolderIndex:
    """The index of a data folder. See kept_index()."""
    root = os.path.abspath(root)
    # The time differs between nodes with local data, not between nodes that share it (inodes may differ then, on FUSE).
    time = os.stat(root).st_mtime_ns if os.path.exists(root) else 0
    file = Path(cache) / f"images-{digest_of(CACHE_VERSION, root, time, val.only)}.json"
    return kept_index(file, _Scan(root, val.only).read, val, root)


def images_in(root: str) -> list[str]:
    """The images in a folder and below, sorted by path. Raises UserError (66) if there is none."""
    scan = _Scan(root)
    images = [os.path.join(root, folder, name) for folder, names in scan.walk("", ()) for name in names]
    if not images:
        raise UserError(f"{root} has {some(sorted(scan.strays))}, no images ({' '.join(EXTENSIONS)})", Exit.NO_INPUT)
    return sorted(images)


class _Scan:
    """One walk over the tree."""

    def __init__(self, root: str, only: str = ""):
        self.root, self._names, self._only = root, ClassNames(), only
        self.directories: dict[str, int] = {}  # visited: st_mtime_ns
        self.strays: list[str] = []  # files that are not images, or not in a class folder
        self.runs: set[str] = set()  # folders that are runs, or hold one
        self.hidden: set[str] = set()  # folders and images that are not the user's, such as thumbnails
        self.notes: list[str] = []

    def read(self) -> Found:
        """For kept_index(). Raises UserError."""
        root = self.root
        if not os.path.exists(root):
            raise UserError(f"--data {root}: there is no such folder", Exit.NO_INPUT)
        if not os.path.isdir(root):
            raise UserError(f"--data {root}: is a file and no table (.csv, .tsv, .jsonl); give a table with the columns"
                            f" image and label, or the folder of train/CLASS/*{_task_for([root])}", Exit.BAD_DATA)
        try:
            return self._read()
        except OSError as error:
            raise UserError(f"--data {root}: cannot list {error.filename}: {error.strerror}", Exit.IO) from None

    def _read(self) -> Found:
        # read every split
        folders = self._folders_of_splits()
        first = next(iter(folders))
        read = {split: self._read_split(split, folder) for split, folder in folders.items()}

        # classes are those of train, or of what alone is evaluated
        classes = list(read[first])
        if len(classes) == 1 and not self._only:
            raise UserError(f"--data {self.root}: there is only one class, {classes[0]}; add another", Exit.BAD_DATA)
        require_classes(np.array([*map(len, read[first].values())]), f"--data {self.root}: {_shown(folders[first])}",
                        "put all images of a class into one folder")

        # labels
        label_of, splits = {name: label for label, name in enumerate(classes)}, {}
        for split, images_of in read.items():
            if not any(images_of.values()):
                self.notes.append(f"{folders[split]}/ has no images in class folders and is not used")
                continue
            if extra := sorted(set(images_of) - set(classes)):
                raise UserError(f"--data {self.root}: {folders[split]}/ has {some(extra)}, which train/ lacks"
                                f"{hint_at(extra[0], classes)}; move, rename or remove some", Exit.BAD_DATA)
            labels = np.array([label_of[name] for name, images in images_of.items() for _ in images], np.int32)
            splits[split] = ImageIndex.of(self.root, [*chain.from_iterable(images_of.values())], labels)

        # notes, fingerprint
        self.notes += self._names.notes
        if self.strays:
            count = counted(len(self.strays), "file")
            endings = Counter(os.path.splitext(name)[1].lower() or "no ending" for name in self.strays)
            kinds = ", ".join(f"{number} {ending}" for ending, number in endings.most_common(3))
            hint = "; pictures of such kinds are not read: convert them to PNG or JPEG"
            self.notes.append(f"skipped {count}, not images in class folders, such as {self.strays[0]} ({kinds})"
                              + hint * (not NOT_READ.isdisjoint(endings)))
        if self.hidden:
            self.notes.append(f"skipped {len(self.hidden)} folders and files of a system or program, such as"
                              f" {min(self.hidden)}")
        digest = hashlib.sha256()
        for split in sorted(splits):
            digest.update(splits[split].names)
            digest.update(np.ascontiguousarray(splits[split].spans[:, 1]))
        about = {"root": self.root, "classes": classes, "fingerprint": digest.hexdigest(), "notes": self.notes,
                 "columns": ["image"], "directories": self.directories}
        return about, splits, None

    def _folders_of_splits(self) -> dict[str, str]:
        """{split: its folder, relative to the root}. Raises UserError."""
        folders, _ = self._list(self.root)
        if "train" not in folders:
            alone = splits_in(folders).get("val") if self._only == "val" else self._only
            if alone in folders:
                self.notes.append(f"there is no train/: the images of {alone}/ are evaluated")
                return {self._only: alone}
            if similar := [name for name in folders if name.lower() in SPLIT_NAMES]:
                require_split(self._only or similar[0], similar, self.root)
                raise UserError(f"--data {self.root}: has {some(similar)}, but no train/; name the training folder so",
                                Exit.BAD_DATA)
            if folders:
                whole = ": all of their images are evaluated, and none is held out" if self._only else ""
                self.notes.append(f"there is no train/, so the classes are the folders directly in --data{whole}")
            return {self._only or "train": ""}
        folder_of = splits_in(folders)
        if (val := folder_of.get("val", "val")) != "val":
            self.notes.append(f"there is no val/, so {val}/ is used for validation")
        return folder_of

    def _read_split(self, split: str, folder: str) -> dict[str, list[bytes]]:
        """{class: its images} of ROOT/folder. Only a test that is not evaluated may have no images."""
        # classes
        folders, files = self._list(os.path.join(self.root, folder))
        named: dict[str, list[str]] = {}
        for name in folders:
            named.setdefault(self._names.name_of(name) or name, []).append(name)
        self.strays += [os.path.join(folder, name) for name in files] if named else []

        # images
        images_of = {}
        for class_name in sorted(named):
            walked = [at for name in named[class_name] for at in sorted(self.walk(os.path.join(folder, name), ()))]
            images_of[class_name] = [os.fsencode(f"{place}/{name}") for place, images in walked for name in images]
            place = os.path.join(folder, class_name)
            if not images_of[class_name] and f"{place}/" in self.runs:
                del images_of[class_name]
                self.notes.append(f"{place}/ holds runs of this program, and is no class; a --run-dir outside of --data"
                                  " is better")
            elif not images_of[class_name] and split == "train":
                has = [os.path.relpath(name, place) for name in self.strays if name.startswith(f"{place}/")]
                more = (f", but {some(has)}; convert them, remove or fill the folder, or, if they are the data, give"
                        f" --data {self.root}/{place}") if has else "; remove it or fill it"
                raise UserError(f"--data {self.root}: the class folder {place} holds no images"
                                f" ({' '.join(EXTENSIONS)}){more}", Exit.BAD_DATA)
        if not any(images_of.values()) and (split != "test" or self._only == split):
            instead = f", but only {some(files)}" if files else "" if named else ": it is empty"
            raise UserError(f"--data {self.root}: {_shown(folder)} holds no class folders with images{instead}; put"
                            f" them into {os.path.join(folder, 'CLASS')}/*{_task_for(files)}", Exit.BAD_DATA)
        return images_of

    def walk(self, folder: str, parents: tuple) -> Iterator[tuple[str, list[str]]]:
        """(folder, its images) for ROOT/folder and all below; links to a folder above are not followed."""
        path = os.path.join(self.root, folder)
        stat = os.stat(path)
        if (identity := (stat.st_dev, stat.st_ino)) in parents:
            return
        folders, files = self._list(path)
        yield folder, [name for name in files if name.lower().endswith(EXTENSIONS)]
        self.strays += [os.path.join(folder, name) for name in files if not name.lower().endswith(EXTENSIONS)]
        for name in folders:
            yield from self.walk(os.path.join(folder, name), (*parents, identity))

    def _list(self, path: str) -> tuple[list[str], list[str]]:
        """Names of the folders and of the files in `path`, sorted, without those that are not the user's."""
        self.directories[path] = os.stat(path).st_mtime_ns  # before listing, so that a later change outdates the index
        with os.scandir(path) as entries:
            every = sorted((entry.name, entry.is_dir()) for entry in entries)
        place = os.path.relpath(path, self.root)
        is_run = {(".lock", False), ("config.yaml", False)} <= {*every}
        if is_run and place != ".":  # it is no part of the data, and it changes
            parts = place.split("/")
            self.runs |= {f"{'/'.join(parts[:number])}/" for number in range(1, 1 + len(parts))}
            del self.directories[path]
            return [], []
        seen = [(name, is_folder) for name, is_folder in every if is_users(name)]
        self.hidden.update(os.path.relpath(os.path.join(path, name), self.root) for name, is_folder in every
                           if not is_users(name) and (is_folder or name.lower().endswith(EXTENSIONS)))
        return [name for name, is_folder in seen if is_folder], [name for name, is_folder in seen if not is_folder]


def _task_for(files: Iterable[str]) -> str:
    """The end of a message: the task that reads tables, if there are such files; else ""."""
    found = any(file.lower().endswith((".csv", ".tsv", ".jsonl", ".txt")) for file in files)
    return "; if these are texts, give --task text-classification or masked-lm" if found else ""


def _shown(folder: str) -> str:
    return f"{folder}/" if folder else "it"
