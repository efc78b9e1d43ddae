"""What the images of a data set are like: see survey.py.

Legend: N samples, S of them that were looked at; of an image H, W height and width in pixels.

Tests: extras/check/tests/test_survey.py
"""

import os
from collections.abc import Sequence

import numpy as np
from PIL import Image

from data.images.augment import MAX_RATIO
from data.images.decode import EncodedImage, UnreadableImage, opened
from data.images.index import ImageIndex
from extras.check.survey import Survey, first_with, key_of, shared_out
from models.tasks.base import Task
from models.tasks.image_classification import ImageTask
from utils.distributed.world import World

MOST = 10_000  # samples, at most, whose pixels are looked at
BEGINNING = 2**14  # bytes, by which files of one size are told apart before all of them are read
LARGE = 512  # px of the shorter side: a JPEG of twice as many is decoded at a fraction of its size
HASH_SIDE = 8  # px of the small grey picture that is the perceptual hash
FLAT = 4  # levels of 255: an image whose channels vary by no more has one colour
EXTREME = 8  # times shorter or longer than the median


def survey_of(task: Task, world: World) -> Survey | None:
    """Of the files, whatever --cache keeps of them; None for a task of another kind. Collective."""
    if not isinstance(task, ImageTask):
        return None
    return survey_images(task.train_set.index, task.eval_set.index, task.prepared.white_value, world)  # Collective.


def survey_images(train: ImageIndex, val: ImageIndex, white: int, world: World) -> Survey:
    """Look at the images of both splits. Of samples with several images, the first decides how they look. Collective.

    white: see EncodedImage.
    """
    count = len(train) + len(val)

    def paths_of(index: int) -> list[str]:
        return train.paths(index) if index < len(train) else val.paths(index - len(train))

    # the same bytes: of all samples, by the size, then by the beginning, then by the whole
    exact = np.zeros(count, np.int64)
    for most in (0, BEGINNING, -1):
        _, inverse, counts = np.unique(exact, return_inverse=True, return_counts=True)
        wanted = np.flatnonzero(counts[inverse] > 1)
        exact[wanted] = shared_out(world, lambda index, most=most: _key(paths_of(index), most), wanted.tolist())

    # the pixels: of some
    chosen = sorted(np.random.default_rng(0).permutation(count)[:MOST].tolist())
    found = dict(zip(chosen, shared_out(world, lambda index: _look(paths_of(index), white), chosen), strict=True))
    unreadable = {index: reason for index, reason in found.items() if isinstance(reason, str)}
    seen = np.array([index for index in chosen if index not in unreadable], np.int64)
    facts = np.array([found[index] for index in seen.tolist()], np.int64).reshape(-1, 4 + HASH_SIDE**2 // 8)
    key, height, width, spread = facts[:, :4].T
    first, same = first_with(exact), exact.copy()
    same[first[seen]] = key  # equal bytes are equal pixels, whichever of them was looked at

    # what is odd
    short, long = np.minimum(height, width), np.maximum(height, width)
    usual = np.median(short) if len(seen) else 0
    is_extreme = (long > MAX_RATIO * short) | (EXTREME * short < usual) | (short > EXTREME * usual)
    odd = {"one colour": seen[spread <= FLAT], "extreme": seen[is_extreme]}
    labels, looks = np.concatenate([train.labels, val.labels]), np.ascontiguousarray(facts[:, 4:]).view(np.int8)
    return Survey(len(train), labels, exact, same[first], seen, looks, odd, unreadable,
                  lambda index: ",".join(os.path.relpath(path, train.root) for path in paths_of(index)),
                  lambda index: ",".join(paths_of(index)), train.left_out)


def _key(paths: Sequence[str], most: int) -> int:
    """Of the files' sizes and their first `most` bytes, -1: all; one of its own if a file cannot be read."""
    content = b""
    try:
        for path in paths:
            with opened(path) as file:
                content += b"%d:" % file.seek(0, os.SEEK_END)
                file.seek(0)
                content += file.read(most)
    except OSError:  # _look says why
        return key_of(os.fsencode("\0".join(paths)))
    return key_of(content)


def _look(paths: Sequence[str], white: int) -> list[int] | str:
    """The key of a sample's pixels; of its first image height, width, the largest range of a channel, the hash.

    Or why it cannot be read.
    """
    content, first = b"", []
    for path in paths:
        try:
            image = EncodedImage(path, white)
            pixels = image.pixels(min(1, LARGE / min(image.height, image.width))).numpy()   # [H, W, 3]
        except UnreadableImage as error:
            return f"{path}: {error}"
        content += b"%d x %d:" % (image.height, image.width) + pixels.tobytes()
        first = first or [image.height, image.width, int(np.ptp(pixels, axis=(0, 1)).max()), *_hash(pixels)]
    return [key_of(content), *first]


def _hash(pixels: np.ndarray) -> list[int]:
    """A few grey levels, less their mean, the largest scaled to 127: int8, of which eight make an int64.

    An image that is encoded again, resized, brighter or darker has nearly the same. pixels: [H, W, 3] uint8.
    """
    small = Image.fromarray(pixels).convert("L").resize((HASH_SIDE, HASH_SIDE), Image.Resampling.BOX)
    levels = np.asarray(small, np.float64) - np.asarray(small).mean()
    return np.round(levels * (127 / max(1, np.abs(levels).max()))).astype(np.int8).view(np.int64).flatten().tolist()
