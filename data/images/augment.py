"""From an EncodedImage to the square the model sees: uint8 [size, size, 3].

In training: crop, flip, auto-augment, erasing. Random choices are drawn from torch's default generator alone. The box
is drawn before decoding, so that a large JPEG is decoded at a fraction of its size.
Sources: torchvision's RandomResizedCrop, Resize and CenterCrop (antialias=True). Full-size decodes give their pixels.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms.functional import center_crop

from data.images.decode import EncodedImage
from utils.errors import UserError
from utils.settings.image_options import AugmentOptions

Box = tuple[int, int, int, int]  # top, left, height, width, in pixels

DEFAULTS = AugmentOptions()
LEAST_AREA = 0.08  # of a random box, as a share of the image's: torchvision's default
PHOTO_ABOVE = 64  # px: augmentation "auto" treats larger images as photos
# In evaluation a JPEG is decoded at twice the size needed or more. At once the size, as in training, the result is
# softer: its mean difference to a full decode is 2.4 levels of 255 instead of 0.9.
RESERVE = 2
MAX_RATIO = 8  # of the sides: longer images are cut first, else 1 x 20,000 pixels would be resized to gigabytes


@dataclass(frozen=True)
class RandomCrop:
    """A part of the image, chosen at random; half of them mirrored if `flip`."""

    size: int
    interpolation: str = "bilinear"
    flip: bool = True

    def __call__(self, image: EncodedImage) -> Tensor:
        pixels = self.crop(image)
        return pixels.flip(1) if self.flip and torch.rand(1).item() < 0.5 else pixels


class PhotoTrain(RandomCrop):
    """A random box of at least LEAST_AREA of the area, resized."""

    def crop(self, image: EncodedImage) -> Tensor:
        """Not mirrored."""
        return resized(image, random_box(image.height, image.width), (self.size, self.size), self.interpolation)


class SmallTrain(RandomCrop):
    """The image moved by up to an eighth, the gap zero. Usual for CIFAR."""

    def crop(self, image: EncodedImage) -> Tensor:
        """Not mirrored."""
        pad = self.size // 8
        centre = CentreCrop(self.size, self.interpolation, self.size)(image)
        padded = F.pad(centre, (0, 0, pad, pad, pad, pad))
        top, left = torch.randint(0, 2 * pad + 1, (2,)).tolist()
        return padded[top:top + self.size, left:left + self.size].contiguous()


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
        pixels = resized(image, box, target, self.interpolation, RESERVE).permute(2, 0, 1)
        cut = center_crop(pixels, [self.size, self.size])  # where timm's crop_pct is above 1, the border is black
        return cut.permute(1, 2, 0).contiguous()


Crop = RandomCrop | CentreCrop


@dataclass(frozen=True)
class Augmented:
    """A crop, then transforms of torchvision."""

    crop: Crop
    transforms: Callable[[Tensor], Tensor]  # from uint8 [3, size, size] to the same

    @property
    def size(self) -> int:
        """Pixels of a side."""
        return self.crop.size

    def __call__(self, image: EncodedImage) -> Tensor:
        pixels, threads = self.crop(image).permute(2, 0, 1), torch.get_num_threads()
        torch.set_num_threads(1)  # as in a data loading process: the mean of a large image depends on it (Contrast)
        try:
            return self.transforms(pixels).permute(1, 2, 0).contiguous()
        finally:
            torch.set_num_threads(threads)


Transform = Crop | Augmented


def build_transforms(
    augmentation: str, for_eval: CentreCrop, options: AugmentOptions = DEFAULTS, mean: Sequence[float] = (0.5, 0.5, 0.5)
) -> tuple[Transform, CentreCrop]:
    """The transforms of training and of evaluation. augmentation: a value of --augmentation.

    mean: of the channels, 0 to 1; fills what is erased, or turned into view. Raises UserError (64).
    """
    # crops
    image_size, interpolation = for_eval.size, for_eval.interpolation
    if augmentation == "none":
        crop = for_eval
    else:
        kind = PhotoTrain if is_photo(augmentation, image_size) else SmallTrain
        crop = kind(image_size, interpolation, flip=augmentation not in ("crop", "shift"))

    # what comes after them
    transforms = _library_transforms(options, image_size, tuple(round(255 * value) for value in mean))
    return Augmented(crop, transforms) if transforms else crop, for_eval


def usual_resize_size(augmentation: str, image_size: int) -> int:
    """What the shorter side is resized to if no weights say it: a photo loses an eighth, as with 256 and 224 pixels."""
    return round(image_size * 256 / 224) if is_photo(augmentation, image_size) else image_size


def is_photo(augmentation: str, image_size: int) -> bool:
    """Whether images of this size are treated as photos."""
    return augmentation in ("photo", "crop") or (augmentation in ("auto", "none") and image_size > PHOTO_ABOVE)


def _library_transforms(
    options: AugmentOptions, image_size: int, fill: tuple[int, ...]
) -> Callable[[Tensor], Tensor] | None:
    """--auto-augment and --random-erasing, by torchvision. fill: [3] levels of 0..255. Raises UserError (64).

    torchvision erases after normalising, with 0. Here an image is still uint8, and the means are what will be 0, up to
    half a level of 255.
    """
    if options.random_erasing and image_size == 1:
        raise UserError(f"--random-erasing {options.random_erasing}: an image of --image-size 1 has no part that could"
                        " be erased; use a larger --image-size")
    if options.auto_augment == "none" and not options.random_erasing:
        return None
    from torchvision.transforms import v2  # 2 to 3 s

    transforms: list[Callable[[Tensor], Tensor]] = []
    look = {"interpolation": v2.InterpolationMode.BILINEAR, "fill": list(fill)}  # it has no bicubic for these
    if options.auto_augment == "randaugment":
        transforms.append(v2.RandAugment(2, 9, **look))
    elif options.auto_augment == "trivialaugment":
        transforms.append(v2.TrivialAugmentWide(**look))
    if options.random_erasing:
        transforms.append(v2.RandomErasing(options.random_erasing, value=fill))
    return v2.Compose(transforms)


def random_box(height: int, width: int) -> Box:
    """A box of LEAST_AREA to 1 of the area, ratio 3/4 to 4/3; after ten misses, the largest such box in the centre."""
    of_that_size = torch.empty(1, height, width, device="meta")
    return RandomResizedCrop.get_params(of_that_size, [LEAST_AREA, 1.0], [3 / 4, 4 / 3])


def resized(
    image: EncodedImage, box: Box, size: tuple[int, int], interpolation: str, reserve: float = 1
) -> Tensor:
    """The box, resized to uint8 [*size, 3]; decoded at `reserve` times that size or more, if the image has it."""
    # decode and cut; the box counts pixels of the full size
    top, left, h, w = box
    pixels = image.pixels(reserve * max(size[0] / h, size[1] / w))
    down, right = pixels.shape[0] / image.height, pixels.shape[1] / image.width  # 1; less after a reduced decode
    y, x = round(top * down), round(left * right)
    crop = pixels[y:max(y + 1, round((top + h) * down)), x:max(x + 1, round((left + w) * right))]
    if crop.shape[:2] == size:
        return crop.clone(memory_format=torch.contiguous_format)  # the pixels of a cache are read-only

    # resize. torch's fast path needs channels_last strides, the batch dimension's included: half the time of
    # crop.permute(2, 0, 1)[None].
    channels_last = crop.contiguous()[None].permute(0, 3, 1, 2)  # [1, 3, h, w]
    resized = F.interpolate(channels_last, size=size, mode=interpolation, antialias=True)
    return resized[0].permute(1, 2, 0).contiguous()
