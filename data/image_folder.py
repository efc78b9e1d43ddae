"""Images of an index as a data set: decoded, augmented; a grey placeholder replaces an image that cannot be read.

    train_set = ImageFolder(index.splits["train"], transform, seed=0)     # index: data/image_index.py
    train_set[epoch, index]                                               # Sample(image, label, bad)

Legend: H, W height and width in pixels.
"""

import os
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from data.augment import Transform
from data.image_decode import EncodedImage, UnreadableImage
from data.image_index import ImageIndex, images_in
from utils.errors import Exit, UserError
from utils.numerics.seed import derive_seed, seeded

MID_GREY = 128  # of the stand-in for an unreadable image


class Sample(NamedTuple):
    """One image as the model's input, before scaling."""

    image: Tensor  # [H, W, 3] uint8
    label: int
    bad: str | None  # "path: reason" where the image could not be read; `image` is a grey stand-in then


class ImageFolder(Dataset):
    """A SampleSet. Augmentation is a pure function of (seed, epoch, index). Never raises on a bad image."""

    def __init__(self, index: ImageIndex, transform: Transform, seed: int):
        self.index, self.transform, self.seed = index, transform, seed

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, item: tuple[int, int]) -> Sample:
        epoch, index = map(int, item)
        path, label = self.index.path(index), int(self.index.labels[index])
        try:
            with seeded(derive_seed(self.seed, "augmentation", epoch, index)):
                return Sample(self.transform(EncodedImage(path)), label, None)
        except UnreadableImage as error:
            side = self.transform.size
            return Sample(torch.full((side, side, 3), MID_GREY, dtype=torch.uint8), label, f"{path}: {error}")

    def name(self, index: int) -> str:
        """What a sample is called in messages: its path."""
        return self.index.path(index)


def list_images(inputs: Sequence[str]) -> list[str]:
    """Files as given; for a folder, the images in it and below, sorted by path. Raises UserError (66)."""
    paths = []
    for name in inputs:
        if not os.path.exists(name):
            raise UserError(f"there is no file or folder {name}", Exit.NO_INPUT)
        paths += images_in(name) if os.path.isdir(name) else [name]
    return paths
