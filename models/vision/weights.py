"""Weights for image classifiers: of a file, of another run's model folder, or the library's own.

Tests: tests/unit/models/vision/test_timm_models.py
"""

import argparse
import hashlib
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from pickle import UnpicklingError
from urllib.parse import urlparse

import torch
import torchvision
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from models.vision.timm_models import converted, is_timm, num_outputs, timm_weights, wordnet_ids
from utils.distributed.world import World
from utils.errors import Exit, UserError, first_line, say, some
from utils.settings.image_options import ModelOptions

_FORMER_NAMES = {
    # in the library's own files; the library renames DenseNet's and ViT's as it loads them
    r"(denselayer\d+\.(?:norm|conv))\.([12])\.": r"\1\2.",
    r"\.mlp\.linear_1\.": ".mlp.0.", r"\.mlp\.linear_2\.": ".mlp.3.",
    # of torch's wrappers, before any part of a name
    r"\b_(orig_mod|fsdp_wrapped_module|checkpoint_wrapped_module)\.": ""}


def read_weights(path: Path, source: str) -> dict[str, Tensor]:
    """The tensors of a file, by name. source: the flag that names it, for messages. Raises UserError (65, 66)."""
    # read
    try:
        if path.suffix == ".safetensors":
            weights = load_file(path)
        else:
            # timm's and torchvision's trainers save their arguments, too; to make a Namespace runs no code of the file
            with torch.serialization.safe_globals([argparse.Namespace]):
                weights = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"{source}: there is no file {path}", Exit.NO_INPUT) from None
    except Exception as error:  # unpickling garbage raises almost anything
        reason = first_line(error)
        if isinstance(error, UnpicklingError):  # torch's own text suggests to run the code in the file
            reason = "it is damaged, or holds more than tensors"
        raise UserError(f"{source}: {path} cannot be read as weights (.safetensors, or a .pth of tensors): {reason}",
                        Exit.BAD_DATA) from None

    # their names, and those of today
    if not isinstance(weights, dict):
        raise UserError(f"{source}: {path} holds a {type(weights).__name__}, not weights by name", Exit.BAD_DATA)
    weights = dict(_tensors(weights))
    for former, today in _FORMER_NAMES.items():
        weights = {re.sub(former, today, name): param for name, param in weights.items()}
    return weights


def _tensors(weights: dict) -> Iterator[tuple[str, Tensor]]:
    """Those in a dictionary, and in the dictionaries in it: trainers save more than the weights."""
    for key, value in weights.items():
        if isinstance(value, Tensor):
            yield str(key), value
        elif isinstance(value, dict) and isinstance(key, str):
            yield from ((f"{key}.{name}", param) for name, param in _tensors(value))


def unwrapped(weights: dict[str, Tensor], own: Collection[str]) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors of a model with the names `own`, without what stands before these names; and notes.

    That is `module.` of DistributedDataParallel, `model.` of a LightningModule, `state_dict.` of a dictionary, or any
    other prefix that makes most of the names those of the model. If several do, an average's is the last choice.
    """
    cuts = [(name[:at], name[at:]) for name in weights for at in (0, *(dot.end() for dot in re.finditer(r"\.", name)))]
    counts = Counter(prefix for prefix, rest in cuts if rest in own)
    if 2 * max(counts.values(), default=0) > len(own):
        prefix = min(counts, key=lambda prefix: (-counts[prefix], "ema" in prefix, len(prefix), prefix))
    else:  # another library's names: what all of them begin with
        prefix = max((prefix for prefix, count in Counter(prefix for prefix, _ in cuts).items()
                      if count == len(weights)), key=len, default="")
    unused = [name for name in weights if not name.startswith(prefix)]
    notes = [f"of the file of weights {prefix}* is used, and this is not: {some(unused)}"] if unused else []
    return {name.removeprefix(prefix): param for name, param in weights.items() if name.startswith(prefix)}, notes


def initial_weights_of(
    config: ModelOptions, model: nn.Module, architecture: str, image_size: int, folder: Path | None, world: World
) -> tuple[dict[str, Tensor] | None, list[str]]:
    """The weights that --weights or --pretrained ask for, from --model's `folder` or the library. Collective.

    model: what they are for. Returns notes for the user, too.
    """
    if not (config.weights or config.pretrained):
        return None, []
    if not (config.weights or folder):
        if is_timm(architecture):
            return timm_weights(architecture, image_size, world), []  # Collective.
        return _library_weights(architecture, world), []  # Collective.
    file, source = (Path(config.weights), "--weights") if config.weights else (folder / "model.safetensors", "--model")
    weights = world.everywhere(lambda: read_weights(file, source))  # Collective.
    weights, notes = unwrapped(weights, model.state_dict())
    return converted(architecture, weights, image_size) if is_timm(architecture) else weights, notes


def classes_of_weights(config: ModelOptions, described: dict, classes: Sequence[str], world: World) -> Sequence[str]:
    """The names of the outputs of the weights that are evaluated, where these have names, `classes` and others.

    described: of --model, see description_of. Its classes, in capital or small letters as `classes` are; or, where
    these are WordNet ids, those of ImageNet or a larger part of it, in the order of these ids in published weights.
    Else `classes` itself. Collective.
    """
    names = described.get("classes", [])
    if not names and all(re.fullmatch(r"n\d{8}", name) for name in classes):
        sizes = {num_outputs(config.model) if is_timm(config.model) else 1000}
        if config.weights:
            weights = world.everywhere(lambda: read_weights(Path(config.weights), "--weights"))  # Collective.
            sizes = {len(param) for param in weights.values() if param.ndim == 1}  # one is that of the head's bias
        names = wordnet_ids(sizes)
    if not set(classes) < set(names):  # as they are written
        in_data = {name.casefold(): name for name in classes}
        names = [in_data.get(name.casefold(), name) for name in names]
    return names if set(classes) < set(names) else classes


def _library_weights(architecture: str, world: World) -> dict[str, Tensor]:
    """torchvision's own weights, downloaded once per node, verified at every load. Collective.

    Raises UserError: 66 if they cannot be fetched, 65 if the file is damaged.
    """
    # torchvision's own place for them; every file has the first digits of its sha256 in its name
    url = torchvision.models.get_model_weights(architecture).DEFAULT.url
    file = Path(torch.hub.get_dir(), "checkpoints", Path(urlparse(url).path).name)
    sha256 = torch.hub.HASH_REGEX.search(file.name)[1]

    # one process per node downloads and verifies, the others find the file
    def fetch() -> None:
        if not file.exists():
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                say(f"downloading {url} to {file}")
                torch.hub.download_url_to_file(url, str(file), sha256, progress=False)
            except (OSError, RuntimeError) as error:
                raise UserError(
                    f"--pretrained: cannot fetch {url} ({error}). Ways out: download it elsewhere and pass --weights"
                    f" FILE; or put it into {file.parent}; or train from scratch, without --pretrained",
                    Exit.NO_INPUT) from None
        with file.open("rb") as opened:
            found = hashlib.file_digest(opened, "sha256").hexdigest()[:len(sha256)]
        if found != sha256:
            raise UserError(f"--pretrained: {file} is not what torchvision published: its sha256 begins with {found},"
                            f" not {sha256}; remove it, and the next start downloads it again", Exit.BAD_DATA)

    world.on_rank_zero(fetch, per_node=True)  # Collective.
    return world.everywhere(lambda: read_weights(file, "--pretrained"))  # Collective.


def with_more_channels(model: nn.Module, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """`weights` of a model that takes one image, for a `model` that takes several: see widen_input."""
    name = next(f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Conv2d))
    own, given = model.get_parameter(name), weights.get(name)
    if given is None or given.ndim != 4 or own.shape[1] <= given.shape[1]:
        return weights
    return weights | {name: with_channels(given, own.shape[1])}


def with_channels(kernels: Tensor, num_channels: int) -> Tensor:
    """`kernels` [O, less, k, k] of a convolution with zeros for further channels: [O, num_channels, k, k]."""
    return F.pad(kernels, (0, 0, 0, 0, 0, num_channels - kernels.shape[1]))
