"""From an EncodedImage to the square the model sees: uint8 [size, size, 3].

Random choices are drawn from torch's default generator alone. The box is drawn before decoding, so that a large JPEG
is decoded at a fraction of its size.
Sources: torchvision's RandomResizedCrop, Resize and CenterCrop (antialias=True). Full-size decodes give their pixels.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from data.image_decode import EncodedImage

Box = tuple[int, int, int, int]  # top, left, height, width, in pixels

PHOTO_ABOVE = 64  # px: augmentation "auto" treats larger images as photos
# In evaluation a JPEG is decoded at twice the size needed or more. At once the size, as in training, the result is
# softer: its mean difference to a full decode is 2.4 levels of 255 instead of 0.9.
RESERVE = 2
MAX_RATIO = 8  # of the sides: longer images are cut first, else 1 x 20,000 pixels would be resized to gigabytes


@dataclass(frozen=True)
class PhotoTrain:
    """A random box of 8 to 100 % of the area, resized; half of them mirrored."""

    size: int
    interpolation: str = "bilinear"

    def __call__(self, image: EncodedImage) -> Tensor:
        box = _random_box(image.height, image.width)
        return _maybe_mirrored(_resized(image, box, (self.size, self.size), self.interpolation))


@dataclass(frozen=True)
class SmallTrain:
    """The image moved by up to an eighth, the gap zero; half of them mirrored if `flip`. Usual for CIFAR."""

    size: int
    interpolation: str = "bilinear"
    flip: bool = True

    def __call__(self, image: EncodedImage) -> Tensor:
        pad = self.size // 8
        centre = CentreCrop(self.size, self.interpolation, self.size)(image)
        padded = F.pad(centre, (0, 0, pad, pad, pad, pad))
        top, left = torch.randint(0, 2 * pad + 1, (2,)).tolist()
        moved = padded[top:top + self.size, left:left + self.size].contiguous()
        return _maybe_mirrored(moved) if self.flip else moved


@dataclass(frozen=True)
class CentreCrop:
    """The shorter side resized to `resize_size`, then the centre cut out; all three are in RUN/model/config.json."""

    size: int
    interpolation: str
    resize_size: int

    def __call__(self, image: EncodedImage) -> Tensor:
        # the image, without the ends of a long one
        height, width = image.height, image.width
        h, w = min(height, MAX_RATIO * width), min(width, MAX_RATIO * height)
        box = ((height - h) // 2, (width - w) // 2, h, w)

        # resize its shorter side, then cut out the centre
        target = int(self.resize_size * h / min(h, w)), int(self.resize_size * w / min(h, w))
        resized = _resized(image, box, target, self.interpolation, RESERVE)
        top, left = round((target[0] - self.size) / 2), round((target[1] - self.size) / 2)
        return resized[top:top + self.size, left:left + self.size].contiguous()


Transform = PhotoTrain | SmallTrain | CentreCrop


def build_transforms(augmentation: str, for_eval: CentreCrop) -> tuple[Transform, CentreCrop]:
    """The transforms of training and of evaluation. augmentation: a value of --augmentation."""
    image_size, interpolation = for_eval.size, for_eval.interpolation
    if augmentation == "none":
        return for_eval, for_eval
    if is_photo(augmentation, image_size):
        return PhotoTrain(image_size, interpolation), for_eval
    return SmallTrain(image_size, interpolation, flip=augmentation != "shift"), for_eval


def usual_resize_size(augmentation: str, image_size: int) -> int:
    """What the shorter side is resized to if no weights say it: a photo loses an eighth, as with 256 and 224 pixels."""
    return round(image_size * 256 / 224) if is_photo(augmentation, image_size) else image_size


def is_photo(augmentation: str, image_size: int) -> bool:
    """Whether images of this size are treated as photos."""
    return augmentation == "photo" or (augmentation in ("auto", "none") and image_size > PHOTO_ABOVE)


def _random_box(height: int, width: int) -> Box:
    """A box of 8 to 100 % of the area, ratio 3/4 to 4/3; after ten misses, the largest such box in the centre."""
    low, high = 3 / 4, 4 / 3

    # ten tries
    for _ in range(10):
        area = height * width * torch.empty(1).uniform_(0.08, 1).item()
        ratio = torch.empty(1).uniform_(math.log(low), math.log(high)).exp().item()
        h, w = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
        if 0 < h <= height and 0 < w <= width:
            return int(torch.randint(0, height - h + 1, (1,))), int(torch.randint(0, width - w + 1, (1,))), h, w

    # the centre
    h, w = min(height, max(1, round(width / low))), min(width, max(1, round(height * high)))
    return (height - h) // 2, (width - w) // 2, h, w


def _resized(
    image: EncodedImage, box: Box, size: tuple[int, int], interpolation: str, reserve: float = 1
) -> Tensor:
    """The box, resized to uint8 [*size, 3]; decoded at `reserve` times that size or more, if the image has it."""
    # decode and cut; the box counts pixels of the full size
    top, left, h, w = box
    pixels = image.pixels(at_least=reserve * max(size[0] / h, size[1] / w))
    down, right = pixels.shape[0] / image.height, pixels.shape[1] / image.width  # 1; less after a reduced decode
    y, x = round(top * down), round(left * right)
    crop = pixels[y:max(y + 1, round((top + h) * down)), x:max(x + 1, round((left + w) * right))]

    # resize. torch's fast path needs channels_last strides, the batch dimension's included: half the time of
    # crop.permute(2, 0, 1)[None].
    channels_last = crop.contiguous()[None].permute(0, 3, 1, 2)  # [1, 3, h, w]
    resized = F.interpolate(channels_last, size=size, mode=interpolation, antialias=True)
    return resized[0].permute(1, 2, 0).contiguous()


def _maybe_mirrored(pixels: Tensor) -> Tensor:
    return pixels.flip(1) if torch.rand(1).item() < 0.5 else pixels
