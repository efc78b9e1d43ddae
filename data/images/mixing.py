"""MixUp and CutMix: a sample gets a part of the picture and of the label of another sample of its micro-batch.

Random choices follow from the seed of torch's default CPU generator, which is that of the micro-batch: what is mixed is
a pure function of the position. They leave the generator as it was, so that dropout on the CPU draws what it would draw
on a device; and the host never waits for one.
Sources: Zhang et al., 2018 (MixUp); Yun et al., 2019 (CutMix); torchvision's transforms of these names, which give
these pixels; timm's rule for both. Legend: B samples, H, W height and width in pixels.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from utils.errors import UserError
from utils.numerics.seed import derive_seed, seeded
from utils.settings.image_options import AugmentOptions, MixOptions


class Mixed(NamedTuple):
    """Samples that are mixed with their partners."""

    images: Tensor  # [B, H, W, 3] uint8 or, of MixUp, float32; 0 to 255
    partner: Tensor  # [B] int64: whose picture each got a part of; itself where nothing is mixed
    share: float  # of each sample's own picture and label, 0 to 1


Mixing = Callable[[Tensor, Tensor], Mixed]  # of images and sample_weight, see mix()


def build_mixing(options: AugmentOptions, image_size: int) -> Mixing | None:
    """What --mixup and --cutmix ask for; None if nothing. Raises UserError (64) where nothing could ever be cut out."""
    if not isinstance(options, MixOptions):
        return None
    if options.cutmix and image_size == 1:
        raise UserError(f"--cutmix {options.cutmix}: an image of --image-size 1 has no part that could be replaced; use"
                        " a larger --image-size, or --mixup")
    return partial(mix, options=options) if options.mixup or options.cutmix else None


def mix(images: Tensor, sample_weight: Tensor, options: MixOptions) -> Mixed:
    """Mix a micro-batch with itself, moved on by one sample; by one of the two techniques with probability 1/2 each.

    images: [B, H, W, 3] uint8, or 3 * I channels of I images. sample_weight: [B]; an image of weight 0 is lent to none.
    """
    # partners: the sample before, where it could be read
    own = torch.arange(len(images), device=images.device)                        # [B]
    partner = torch.where((sample_weight > 0).roll(1), own.roll(1), own)         # [B]

    # random choices
    height, width = images.shape[1:3]
    with seeded(derive_seed(torch.initial_seed(), "mixing")):
        is_cutmix = options.cutmix > 0 and (options.mixup == 0 or torch.rand(()).item() < 0.5)
        alpha = torch.tensor([options.cutmix if is_cutmix else options.mixup])
        share = torch.distributions.Beta(alpha, alpha).sample().item()
        x, y = int(torch.randint(width, (1,))), int(torch.randint(height, (1,)))

    # MixUp
    if not is_cutmix:
        return Mixed(torch.lerp(images[partner].float(), images.float(), share), partner, share)

    # CutMix: the box lies around (x, y); what is outside of the image is lost, and the share is corrected
    half = 0.5 * math.sqrt(1 - share)
    rows = slice(max(0, y - int(half * height)), min(height, y + int(half * height)))
    columns = slice(max(0, x - int(half * width)), min(width, x + int(half * width)))
    cut = images.clone()
    cut[:, rows, columns] = images[partner, rows, columns]
    area = (rows.stop - rows.start) * (columns.stop - columns.start)
    return Mixed(cut, partner, 1 - area / (height * width))
