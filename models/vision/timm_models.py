"""timm's image classifiers: `--model timm/NAME`, or timm/NAME.TAG, which says which of several weights are meant.

timm is optional. It is imported here alone, and only for such a name or the names of ImageNet's classes.
"""

import difflib
import logging
import math
from collections.abc import Collection, Sequence
from contextlib import suppress
from importlib import metadata
from types import ModuleType
from typing import Any

from packaging.requirements import Requirement
from torch import Tensor, nn

from utils.distributed.world import World
from utils.errors import Exit, UserError, first_line
from utils.settings.option import own_names

PREFIX = "timm/"
NEEDED = Requirement("timm>=1.0.31,<2")  # it reads all weights without unpickling code
_REGULARIZERS = {"drop_rate": ("--dropout", "dropout"), "drop_path_rate": ("--drop-path", "stochastic depth")}


def is_timm(model: str) -> bool:
    """Whether a --model is one of timm's."""
    return model.startswith(PREFIX) and model not in own_names()


def timm_version() -> str:
    """The version of timm. Raises UserError (64) if it is missing, or not one that NEEDED allows."""
    try:
        version = metadata.version(NEEDED.name)
    except metadata.PackageNotFoundError:
        version = ""
    if not version or not NEEDED.specifier.contains(version, prereleases=True):
        found = f"timm {version} is installed" if version else "timm is not installed"
        raise UserError(f"--model {PREFIX}NAME: {found}, and this needs {NEEDED}; install it: pip install '{NEEDED}'")
    return version


def build_timm(
    model: str, num_classes: int, image_size: int, dropout: float | None = None, drop_path: float | None = None
) -> nn.Module:
    """The classifier with fresh weights from torch's default generator. dropout, drop_path: timm's own meaning of them.

    Raises UserError (64) for an unknown name, or a setting that it does not have; any error for an image size that it
    does not take.
    """
    description, given = _description(model), {"drop_rate": dropout, "drop_path_rate": drop_path}
    given = {name: value for name, value in given.items() if value is not None}
    try:
        return _create(model, description, image_size, num_classes=num_classes, **given)
    except TypeError as error:
        for name in given:
            if name in str(error):
                setting, what = _REGULARIZERS[name]
                raise UserError(f"{setting}: --model {model} has no {what}; leave it out, or use another --model"
                                f" ({PREFIX}efficientnet_b0 has it)") from None
        raise


def timm_preprocessing(model: str, for_test: bool) -> dict[str, Any]:
    """What timm prepares images with: fields of Preprocessing, and timm's crop_mode. Raises UserError (64).

    for_test: as the weights were evaluated; False: to train them. A sixth of timm's weights have another size or crop
    there.
    """
    config = _library().data.resolve_data_config(pretrained_cfg=_description(model), use_test_size=for_test)
    size = config["input_size"][-1]
    return {"image_size": size, "resize_size": math.floor(size / config["crop_pct"]),
            "interpolation": config["interpolation"], "mean": list(config["mean"]), "std": list(config["std"]),
            "crop_mode": config["crop_mode"]}


def timm_weights(model: str, image_size: int, world: World) -> dict[str, Tensor]:
    """timm's own weights, from the Hugging Face hub or its cache, for images of that size. Collective.

    Raises UserError: 64 if timm has none, 66 if they cannot be fetched.
    """
    description = _description(model)
    source = description.get("hf_hub_id") or description.get("url")
    if not source:
        raise UserError(f"--pretrained: timm has no weights of --model {model}; give a file with --weights, or leave"
                        " --pretrained out to train from scratch")

    def load() -> dict[str, Tensor]:
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it would print each of its attempts
        try:
            return _create(model, description, image_size, pretrained=True).state_dict()
        except (OSError, ValueError, RuntimeError) as error:  # the hub's own errors are OSErrors
            raise UserError(f"--pretrained: the weights of {model} cannot be loaded from {source} ({first_line(error)})"
                            ": fetch them elsewhere (hf download) and pass --weights FILE, or copy the hub's cache, or"
                            " leave --pretrained out", Exit.NO_INPUT) from None

    world.on_rank_zero(lambda: load() and None, per_node=True)  # Collective: one process of a node downloads
    return world.everywhere(load, takes_long=True)  # Collective.


def converted(model: str, weights: dict[str, Tensor], image_size: int) -> dict[str, Tensor]:
    """`weights` of a file as timm would load them: of a published file with other names, or for another image size.

    What timm does not know stays as it is.
    """
    description = _description(model)
    num_classes = len(weights.get(f"{(classifiers_of(description) or [''])[0]}.weight", ()))
    overlay = {"state_dict": weights, "num_classes": num_classes}
    try:
        return _create(model, description, image_size, num_classes=num_classes, pretrained=True,
                       pretrained_strict=True, pretrained_cfg_overlay=overlay).state_dict()
    except Exception:  # its converters expect names and shapes, and raise almost anything
        return weights


def classifiers_of(description: dict[str, Any]) -> list[str]:
    """Names of the layers that depend on the number of classes. description: a model's pretrained_cfg."""
    names = description.get("classifier") or []
    return [names] if isinstance(names, str) else list(names)


def num_outputs(model: str) -> int:
    """How many outputs timm's own weights have. Raises UserError (64)."""
    return _description(model)["num_classes"]


def wordnet_ids(sizes: Collection[int]) -> list[str]:
    """Those of the outputs of a head for ImageNet, or a larger part of it, with one of these numbers of outputs.

    Empty if there is no such head, or timm, which has the lists, is missing.
    """
    with suppress(UserError):
        _library()
        from timm.data import ImageNetInfo, infer_imagenet_subset

        subsets = filter(None, (infer_imagenet_subset({"num_classes": size}) for size in sizes))
        return next((ImageNetInfo(subset).label_names() for subset in subsets), [])
    return []


def groups_of(model: nn.Module) -> dict[str, int]:
    """The group of each parameter of one of timm's models, by name: as timm counts layers for its layer decay.

    The head is in the last group.
    """
    from timm.models import group_parameters

    return group_parameters(model, model.group_matcher(coarse=False), reverse=True)


def _library() -> ModuleType:
    timm_version()
    import timm

    return timm


def _description(model: str) -> dict[str, Any]:
    """timm's pretrained_cfg of a name: where its weights are, what they were evaluated with. Raises UserError (64)."""
    timm, name = _library(), model.removeprefix(PREFIX)
    try:
        if timm.is_model(name):
            return (timm.models.get_pretrained_cfg(name) or timm.models.PretrainedCfg()).to_dict()
        known: Sequence[str] = timm.list_models()
    except RuntimeError:  # an unknown tag
        known = timm.list_models(f"{name.partition('.')[0]}.*", include_tags=True)
    close = ", ".join(PREFIX + each for each in difflib.get_close_matches(name, known, cutoff=0.4) or ["resnet50"])
    raise UserError(f"--model {model}: timm {timm.__version__} has no such classifier; did you mean {close}?")


def _create(model: str, description: dict[str, Any], image_size: int, **options: Any) -> nn.Module:
    """timm.create_model. Models with one table of positions for all images are built for images of that size."""
    sizes = {"img_size": image_size} if description.get("fixed_input_size") else {}
    return _library().create_model(model.removeprefix(PREFIX), **sizes, **options)
