"""Image classifiers by name: yours (models/own.py), torchvision's, or timm's (timm_models.py); RUN/model of a run.

Initial weights: models/vision/weights.py.

Legend: B samples, C outputs, I images of a sample, O channels of a convolution, H, W height and width in pixels.
"""

import difflib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchvision.ops import StochasticDepth

from data.images.augment import CentreCrop
from data.images.decode import EncodedImage
from data.images.folder import ImageFolder, Sample
from data.images.index import ImageIndex
from data.labels import outputs_for
from models.blocks import load_backbone
from models.objectives import values_of
from models.output import Prediction
from models.own import IMAGE_MODELS, TEXT_MODELS
from models.trial import OWN, build_tried, notes_on_images, require_head_last
from models.vision.preprocessing import description_of, read_description
from models.vision.timm_models import build_timm, is_timm, timm_version
from models.vision.weights import initial_weights_of, read_weights, with_channels, with_more_channels
from utils.distributed.signals import end_worker_with
from utils.distributed.world import World
from utils.errors import Exit, UserError, some
from utils.hardware.cores import available_cores
from utils.settings.image_options import ModelOptions

MAX_WORKERS = 8  # processes that decode images to classify, at most one per batch
_WITH_AUXILIARY_HEADS = {"googlenet": ("aux1.", "aux2."), "inception_v3": ("AuxLogits.",)}
_DESCRIPTION = {"architecture", "classes", "image_size", "resize_size", "interpolation", "mean", "std"}  # config.json


def build_classifier(
    architecture: str, num_classes: int, image_size: int = 224, num_images: int = 1, dropout: float | None = None,
    drop_path: float | None = None
) -> nn.Module:
    """A classifier with fresh weights from torch's default generator; without auxiliary heads.

    Its input is [B, 3 * num_images, image_size, image_size] float, its output [B, num_classes]. Raises UserError (64)
    for an unknown name, or one that does not take images of that size.
    """
    def build() -> nn.Module:
        build_named = build_timm if is_timm(architecture) else _build_named
        model = build_named(architecture, num_classes, image_size, dropout, drop_path)
        widen_input(model, num_images)
        return model

    # try it on black images; one is enough for a library's
    is_own = architecture in IMAGE_MODELS
    images = torch.zeros(1 + is_own, 3 * num_images, image_size, image_size)
    way_out = f"use another --image-size than {image_size}, or resnet18, which takes images of any size"
    model = build_tried(architecture, build, (images,), num_classes, OWN if is_own else way_out)

    # MNASNet's own loading refuses weights without torch's version metadata, which .safetensors do not have.
    if isinstance(model, torchvision.models.MNASNet):
        model._load_from_state_dict = partial(nn.Module._load_from_state_dict, model)
    return model


def require_known(architecture: str, is_pretrained: bool = False) -> None:
    """Raise UserError (64) for a name that neither models/own.py nor torchvision has.

    is_pretrained: published weights are asked for, which a model of models/own.py does not have.
    """
    known = [*IMAGE_MODELS, *torchvision.models.list_models(module=torchvision.models)]
    if architecture not in known and architecture.lower() not in known:
        if architecture in TEXT_MODELS:
            raise UserError(f"--model {architecture}: models/own.py has it for texts; give a --task with texts, or"
                            " another --model")
        close = difflib.get_close_matches(architecture.lower(), known, n=3) or ["resnet18", "resnet50"]
        raise UserError(f"--model {architecture}: neither torchvision {torchvision.__version__} nor models/own.py has"
                        f" it, and there is no such folder; did you mean {', '.join(close)}?")
    if architecture in IMAGE_MODELS and is_pretrained:
        raise UserError(f"--pretrained: --model {architecture} is of models/own.py, and has no published weights; give"
                        " a file with --weights, or leave --pretrained out to train from scratch")


def _build_named(
    architecture: str, num_classes: int, image_size: int, dropout: float | None, drop_path: float | None
) -> nn.Module:
    require_known(architecture)
    options = {}
    if architecture.lower() in _WITH_AUXILIARY_HEADS:
        options = {"aux_logits": False, "init_weights": True}
    if architecture.lower().startswith("vit_"):
        options["image_size"] = image_size
    if architecture in IMAGE_MODELS:
        model = IMAGE_MODELS[architecture](num_classes)
    else:
        model = torchvision.models.get_model(architecture, weights=None, num_classes=num_classes, **options)
    if dropout is not None:
        set_dropout(model, dropout)
    if drop_path is not None:
        set_drop_path(model, drop_path)
    return model


def set_dropout(model: nn.Module, probability: float) -> None:
    """Every dropout but that of attention weights. Raises UserError (64) if the model has none."""
    found = 0
    for part in model.modules():
        if isinstance(part, nn.MultiheadAttention):  # its attribute is about attention weights
            continue
        name = "p" if isinstance(part, nn.Dropout) else "dropout" if hasattr(part, "dropout") else "drop_rate"
        if isinstance(getattr(part, name, None), float | int):
            setattr(part, name, probability)
            found += 1
    if not found:
        raise UserError("--dropout: --model has no dropout; leave it out, or use another, such as efficientnet_b0")


def set_drop_path(model: nn.Module, probability: float) -> None:
    """Stochastic depth (Huang et al., 2016): `probability` at the last block, the others in torchvision's proportions.

    Raises UserError (64) if the model has none.
    """
    paths = [part for part in model.modules() if isinstance(part, StochasticDepth)]
    if not paths:
        raise UserError("--drop-path: --model has no stochastic depth; leave it out, or use convnext_tiny")
    largest = max(part.p for part in paths)
    for part in paths:
        part.p = probability * part.p / largest


def widen_input(model: nn.Module, num_images: int) -> None:
    """Let the first convolution take 3 * num_images channels: those of the first image, then those of the others.

    The weights of the others begin at 0: the model begins as one of the first image alone.
    """
    if num_images > 1:
        first = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
        if first is None:
            raise UserError(f"--image-column names {num_images} images, and --model begins with no convolution that"
                            " could take them; use another model, such as resnet50")
        first.in_channels = 3 * num_images
        first.weight = nn.Parameter(with_channels(first.weight.detach(), first.in_channels))      # [O, 3 * I, k, k]


def build_model(
    config: ModelOptions, classes: tuple[str, ...], image_size: int, initial_weights: bool, world: World,
    own_head: bool = False, num_images: int = 1
) -> tuple[nn.Module, str, bool, list[str]]:
    """The model that `config` names for `classes`, channels_last on the CPU. Collective.

    Returns its architecture, too; whether its head is new, on weights that were loaded; and notes for the user.

    classes: names of its outputs. initial_weights: load those that `config` names; False where a checkpoint will
    replace them. own_head: the head is theirs, too. num_images: of a sample. Raises UserError: 64 for an unknown name
    or weights that do not fit, 65 if their classes are others and own_head, 66 for missing or unreachable files.
    """
    # the model
    described = description_of(config.model, world)  # Collective.
    folder = Path(config.model) if described else None
    architecture = described.get("architecture", config.model)
    if is_timm(architecture):
        world.require_same(world.everywhere(timm_version), "timm's version")  # Collective.
    model = world.everywhere(lambda: build_classifier(  # Collective.
        architecture, len(classes), image_size, num_images, config.dropout, config.drop_path))
    weights, notes, new_head = None, [], []
    if architecture in IMAGE_MODELS and initial_weights and not own_head:
        images = torch.zeros(2, 3 * num_images, image_size, image_size)
        world.everywhere(lambda: require_head_last(architecture, model, (images,)))  # Collective.
        notes += notes_on_images(architecture, model, images.shape[1:])
    is_library = config.pretrained and not config.weights and not folder
    if architecture.lower() in _WITH_AUXILIARY_HEADS:
        model.transform_input = described.get("transform_input", is_library)  # the library's weights take -1..1
        if model.transform_input and num_images > 1:
            raise UserError(f"--model {config.model} with these weights takes one image of a sample, and --image-column"
                            f" names {num_images}; use another model, such as resnet50")

    # its weights, without auxiliary heads
    if initial_weights:
        weights, more = initial_weights_of(config, model, architecture, image_size, folder, world)  # Collective.
        notes += more
    if weights is not None:
        auxiliary = _WITH_AUXILIARY_HEADS.get(architecture.lower(), ())
        weights = {name: param for name, param in weights.items() if not name.startswith(auxiliary)}
        if num_images > 1:
            weights = with_more_channels(model, weights)
        # Folders are sorted as words, and may be named by the outputs of published weights (ImageNetV2's are).
        known, numbers = described.get("classes"), [*map(str, range(len(classes)))]
        is_numbered = set(classes) == set(numbers) and (is_library or len(classes) == 1000)
        names = known or (numbers if is_numbered else classes)
        outputs = outputs_for(names, classes)
        new_head = load_backbone(model, weights, outputs)
        last = [name for name, _ in model.named_parameters()][-1]  # of the head: [C, ...]
        found = some(known) if known else f"{len(weights[last])} classes" if last in weights else "no classes"
        if own_head and new_head:
            raise UserError(f"--eval-only: the weights are for {found}, and --data has {some(classes)}; give data with"
                            " the classes of the weights, or train on yours first (without --eval-only)", Exit.BAD_DATA)
        if new_head:
            notes.append(f"new weights in the head: {some(new_head)}; those that were loaded are for {found}")
        elif not known:
            notes.append(f"the head is kept: its {len(classes)} outputs without names are taken for {some(names)}")
        elif outputs != sorted(outputs):
            notes.append("the head is kept: it has the same classes in another order, and its outputs are reordered")
    return model.to(memory_format=torch.channels_last), architecture, bool(new_head), notes


def save_model_folder(weights: dict[str, Tensor], description: dict[str, Any], folder: Path) -> None:
    """RUN/model: model.safetensors, and config.json with the architecture, the classes and the preprocessing."""
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(description, indent=1))


def load_model_folder(folder: Path) -> tuple[nn.Module, dict[str, Any]]:
    """The model that save_model_folder wrote, in evaluation mode, and its description.

    Raises UserError: 66 if there is none, 65 if it is damaged.
    """
    description = read_description(folder)
    if missing := _DESCRIPTION - set(description):
        raise UserError(f"{folder} is of no image run: config.json lacks {some(sorted(missing))}", Exit.NO_INPUT)
    model = build_classifier(description["architecture"], len(description["classes"]), description["image_size"],
                             description.get("num_images", 1))
    if description.get("transform_input"):
        model.transform_input = True
    try:
        model.load_state_dict(read_weights(folder / "model.safetensors", "the model folder"))
    except RuntimeError as error:
        *_, reason = str(error).split("\n\t")[:2]
        is_own = description["architecture"] in IMAGE_MODELS
        source = "the network in models/own.py; use the one that it was trained with" if is_own else "config.json"
        raise UserError(f"{folder}: {reason[:200]}: model.safetensors does not fit {source}", Exit.BAD_DATA) from None
    return model.to(memory_format=torch.channels_last).eval(), description


def image_set(description: dict[str, Any], paths: Sequence[str]) -> ImageFolder:
    """Images as the model sees them, of an image each, or of several with commas between them."""
    num_images = description.get("num_images", 1)
    encoded = [os.fsencode(path.replace(",", "\0") if num_images > 1 else path) for path in paths]
    index = ImageIndex.of("", encoded, np.zeros(len(paths), np.int32), num_images)
    transform = CentreCrop(description["image_size"], description["interpolation"], description["resize_size"])
    return ImageFolder(index, transform, 0, partial(EncodedImage, white=description["white_value"]))


def classify_images(
    model: nn.Module, description: dict[str, Any], paths: Sequence[str], device: torch.device, batch_size: int,
    is_wanted: Callable[[int], bool] = lambda number: True
) -> Iterator[list[Prediction]]:
    """Batches of predictions, in the order of `paths`: see image_set.

    is_wanted: asked about the number of each batch; the others are empty.
    """
    # loading
    model.to(device)
    batches = [range(first, min(first + batch_size, len(paths))) for first in range(0, len(paths), batch_size)]
    batches = [places if is_wanted(number) else () for number, places in enumerate(batches)]
    wanted = [[(0, place) for place in places] for places in batches if places]
    cores = available_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # the processes of a node share them
    workers = max(0, min(MAX_WORKERS, cores, len(wanted) - 1))

    def collate(samples: Sequence[Sample]) -> tuple[Tensor, list[str | None]]:
        images = torch.stack([sample.image for sample in samples])                # uint8 [B, H, W, 3 * I]
        if workers:  # torch would do it in a thread whose errors reach nobody: the batch would never come
            images.share_memory_()  # raises RuntimeError if there is too little, or ulimit -f is less
        return images, [sample.bad for sample in samples]

    loader = DataLoader(image_set(description, paths), batch_sampler=wanted, num_workers=workers, collate_fn=collate,
                        multiprocessing_context="fork" if workers else None,
                        worker_init_fn=partial(end_worker_with, os.getpid()))

    # forward
    mean, std = (description[name] * description.get("num_images", 1) for name in ("mean", "std"))
    mean, std = (255 * torch.tensor(values, device=device).view(1, -1, 1, 1) for values in (mean, std))
    loaded = iter(loader)
    for places in batches:
        if not places:
            yield []
            continue
        images, bad = next(loaded)                                                # uint8 [B, H, W, 3 * I]
        with torch.inference_mode():
            logits = model((images.to(device).permute(0, 3, 1, 2) - mean) / std)  # [B, C]
        yield [Prediction(paths[place], None if reason else values, reason or "")
               for place, values, reason in zip(places, values_of(description, logits), bad, strict=True)]
