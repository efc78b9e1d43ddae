import io
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from data.images import augment
from data.images.augment import CentreCrop, PhotoTrain, SmallTrain, build_transforms
from data.images.decode import EncodedImage
from tests.conftest import ROOT
from utils.errors import UserError
from utils.settings.image_options import AugmentOptions

torch.set_num_threads(1)
LOOK = {"interpolation": v2.InterpolationMode.BILINEAR, "fill": [124, 116, 104]}
MEAN = (0.485, 0.456, 0.406)


def photo(size: int) -> CentreCrop:
    """Evaluation of a photo."""
    return CentreCrop(size, "bilinear", round(size * 256 / 224))


def small(size: int) -> CentreCrop:
    """Evaluation of a small image."""
    return CentreCrop(size, "bilinear", size)


def transforms_of(augmentation: str, size: int, *options: object):
    """build_transforms with the usual evaluation."""
    usual = CentreCrop(size, "bilinear", augment.usual_resize_size(augmentation, size))
    return build_transforms(augmentation, usual, *options)


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
@pytest.mark.parametrize("size, resize_size", [(112, 97), (113, 97), (112, 96)])
def test_a_crop_larger_than_the_image_is_padded_as_torchvision_does(shape, size, resize_size):
    """timm's crop_pct above 1, of VOLO's weights for example."""
    encoded, pixels = picture(*shape)
    theirs = v2.CenterCrop(size)(v2.Resize(resize_size, antialias=True)(pixels)).permute(1, 2, 0)
    ours = CentreCrop(size, "bilinear", resize_size)(encoded)
    assert ours.is_contiguous() and ours.shape == theirs.shape and (ours.int() - theirs.int()).abs().max() <= 1


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
        box = augment.random_box(encoded.height, encoded.width)
        torch.manual_seed(seed)
        PhotoTrain(96)(encoded)
        (height, width), _ = sizes[-1]
        # a box cut to whole pixels of the reduced image may lose one
        assert height >= min(95, box[2]) and width >= min(95, box[3])


def test_long_images_are_cut_before_they_are_resized():
    for shape in ((1, 20_000), (20_000, 1)):
        assert photo(224)(picture(*shape)[0]).shape == (224, 224, 3)


@pytest.mark.parametrize("interpolation", MODES)
def test_an_image_that_has_its_size_is_copied_with_the_bits_of_resizing(interpolation):
    encoded, pixels = picture(40, 30)
    same = torch.nn.functional.interpolate(pixels[None], (40, 30), mode=interpolation, antialias=True)[0]
    found = augment.resized(encoded, (0, 0, 40, 30), (40, 30), interpolation)
    assert torch.equal(found.permute(2, 0, 1), same) and found.is_contiguous()
    found.zero_()
    assert torch.equal(encoded.pixels().permute(2, 0, 1), pixels)


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
    ("shift", 32, SmallTrain(32, flip=False), small(32)), ("crop", 32, PhotoTrain(32, flip=False), photo(32)),
    ("none", 224, photo(224), photo(224)),
    ("none", 32, small(32), small(32))])
def test_each_augmentation_has_its_transforms(augmentation, size, train, evaluation):
    assert transforms_of(augmentation, size) == (train, evaluation)


def test_a_random_crop_is_torchvisions():
    encoded, pixels = picture(300, 451)
    ours, _ = transforms_of("crop", 64)
    for seed in range(8):
        torch.manual_seed(seed)
        theirs = v2.RandomResizedCrop(64, antialias=True)(pixels).permute(1, 2, 0)
        torch.manual_seed(seed)
        assert (ours(encoded).int() - theirs.int()).abs().max() <= 1


@pytest.mark.parametrize(("options", "theirs"), [
    ({"auto_augment": "randaugment"}, [v2.RandAugment(2, 9, **LOOK)]),
    ({"auto_augment": "trivialaugment"}, [v2.TrivialAugmentWide(**LOOK)]),
    ({"random_erasing": 0.5}, [v2.RandomErasing(0.5, value=(124, 116, 104))]),
    ({"auto_augment": "randaugment", "random_erasing": 1.0},
     [v2.RandAugment(2, 9, **LOOK), v2.RandomErasing(1.0, value=(124, 116, 104))])])
def test_what_comes_after_the_crop_is_torchvisions(options, theirs):
    encoded, _ = picture(60, 40)
    ours, evaluation = transforms_of("small", 32, AugmentOptions(**options), MEAN)
    changed = 0
    for seed in range(20):
        torch.manual_seed(seed)
        pixels = crop = SmallTrain(32)(encoded)
        for transform in theirs:
            pixels = transform(pixels.permute(2, 0, 1)).permute(1, 2, 0)
        torch.manual_seed(seed)
        assert torch.equal(ours(encoded), pixels)
        changed += not torch.equal(pixels, crop)
    assert changed > 3 and evaluation == small(32)


def test_erased_pixels_are_nearly_zero_after_normalisation():
    ours, _ = transforms_of("none", 32, AugmentOptions(random_erasing=1.0), MEAN)
    torch.manual_seed(0)
    pixels = ours(picture(32, 32)[0]).float() / 255 - torch.tensor(MEAN)
    erased = (pixels.abs() <= 0.5 / 255 + 1e-6).all(dim=2)
    assert 0.02 * 32 * 32 - 32 < erased.sum() < 0.33 * 32 * 32 + 32


@pytest.mark.parametrize("options", [
    {}, {"auto_augment": "randaugment"}, {"auto_augment": "trivialaugment"}, {"random_erasing": 0.5},
    {"auto_augment": "trivialaugment", "random_erasing": 0.5}])
@pytest.mark.parametrize("augmentation", ["photo", "small", "none"])
def test_random_choices_come_from_torchs_default_generator_alone(augmentation, options):
    """Python's and numpy's generators, and a change of the number of threads, change nothing."""
    encoded, _ = picture(60, 40)
    transform, _ = transforms_of(augmentation, 32, AugmentOptions(**options), MEAN)
    found = []
    for other in (1, 2):
        random.seed(other)
        np.random.seed(other)
        torch.set_num_threads(other)
        torch.manual_seed(0)
        found.append(torch.stack([transform(encoded) for _ in range(20)]))
        assert torch.get_num_threads() == other
    torch.set_num_threads(1)
    assert torch.equal(*found)
    if options or augmentation != "none":
        assert len({image.numpy().tobytes() for image in found[0]}) > 5


def test_erasing_a_part_of_one_pixel_is_refused():
    with pytest.raises(UserError, match="use a larger --image-size"):
        transforms_of("auto", 1, AugmentOptions(random_erasing=0.1))


@pytest.mark.long
def test_torchvisions_transforms_are_imported_only_if_used():
    program = ("import sys\nfrom data.images.augment import AugmentOptions, CentreCrop, build_transforms\n"
               "crop = CentreCrop(224, 'bilinear', 256)\nbuild_transforms('auto', crop)\n"
               "before = 'torchvision.transforms.v2' in sys.modules\n"
               "build_transforms('auto', crop, AugmentOptions(random_erasing=0.5))\n"
               "print(before, 'torchvision.transforms.v2' in sys.modules)")
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False True\n"


@pytest.mark.parametrize("transform", [
    PhotoTrain(24), photo(24), SmallTrain(24), small(24), transforms_of("photo", 24, AugmentOptions(
        auto_augment="randaugment", random_erasing=1.0), MEAN)[0]])
@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (40, 30)])
def test_output_is_a_square_of_uint8(transform, shape):
    image = transform(picture(*shape)[0])
    assert image.shape == (24, 24, 3) and image.dtype == torch.uint8 and image.is_contiguous()
