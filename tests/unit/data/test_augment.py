import io

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from data import augment
from data.augment import CentreCrop, PhotoTrain, SmallTrain, build_transforms
from data.image_decode import EncodedImage

torch.set_num_threads(1)


def photo(size: int) -> CentreCrop:
    """Evaluation of a photo."""
    return CentreCrop(size, "bilinear", round(size * 256 / 224))


def small(size: int) -> CentreCrop:
    """Evaluation of a small image."""
    return CentreCrop(size, "bilinear", size)


MODES = {"bilinear": v2.InterpolationMode.BILINEAR, "bicubic": v2.InterpolationMode.BICUBIC}


def picture(height: int, width: int, format: str = "PNG") -> tuple[EncodedImage, torch.Tensor]:
    """The image as encoded, and its pixels as uint8 [3, height, width]."""
    noise = np.random.default_rng(height * 10_000 + width).integers(0, 256, (height // 3 + 1, width // 3 + 1, 3),
                                                                    dtype=np.uint8)
    image = Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)
    stream = io.BytesIO()
    image.save(stream, format)
    encoded = EncodedImage(stream.getvalue())
    return encoded, encoded.pixels().permute(2, 0, 1)


SHAPES = [(300, 451), (457, 301), (224, 224), (50, 31), (1, 7), (7, 1), (120, 900)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("interpolation", MODES)
def test_the_centre_of_a_photo_is_torchvisions_resize_and_centre_crop(shape, interpolation):
    encoded, pixels = picture(*shape)
    theirs = v2.CenterCrop(112)(v2.Resize(128, MODES[interpolation], antialias=True)(pixels)).permute(1, 2, 0)
    ours = CentreCrop(112, interpolation, 128)(encoded)
    assert ours.is_contiguous() and (ours.int() - theirs.int()).abs().max() <= 1


@pytest.mark.parametrize("shape", SHAPES)
def test_the_centre_is_torchvisions_resize_and_centre_crop(shape):
    encoded, pixels = picture(*shape)
    theirs = v2.CenterCrop(32)(v2.Resize(32, antialias=True)(pixels)).permute(1, 2, 0)
    assert (small(32)(encoded).int() - theirs.int()).abs().max() <= 1


@pytest.mark.parametrize("shape", SHAPES)
def test_photo_train_is_torchvisions_random_resized_crop_and_flip(shape):
    encoded, pixels = picture(*shape)
    for seed in range(8):
        torch.manual_seed(seed)
        theirs = v2.RandomHorizontalFlip()(v2.RandomResizedCrop(64, antialias=True)(pixels)).permute(1, 2, 0)
        torch.manual_seed(seed)
        assert (PhotoTrain(64)(encoded).int() - theirs.int()).abs().max() <= 1


def test_reduced_decode_has_nearly_the_pixels_of_the_full_one():
    encoded, pixels = picture(1200, 1601, "JPEG")
    theirs = v2.CenterCrop(112)(v2.Resize(128, antialias=True)(pixels)).permute(1, 2, 0).float()
    # Decoded at 1/4 (libjpeg's box filter), then resized: on noise, the worst case, a fifth of its standard deviation;
    # unshifted.
    ours = photo(112)(encoded).float()
    assert (ours - theirs).abs().mean() < 0.25 * theirs.std()
    assert (ours.roll(1, 0) - theirs).abs().mean() > 0.5 * theirs.std()


def test_reduced_decode_is_never_smaller_than_the_target(monkeypatch):
    encoded, _ = picture(701, 533, "JPEG")
    sizes = []
    interpolate = torch.nn.functional.interpolate
    monkeypatch.setattr(augment.F, "interpolate", lambda crop, size,
                        **options: (sizes.append((crop.shape[2:], size)), interpolate(
        crop, size=size, **options))[1])
    for seed in range(50):
        torch.manual_seed(seed)
        box = augment._random_box(encoded.height, encoded.width)
        torch.manual_seed(seed)
        PhotoTrain(96)(encoded)
        (height, width), _ = sizes[-1]
        # a box cut to whole pixels of the reduced image may lose one
        assert height >= min(95, box[2]) and width >= min(95, box[3])


def test_long_images_are_cut_before_they_are_resized():
    for shape in ((1, 20_000), (20_000, 1)):
        assert photo(224)(picture(*shape)[0]).shape == (224, 224, 3)


def test_small_train_moves_the_image_over_zeros():
    encoded, pixels = picture(32, 32)
    padded = torch.nn.functional.pad(pixels, (4, 4, 4, 4)).permute(1, 2, 0)
    windows = {padded[y:y + 32, x:x + 32].numpy().tobytes() for y in range(9) for x in range(9)}
    mirrored = {padded.flip(1)[y:y + 32, x:x + 32].numpy().tobytes() for y in range(9) for x in range(9)}
    torch.manual_seed(0)
    shifted = [SmallTrain(32, flip=False)(encoded).contiguous().numpy().tobytes() for _ in range(50)]
    flipped = [SmallTrain(32)(encoded).contiguous().numpy().tobytes() for _ in range(50)]
    assert set(shifted) <= windows and len(set(shifted)) > 20
    assert set(flipped) <= windows | mirrored and 10 < sum(image in mirrored for image in flipped) < 40


@pytest.mark.parametrize(("augmentation", "size", "train", "evaluation"), [
    ("auto", 224, PhotoTrain(224), photo(224)), ("auto", 64, SmallTrain(64), small(64)),
    ("photo", 32, PhotoTrain(32), photo(32)), ("small", 224, SmallTrain(224), small(224)),
    ("shift", 32, SmallTrain(32, flip=False), small(32)), ("none", 224, photo(224), photo(224)),
    ("none", 32, small(32), small(32))])
def test_each_augmentation_has_its_transforms(augmentation, size, train, evaluation):
    for_eval = CentreCrop(size, "bilinear", augment.usual_resize_size(augmentation, size))
    assert build_transforms(augmentation, for_eval) == (train, evaluation)


@pytest.mark.parametrize("transform", [PhotoTrain(24), photo(24), SmallTrain(24), small(24)])
@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (40, 30)])
def test_output_is_a_square_of_uint8(transform, shape):
    image = transform(picture(*shape)[0])
    assert image.shape == (24, 24, 3) and image.dtype == torch.uint8
