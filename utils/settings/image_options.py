"""The settings of image tasks. A setting is one line, as in run_options.py.

Tests: tests/unit/utils/settings/test_config.py
"""

from typing import Literal

from utils.settings.option import NAME_OR_PATH, Auto, Kept, is_model_folder, option, options


@options
class ImageOptions:
    """Images"""

    image_size: int | Auto = option("auto", "side of the model's square input, in pixels; auto = what the weights were"
                                    " evaluated with, else 224, or less for smaller images", at_least=1, fixed=True,
                                    in_branch=Kept.SAMPLES)
    augmentation: Literal["auto", "photo", "crop", "small", "shift", "none"] = option(
        "auto", "photo = random resized crop and flip; small = padded crop and flip; crop, shift = the same"
        " without flip; auto = photo above 64 pixels, else small")
    mean: tuple[float, float, float] | Auto = option(
        "auto", "channel means, in 0..1; auto = as the weights were evaluated, else ImageNet's", fixed=True, rare=True,
        in_branch=Kept.SAMPLES)
    std: tuple[float, float, float] | Auto = option(
        "auto", "channel standard deviations, in 0..1; auto = as for --mean", above=0, fixed=True, rare=True,
        in_branch=Kept.SAMPLES)
    cache: Literal["none", "jpeg", "raw"] = option(
        "none", "pack the images, smaller, into one file, once; raw loads fastest, jpeg takes a tenth of the room",
        in_branch=Kept.SAMPLES)
    image_column: str = option("auto", "column with the image's path, relative to the table; A,B = several images per"
                               " sample, which the model gets as further channels; auto = image, path, file, filename"
                               " or file_name, else the only free column", rare=True, in_branch=Kept.SAMPLES)


@options
class AugmentOptions:
    """Augmentation of images, in training alone"""

    auto_augment: Literal["none", "randaugment", "trivialaugment"] = option(
        "none", "random changes of colour and shape: RandAugment (2 of strength 9), or TrivialAugmentWide")
    random_erasing: float = option(
        0.0, "probability to replace a rectangle of an image by the channel means", at_least=0, at_most=1, rare=True)


@options
class MixOptions(AugmentOptions):
    """Augmentation of images, in training alone"""

    mixup: float = option(0.0, "MixUp of each micro-batch, by weights drawn from Beta(A, A); with --cutmix, one of the"
                          " two at random; 0 = off", at_least=0, at_most=100)
    cutmix: float = option(0.0, "CutMix of each micro-batch, with areas from Beta(A, A); with --mixup, one of the two"
                           " at random; 0 = off", at_least=0, at_most=100)


@options
class ModelOptions:
    """Model"""

    model: str = option("resnet18", "a classifier of torchvision, timm/NAME, or a name in models/own.py; or another"
                        " run's model folder", path=NAME_OR_PATH, in_branch=Kept.MODEL)
    pretrained: bool = option(False, "start from the library's weights of --model NAME; the weights in --model FOLDER"
                              " are used unless --no-pretrained is given; the head is new if the classes differ",
                              in_branch=Kept.MODEL)
    weights: str | None = option(
        None, "file with weights of --model NAME (.pth or .safetensors); implies --pretrained", path=NAME_OR_PATH,
        in_branch=Kept.MODEL)
    dropout: float | None = option(None, "probability of dropout, but that of attention weights; default: the model's"
                                   " own", at_least=0, below=1, rare=True)
    drop_path: float | None = option(None, "stochastic depth: probability of skipping the last block, less for earlier"
                                     " ones; default: the model's own", at_least=0, below=1, rare=True)

    @staticmethod
    def has_weights(model: str) -> bool:
        """Whether a --model comes with weights, so that --pretrained is the default."""
        return is_model_folder(model)
