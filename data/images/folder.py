"""Images of an index as a data set: decoded, augmented; a grey placeholder replaces an image that cannot be read.

    train_set = ImageFolder(index.splits["train"], transform, seed=0)     # index: data/images/index.py
    train_set[epoch, index]                                               # Sample(image, label, bad)

Legend: H, W height and width in pixels.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from data.batch import sample_digest
from data.images.augment import Transform
from data.images.decode import EncodedImage, UnreadableImage
from data.images.index import ImageIndex
from data.images.scan import images_in
from data.labels import label_at
from data.shards.shard import ENDING, is_member, open_shard
from data.tables.table import TABLES, Columns, read_rows, require_columns
from utils.errors import Exit, UserError
from utils.numerics.seed import derive_seed, seeded
from utils.rundir.digests import UNKNOWN

MID_GREY = 128  # of the stand-in for an unreadable image


class Sample(NamedTuple):
    """One image as the model's input, before scaling."""

    image: Tensor  # [H, W, 3] uint8; [H, W, 3 * I] of I images
    label: int | np.ndarray  # a class, or a row of labels or numbers
    # "path: reason" where the image could not be read, "" where it is left out; `image` is a grey stand-in then
    bad: str | None
    digest: bytes  # see data.batch.sample_digest


class ImageFolder(Dataset):
    """A SampleSet. Augmentation is a pure function of (seed, epoch, index). Never raises on a bad image."""

    def __init__(self, index: ImageIndex, transform: Transform, seed: int,
                 read: Callable[[str], EncodedImage] = EncodedImage):
        self.index, self.transform, self.seed, self._read = index, transform, seed, read

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, item: tuple[int, int]) -> Sample:
        epoch, index = map(int, item)
        label, images, files, first = label_at(self.index.labels, index), [], [], None
        if index in self.index.left_out:
            return self._stand_in(label * 0, "")
        for path in self.index.paths(index):
            try:
                encoded = self._read(path)
                first = first or encoded
                files.append(encoded.sha256())
                with seeded(derive_seed(self.seed, "augmentation", epoch, index)):  # the same crop of each image
                    images.append(self.transform(encoded.stretched(first.height, first.width)))
            except UnreadableImage as error:
                return self._stand_in(label, f"{path}: {error}")
        image = images[0] if len(images) == 1 else torch.cat(images, dim=2)
        return Sample(image, label, None, sample_digest(self.index.name(index), label, files))

    def _stand_in(self, label: int | np.ndarray, bad: str) -> Sample:
        shape = (self.transform.size, self.transform.size, 3 * self.index.num_images)
        return Sample(torch.full(shape, MID_GREY, dtype=torch.uint8), label, bad, UNKNOWN)

    def name(self, index: int) -> str:
        """What a sample is called in messages: its path, or its paths."""
        return ",".join(self.index.paths(index))

    def digest(self, index: int) -> bytes:
        """Reads its files, and decodes as little as it can."""
        with suppress(UnreadableImage):
            files = [self._read(path).sha256() for path in self.index.paths(index) if index not in self.index.left_out]
            if files:
                return sample_digest(self.index.name(index), label_at(self.index.labels, index), files)
        return UNKNOWN


def images_of(name: str) -> list[str]:
    """The images in a folder or in a tar file; else the file alone. Raises UserError (65, 66)."""
    if name.endswith(ENDING) and os.path.isfile(name):
        return [f"{name}/{os.fsdecode(member)}" for member in open_shard(name).names.tolist()]
    return images_in(name) if os.path.isdir(name) else [name]


def list_images(inputs: Sequence[str], num_images: int = 1, columns: Sequence[str] = ("image",)) -> list[str]:
    """Files as given; for a folder, the images in it and below, sorted by path; A,B for several images of a sample.

    Of a table, those in its columns, in the order of its rows.
    Raises UserError: 64 for another number of images, 65 for a table without the columns, 66 if a file is missing.
    """
    paths = []
    for name in inputs:
        if name.endswith(TABLES) and os.path.isfile(name):
            read = Columns(tuple(columns), ())
            require_columns(Path(name), read.texts, "give a table with the columns of training")
            paths += [",".join(os.path.join(os.path.dirname(name), file.strip()) for file in row.texts)
                      for row in read_rows(Path(name), read, keep_blank=True)]
            continue
        files = name.split(",") if num_images > 1 else [name]
        if len(files) != num_images:
            raise UserError(f"{name}: the model takes {num_images} images of each sample; give their paths with"
                            " commas between them and no spaces, or a table")
        is_there, wanted = (os.path.isfile, "file") if num_images > 1 else (os.path.exists, "file or folder")
        if missing := [file for file in files if not (is_there(file) or is_member(file))]:
            raise UserError(f"there is no {wanted} {missing[0]}", Exit.NO_INPUT)
        paths += images_of(name)
    return paths
