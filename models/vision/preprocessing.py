"""How images are prepared for a model: as its weights were evaluated, else as suits the images themselves.

Wrong preprocessing costs accuracy without a word: EfficientNet-Lite0 has 88 % of 1,000 photos with its own, and 77 %
with another model's.
"""

import json
import statistics
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torchvision
from PIL import Image

from data.images.augment import CentreCrop, usual_resize_size
from data.images.decode import WHITES, EncodedImage, UnreadableImage, left_out, opened
from data.images.index import ImageIndex
from models.vision.timm_models import is_timm, timm_preprocessing
from utils.distributed.world import World, is_folder
from utils.errors import Exit, UserError, counted
from utils.rundir.resolved import UNSET
from utils.rundir.run import Run
from utils.settings.config import flag
from utils.settings.image_options import ImageOptions, ModelOptions
from utils.settings.option import is_model_folder

IMAGENET = {"interpolation": "bilinear", "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
USUAL_SIZE, SIZE_STEP = 224, 32  # px: from scratch; smaller images get a multiple of the step
MEASURED = 1000  # images, at most, whose size is asked
DECODED = 64  # samples, at most, whose values of 16 bits are looked at


@dataclass(frozen=True)
class Preprocessing:
    """What happens to an image before the model sees it, after augmentation."""

    image_size: int  # px: side of the square that the model sees
    resize_size: int  # px: the shorter side in an evaluation, before the centre is cut out
    interpolation: str
    mean: list[float]  # of the channels, in 0..1
    std: list[float]
    white_value: int = WHITES[-1]  # of files with 16 bits

    @property
    def for_eval(self) -> CentreCrop:
        """The transform of an evaluation."""
        return CentreCrop(self.image_size, self.interpolation, self.resize_size)

    def __str__(self) -> str:
        mean, std = (" ".join(f"{value:g}" for value in values) for values in (self.mean, self.std))
        return f"images of {self.image_size} px, {self.interpolation}, mean {mean}, std {std}"


def resolve_preprocessing(
    images: ImageOptions, model: ModelOptions, index: ImageIndex, run: Run, world: World
) -> tuple[Preprocessing, list[str]]:
    """The preprocessing of this run, kept from its first start on; and notes for the user. Collective.

    index: the training images. Raises UserError (66) if a model folder cannot be read.
    """
    # what is known about the weights
    known = evaluated = None
    if run.resolved.image_size is UNSET and (model.pretrained or model.weights):
        known, evaluated = world.on_rank_zero(lambda: [  # Collective.
            preprocessing_of_weights(model, for_test) for for_test in (not run.is_there, True)])
    usual, mode = known or IMAGENET, (evaluated or {}).get("crop_mode", "center")

    # the settings
    size = run.resolve("image_size", images.image_size, lambda: (
        known["image_size"] if known else world.on_rank_zero(lambda: size_for(index))))  # Collective.
    given = {"interpolation": "auto", "mean": _plain(images.mean), "std": _plain(images.std)}
    values = {name: run.resolve(name, value, partial(usual.get, name)) for name, value in given.items()}
    resize_size = run.resolve("resize_size", "auto", lambda: (
        round(size * known["resize_size"] / known["image_size"]) if known else
        usual_resize_size(images.augmentation, size)))
    lost = world.on_rank_zero(lambda: notes_of_files(index)) if run.resolved.white_value is UNSET else []  # Collective.
    # weights that are evaluated as they are keep what they were trained with
    white = run.resolve("white_value", "auto", lambda: (
        (run.is_read_only and (known or {}).get("white_value"))
        or world.on_rank_zero(lambda: white_for(index))))  # Collective.
    found = Preprocessing(size, resize_size, **values, white_value=white)

    # notes
    given = asdict(found)
    known, evaluated = (each and {name: each.get(name) for name in given} | {"white_value": white}
                        for each in (known, evaluated))
    notes = [f"{found}{', as the weights were evaluated' if evaluated == given else ''}", *lost]
    if evaluated and evaluated != given:
        differ = {name: evaluated[name] for name in ("image_size", *IMAGENET) if evaluated[name] != given[name]}
        words = " ".join(f"{flag(name)} {' '.join(map(str, value)) if isinstance(value, list) else value}"
                         for name, value in differ.items())
        words = words or f"another crop: the shorter side had {evaluated['resize_size']} px"
        more = ", and are fine-tuned as timm trained them" if known == given else ""
        notes.append(f"the weights of --model {model.model} were evaluated with {words}{more}")
    if mode != "center":
        notes.append(f"the weights were evaluated on whole images (crop mode `{mode}`); here the centre is cut out")
    if white != WHITES[-1]:
        notes.append(f"files with 16 bits are read as {white.bit_length()} bits: 0 is black, {white} and above white")
    return found, notes


def preprocessing_of_weights(model: ModelOptions, for_test: bool = False) -> dict[str, Any] | None:
    """What the weights that `model` names were evaluated with, as fields of Preprocessing; None if nobody knows.

    for_test: False for what timm trains them with, which may differ.

    Raises UserError: 66 if --model is a folder of something else, 64 for a name that timm does not have.
    """
    if is_model_folder(model.model):
        description = read_description(Path(model.model))
        names = [item.name for item in fields(Preprocessing)]
        return {name: description[name] for name in names} if "mean" in description else None
    if is_timm(model.model):
        return timm_preprocessing(model.model, for_test)
    if model.model.lower() not in torchvision.models.list_models(module=torchvision.models):
        return None  # require_known refuses it
    weights = list(torchvision.models.get_model_weights(model.model))
    if not weights:
        return None
    preset = type(weights[0]).DEFAULT.transforms()
    return {"image_size": preset.crop_size[0], "resize_size": preset.resize_size[0],
            "interpolation": preset.interpolation.value, "mean": list(preset.mean), "std": list(preset.std)}


def size_for(index: ImageIndex) -> int:
    """The side of the square for a model from scratch, in pixels: 224, or less for smaller images.

    Less: the median shorter side of up to MEASURED images, rounded up to a multiple of 32.
    """
    sides = []
    for position in range(0, len(index), -(-len(index) // MEASURED)):
        try:
            with opened(index.path(position)) as file, Image.open(file) as image:  # reads the header
                sides.append(min(image.size))
        except (OSError, ValueError, SyntaxError):
            continue  # the training says so when it reads it
    side = statistics.median_low(sides) if sides else USUAL_SIZE
    return min(USUAL_SIZE, -(-side // SIZE_STEP) * SIZE_STEP)


def white_for(index: ImageIndex) -> int:
    """What is white in all files with 16 bits, whatever their column: the smallest of WHITES that no value exceeds.

    Of some_files(). 65535 if none has 16 bits.
    """
    whites = []
    for path in some_files(index):
        with suppress(UnreadableImage):  # the training says so when it reads it
            whites.append(EncodedImage(path).white or 0)  # 0: a file of 8 bits
    return max(whites, default=0) or WHITES[-1]


def some_files(index: ImageIndex) -> list[str]:
    """The files of up to DECODED samples, without JPEGs, which have 8 bits and one page, and are not opened."""
    return [path for position in range(0, len(index), -(-len(index) // DECODED)) for path in index.paths(position)
            if not path.lower().endswith((".jpg", ".jpeg", ".jpe", ".jfif"))]


def notes_of_files(index: ImageIndex) -> list[str]:
    """What is not used of files with several pages or frames, or more bands than colours. Opens some_files()."""
    paths = some_files(index)
    lost = Counter(filter(None, map(left_out, paths)))
    return [f"{number} of {counted(len(paths), 'image file')} that were opened have {what}"
            for what, number in lost.items()]


def read_description(folder: Path) -> dict[str, Any]:
    """config.json of a model folder: architecture, classes and preprocessing. Raises UserError (66)."""
    try:
        description = json.loads((folder / "config.json").read_text())
        if "photo" in description:  # of a version before `resize_size`
            size = description["image_size"]
            description["resize_size"] = usual_resize_size("photo" if description["photo"] else "small", size)
        return {"white_value": WHITES[-1]} | description | {"architecture": description["architecture"]}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{folder} is not a model folder of an image run ({type(error).__name__}: {error}): name one,"
                        " such as RUN/model", Exit.NO_INPUT) from None


def description_of(model: str, world: World) -> dict[str, Any]:
    """read_description() of --model, the same on all nodes; empty if it names no folder. Collective."""
    is_there = is_folder(model, world)  # Collective.
    return world.everywhere(lambda: read_description(Path(model))) if is_there else {}  # Collective.


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value  # as auto.json has it
