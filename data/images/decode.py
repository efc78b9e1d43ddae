"""One way from an image file to pixels, for training, evaluation and prediction alike.

    image = EncodedImage("cat.jpg")          # or its bytes; reads the header
    image.height, image.width                # as shown: after EXIF orientation
    image.pixels(at_least=0.3)               # uint8 [H, W, 3]; a large JPEG is decoded at 1/2 size

Any failure is an UnreadableImage, whatever Pillow or libjpeg raised.
Legend: H, W height and width in pixels.
"""

from __future__ import annotations

import copy
import hashlib
import io
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO

import numpy as np
import simplejpeg
import torch
import torch.nn.functional as F
from PIL import Image, PngImagePlugin, UnidentifiedImageError
from torch import Tensor

MAX_PIXELS = 178_956_970  # Pillow's own limit against decompression bombs
FORMATS = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP", "GIF")
LONGEST = 65_500  # pixels of a JPEG's side: JPEG_MAX_DIMENSION of libjpeg
ORIENTATION = 0x0112  # EXIF tag
PHOTOMETRIC, BANDS, EXTRA = 262, 277, 338  # tags of a TIFF: whether 0 is white, how many bands, what those beyond are
WHITES = (2**8 - 1, 2**10 - 1, 2**12 - 1, 2**14 - 1, 2**16 - 1)  # what sensors give, in files of 16 bits

# Pillow warns in every worker about large images, which are checked here, and damaged EXIF data, which does not matter.
Image.MAX_IMAGE_PIXELS = None
# Its limits for texts and colour profiles in PNGs refuse sound images; these take no more memory than pixels may.
PngImagePlugin.MAX_TEXT_CHUNK = PngImagePlugin.MAX_TEXT_MEMORY = 3 * MAX_PIXELS
warnings.filterwarnings("ignore", module=r"PIL\.")
warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # that of a cache; nobody writes to it

_SWAPPED = {"RGB;16B": "RGB;16L", "RGB;16L": "RGB;16B", "RGB;16N": f"RGB;16{'LB'[sys.byteorder == 'little']}"}


class UnreadableImage(ValueError):
    """The file holds no usable image; the text is the reason, in a few words."""


def opened(path: str) -> BinaryIO:
    """A file; SHARD.tar/MEMBER is one, too. Raises OSError."""
    try:
        return open(path, "rb")
    except NotADirectoryError:
        from data.shards.shard import read_member
        return io.BytesIO(read_member(path))


class EncodedImage:
    """An image whose size is known and whose pixels are decoded on request. source: a path, or the file's bytes.

    white: the value, in a file of 16 bits, that is white. A data set has one, so that a value (a distance, a dose)
    has one brightness in all its files; None: the smallest of WHITES that no value in this file exceeds.
    JPEGs are decoded in pixels(), everything else at once. Raises UnreadableImage.
    """

    def __init__(self, source: str | bytes, white: int | None = None):
        self.white = white
        with _as_unreadable():
            self._data = source if isinstance(source, bytes) else opened(source).read()
            if not self._data:
                raise UnreadableImage("the file is empty")
            if self._data.startswith(b"version https://git-lfs"):
                raise UnreadableImage("a pointer of git-lfs, not the image; run git lfs pull")
            image = Image.open(io.BytesIO(self._data), formats=FORMATS)
            if image.height * image.width > MAX_PIXELS:
                raise UnreadableImage(f"{image.width} x {image.height} pixels, more than {MAX_PIXELS}: possibly a"
                                      " decompression bomb")
            is_jpeg = image.format in ("JPEG", "MPO") and image.mode in ("L", "RGB")
            self._decoded = None if is_jpeg else self._decode_other(image)
            self._stored = (image.height, image.width) if self._decoded is None else self._decoded.shape[:2]
            # Read after decoding: Pillow turns TIFFs then, and finds a late EXIF chunk in PNGs.
            self._orientation = _orientation(image)
        self.height, self.width = self._stored[::-1] if self._orientation >= 5 else self._stored

    def pixels(self, at_least: float = 1.0) -> Tensor:
        """uint8 [H, W, 3], at full size; a JPEG at the smallest of 1/1, 1/2, 1/4, 1/8 that is `at_least` or more.

        Raises UnreadableImage.
        """
        with _as_unreadable():
            decoded = self._decode_jpeg(at_least) if self._decoded is None else self._decoded
        return _turn(torch.from_numpy(decoded), self._orientation)

    def sha256(self) -> bytes:
        """Of the file."""
        return hashlib.sha256(self._data).digest()

    def stretched(self, height: int, width: int) -> EncodedImage:
        """The same image at another size, so that a box means the same place in both. Raises UnreadableImage."""
        if (self.height, self.width) == (height, width):
            return self
        if height * width > MAX_PIXELS:
            raise UnreadableImage(f"it would be stretched to {width} x {height} pixels, more than {MAX_PIXELS}")
        image, pixels = copy.copy(self), self.pixels().permute(2, 0, 1)[None]           # [1, 3, h, w]
        resized = F.interpolate(pixels, size=(height, width), mode="bilinear", antialias=True)
        image._decoded = resized[0].permute(1, 2, 0).contiguous().numpy()               # [H, W, 3]
        image._orientation, image.height, image.width = 1, height, width
        return image

    def _decode_other(self, image: Image.Image) -> np.ndarray:
        # the upper bytes alone, as Pillow reads colours, are all there is of a data set that fills 16 bits
        is_coarse = self.white == WHITES[-1] and image.mode == "RGB"
        values = None if is_coarse else _values_of_16_bits(image, self._data)               # [H, W, 1 or 3]
        if values is None:
            if self.white not in (None, WHITES[-1]) and any(";16" in str(tile.args) for tile in image.tile):
                raise UnreadableImage(f"16 bits in a mode ({image.mode}) of which the upper 8 alone are read, where"
                                      f" {self.white} is white; store grey or RGB")
            return _decode_with_pillow(image)
        self.white = self.white or next(white for white in WHITES if values.max() <= white)
        shown = (values.clip(max=self.white) * 255 + self.white // 2) // self.white
        shown = 255 - shown if _tag(image, PHOTOMETRIC) == 0 else shown  # of 8 bits, Pillow does it
        return np.tile(shown.astype(np.uint8), (1, 1, 3 // shown.shape[2]))

    def _decode_jpeg(self, at_least: float) -> np.ndarray:
        divisor = next(d for d in (8, 4, 2, 1) if d == 1 or at_least * d <= 1)
        height, width = (-(-side // divisor) for side in self._stored)
        try:
            return simplejpeg.decode_jpeg(self._data, "RGB", min_height=height, min_width=width, strict=True)
        except ValueError:
            # strict also refuses files that libjpeg only warns about (stray bytes before a marker, common in photos
            # from the web). Pillow reads those, at the same size, and refuses truncated files.
            image = Image.open(io.BytesIO(self._data), formats=FORMATS)
            image.draft(None, tuple(max(1, side // divisor) for side in image.size))
            return _decode_with_pillow(image)


class PackedImage(EncodedImage):
    """An image of a cache: it has the height and width of the file it was made from, and maybe fewer pixels.

    So a random box is the same place in both. data: [bytes] uint8, a JPEG or raw pixels. shown, stored: height and
    width of the file and of `data`. file: its sha256.
    """

    def __init__(self, data: np.ndarray, shown: Sequence[int], stored: Sequence[int], is_raw: bool, file: bytes):
        (self.height, self.width), self._stored, self._orientation, self._file = shown, tuple(stored), 1, file
        self._data, self._decoded = (b"", data.reshape(*stored, 3)) if is_raw else (data.tobytes(), None)

    def pixels(self, at_least: float = 1.0) -> Tensor:
        """As of a file; at_least: of the file's size."""
        return super().pixels(at_least * self.height / self._stored[0])

    def sha256(self) -> bytes:
        """Of the file that was packed."""
        return self._file


def left_out(path: str) -> str:
    """What of a file is not used, in words: further pages, frames or bands. "" if all is, or it cannot be read.

    The second picture of a camera's JPEG (MPO: a preview, a depth) is not meant.
    """
    with suppress(Exception), opened(path) as file, Image.open(file, formats=FORMATS) as image:
        if image.format not in ("JPEG", "MPO") and getattr(image, "is_animated", False):
            return "several pages or frames: the first is used"
        is_undeclared = image.mode == "RGBA" and not _has_transparency(image)
        if _tag(image, BANDS, 0) > len(image.getbands()) - is_undeclared:
            return "more bands than colours: the others are not used"
    return ""


def _tag(image: Image.Image, tag: int, default: int | None = None) -> Any:
    """The value of a TIFF's tag; the default for other files."""
    return getattr(image, "tag_v2", {}).get(tag, default)


def _has_transparency(image: Image.Image) -> bool:
    """A fourth band of a TIFF that does not say what it is may be near infrared; Pillow takes it for transparency."""
    return image.has_transparency_data and (image.format != "TIFF" or image.mode != "RGBA" or bool(_tag(image, EXTRA)))


def _decode_with_pillow(image: Image.Image) -> np.ndarray:
    """uint8 [H, W, 3] of any mode with 8 bits: transparency over white, the first of several frames."""
    if image.mode == "F":
        raise UnreadableImage("floating-point pixels have no agreed range; store 8 or 16 bits")
    if _has_transparency(image):
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    return np.array(image.convert("RGB"))


def _values_of_16_bits(image: Image.Image, data: bytes) -> np.ndarray | None:
    """int32 [H, W, 1 or 3], grey or colours; None of a file that has 8 bits, or an alpha channel. data: the file."""
    if image.mode.startswith("I"):  # I;16, I;16B, ...: convert("RGB") would clip at 255
        values = np.asarray(image).astype(np.int32)[:, :, None]
        if values.min() < 0 or values.max() > WHITES[-1]:
            raise UnreadableImage("integer pixels below 0 or beyond 16 bits")
        return values
    # Pillow has no mode for such colours: it keeps the upper byte of each, or the lower one if they are swapped.
    args = [tile.args if isinstance(tile.args, tuple) and tile.args else (tile.args,) for tile in image.tile]
    if image.has_transparency_data or not args or any(mode not in _SWAPPED for mode, *_ in args):
        return None
    lower = Image.open(io.BytesIO(data), formats=FORMATS)
    lower.tile = [tile._replace(args=(_SWAPPED[mode], *more))
                  for tile, (mode, *more) in zip(lower.tile, args, strict=True)]
    return np.asarray(image).astype(np.int32) * 256 + np.asarray(lower)


def _orientation(image: Image.Image) -> int:
    """EXIF orientation, 1 to 8; 1 if the EXIF data is damaged."""
    with suppress(Exception):  # as below
        if (value := image.getexif().get(ORIENTATION)) in range(1, 9):
            return value
    return 1


def _turn(pixels: Tensor, orientation: int) -> Tensor:
    """Undo an EXIF orientation. pixels: [H, W, 3]."""
    if orientation >= 5:
        pixels = pixels.transpose(0, 1)
    axes = [axis for axis, values in ((0, (3, 4, 7, 8)), (1, (2, 3, 6, 7))) if orientation in values]
    return pixels.flip(axes) if axes else pixels


@contextmanager
def _as_unreadable() -> Iterator[None]:
    try:
        yield
    except (UnreadableImage, MemoryError):
        raise
    except UnidentifiedImageError:  # its own text holds a memory address
        raise UnreadableImage("not an image of a known format, or damaged at its start") from None
    except Exception as error:  # damaged files raise almost anything inside Pillow and simplejpeg
        raise UnreadableImage(getattr(error, "strerror", None) or str(error) or type(error).__name__) from error
