"""The settings of image tasks. A setting is one line, as in run_options.py."""

from typing import Literal

from utils.settings.option import NAME_OR_PATH, option, options


@options
class ImageOptions:
    """Images"""

    image_size: int = option(224, "side of the square that the model sees, in pixels", at_least=1)
    augmentation: Literal["auto", "photo", "small", "shift", "none"] = option(
        "auto", "photo = random resized crop and flip; small = padded crop and flip; shift = padded crop;"
        " auto = photo above 64 pixels, else small")
    mean: tuple[float, float, float] = option(
        (0.485, 0.456, 0.406), "channel means of the training pixels, in 0..1", rare=True)
    std: tuple[float, float, float] = option(
        (0.229, 0.224, 0.225), "channel standard deviations of the training pixels, in 0..1", above=0, rare=True)
    interpolation: Literal["bilinear", "bicubic"] = option(
        "bilinear", "how images are resized (with antialiasing)", rare=True)


@options
class ModelOptions:
    """Model"""

    model: str = option(
        "resnet18", "name of a torchvision classifier, or the model folder of another run", path=NAME_OR_PATH)
    pretrained: bool = option(
        False, "start from the library's weights of --model NAME, or from those in --model FOLDER; the head is new if"
        " the classes differ")
    weights: str | None = option(
        None, "file with weights of --model NAME (.pth or .safetensors); implies --pretrained", path=NAME_OR_PATH)
