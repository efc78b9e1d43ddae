"""Images of noise for benchmarks that need files, but no accuracy."""

import os
from pathlib import Path

import numpy as np
from PIL import Image, ImageChops

DISTINCT = 128  # image files; the others are links to them


def write_images(root: Path, count: int, classes: int, side: int | None = None) -> None:
    """Write `count` images train/CLASS/*, and val/CLASS/*, one of each class.

    JPEGs of 500 x 375 px, ImageNet's usual size; with `side` uncompressed squares.
    """
    made = []
    width, height = (side, side) if side else (500, 375)
    for index in range(count + classes):
        folder = root / ("train" if index < count else "val") / f"{index % classes:04}"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{index}.{'bmp' if side else 'jpg'}"
        if len(made) == DISTINCT:
            os.link(made[index % DISTINCT], path)
            continue
        photo(index, width, height).save(path, quality=90)
        made.append(path)


def photo(seed: int, width: int, height: int) -> Image.Image:
    """Smooth noise with grain: its JPEG has about the size of a photo's."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(256, size=(24, 32, 3), dtype=np.uint8)).resize((width, height))
    grain = Image.fromarray(rng.integers(24, size=(height, width, 3), dtype=np.uint8))
    return ImageChops.add(coarse, grain, offset=-12)
