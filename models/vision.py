"""torchvision's image classifiers by name, with the library's weights, a file's, or those of another run's model folder."""

import difflib
import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from urllib.parse import urlparse

import numpy as np
import torch
import torchvision
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

from data.augment import build_eval_transform
from data.image_folder import ImageFolder, ImageIndex
from utils.distributed.world import World, is_folder
from utils.errors import Exit, UserError, say
from utils.hardware.cores import available_cores
from utils.settings.config import ImageOptions, ModelOptions, flag

MAX_WORKERS = 8  # processes that decode images to classify; one for every batch
_WITH_AUXILIARY_HEADS = {"googlenet": ("aux1.", "aux2."), "inception_v3": ("AuxLogits.",)}
_FORMER_NAMES = {  # in the library's own files, which it renames as it loads them: DenseNet's, ViT's
    r"(denselayer\d+\.(?:norm|conv))\.([12])\.": r"\1\2.", r"\.mlp\.linear_1\.": ".mlp.0.", r"\.mlp\.linear_2\.": ".mlp.3."}
_DESCRIBES = {"architecture", "classes", "image_size", "photo", "interpolation", "mean", "std"}  # what config.json must have


def build_classifier(architecture: str, num_classes: int, image_size: int = 224) -> nn.Module:
    """A torchvision classifier with fresh weights from torch's default generator; without auxiliary heads.

    Its input is [B, 3, image_size, image_size] float, its output [B, num_classes]. Raises UserError (64) for an unknown name, or
    one that does not take images of that size.
    """
    known = torchvision.models.list_models(module=torchvision.models)
    if architecture.lower() not in known:
        close = difflib.get_close_matches(architecture.lower(), known, n=3) or ["resnet18", "resnet50"]
        raise UserError(
            f"--model {architecture}: torchvision {torchvision.__version__} has no such classifier, and there is no such folder;"
            f" did you mean {', '.join(close)}?")
    options = {"aux_logits": False, "init_weights": True} if architecture.lower() in _WITH_AUXILIARY_HEADS else {}
    if architecture.lower().startswith("vit_"):
        options["image_size"] = image_size
    try:
        model = torchvision.models.get_model(architecture, weights=None, num_classes=num_classes, **options)
        with torch.no_grad():
            model.eval()(torch.zeros(1, 3, image_size, image_size))
        model.train()
    except (RuntimeError, AssertionError, ValueError) as error:
        raise UserError(f"--model {architecture} does not take images of --image-size {image_size} ({error}); use another size, or --model"
                        " resnet18, which takes any") from None
    if isinstance(model, torchvision.models.MNASNet):  # its own refuses weights without torch's version metadata, as .safetensors are
        model._load_from_state_dict = partial(nn.Module._load_from_state_dict, model)
    return model


def build_model(
    config: ModelOptions, classes: tuple[str, ...], image_size: int, initial_weights: bool, world: World
) -> tuple[nn.Module, str]:
    """The model that `config` names for `classes`, channels_last on the CPU, and its architecture's name. Collective.

    initial_weights: load those that `config` names; False where a checkpoint will replace them.
    Raises UserError: 64 for a name that does not exist or weights that do not fit, 66 for files that are missing or out of reach.
    """
    folder = Path(config.model) if is_folder(config.model, world) else None  # Collective.
    described = {"architecture": config.model}
    if folder:
        described = world.everywhere(lambda: _read_description(folder))  # Collective.
    model = build_classifier(described["architecture"], len(classes), image_size)
    is_library = config.pretrained and not config.weights and not folder
    if described["architecture"].lower() in _WITH_AUXILIARY_HEADS:
        model.transform_input = described.get("transform_input", is_library)  # the library's weights expect inputs in -1..1
    weights = None
    if initial_weights:
        weights = _named_weights(config, described["architecture"], folder, world)  # Collective.
    if weights is not None:
        auxiliary = _WITH_AUXILIARY_HEADS.get(described["architecture"].lower(), ())
        weights = {name: weight for name, weight in weights.items() if not name.startswith(tuple(auxiliary) or "\0")}
        _load_backbone(model, weights, same_classes=described.get("classes") in (None, list(classes)))
    return model.to(memory_format=torch.channels_last), described["architecture"]


def other_preprocessing(config: ModelOptions, images: ImageOptions) -> list[str]:
    """A note if the weights in --model FOLDER were trained on images prepared in another way. Raises UserError (66)."""
    folder = Path(config.model)
    if not config.pretrained or config.weights or not folder.is_dir():
        return []
    described = _read_description(folder)
    here = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(images).items()}
    differ = [name for name in here if name in described and name in _DESCRIBES and described[name] != here[name]]
    if not differ:
        return []
    found = "; ".join(f"{name} {described[name]} there and {here[name]} here" for name in differ)
    words = " ".join(f"{flag(name)} {described[name]}" for name in differ)
    return [f"--model {folder} was trained on images prepared in another way: {found}. A new run has its values with"
            f" {re.sub(r'[],[]', '', words)}"]


def save_model_folder(weights: dict[str, Tensor], description: dict[str, Any], folder: Path) -> None:
    """RUN/model: model.safetensors, and config.json with the architecture, the classes and the preprocessing."""
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(description, indent=1))


def load_model_folder(folder: Path) -> tuple[nn.Module, dict[str, Any]]:
    """The model that save_model_folder wrote, in evaluation mode, and its description. Raises UserError: 66 if none, 65 if damaged."""
    description = _read_description(folder)
    if missing := _DESCRIBES - set(description):
        raise UserError(f"{folder / 'config.json'} is not that of an image run: it lacks {', '.join(sorted(missing))}", Exit.NO_INPUT)
    model = build_classifier(description["architecture"], len(description["classes"]), description["image_size"])
    if description.get("transform_input"):
        model.transform_input = True
    try:
        model.load_state_dict(_read_weights(folder / "model.safetensors", "the model folder"))
    except RuntimeError as error:
        raise UserError(f"{folder}: model.safetensors does not fit config.json ({str(error)[:200]})", Exit.BAD_DATA) from None
    return model.to(memory_format=torch.channels_last).eval(), description


def classify_images(
    model: nn.Module, description: dict[str, Any], paths: Sequence[str], device: torch.device, batch_size: int
) -> Iterator[list[tuple[str, np.ndarray, str | None]]]:
    """Batches of (path, probabilities [C] float64, "path: reason" where the image cannot be read), in the order of `paths`."""
    model.to(device)
    mean, std = (255 * torch.tensor(description[name], device=device).view(1, 3, 1, 1) for name in ("mean", "std"))
    transform = build_eval_transform(description["image_size"], description["interpolation"], description["photo"])
    encoded = [os.fsencode(path) for path in paths]
    ends = np.cumsum([0, *map(len, encoded)])
    index = ImageIndex("", np.frombuffer(b"".join(encoded), np.uint8), np.stack([ends[:-1], ends[1:]], axis=1),
                       np.zeros(len(paths), np.int32))
    workers = min(MAX_WORKERS, available_cores(), len(paths) // batch_size)
    loader = DataLoader(
        ImageFolder(index, transform, seed=0), batch_size, sampler=[(0, i) for i in range(len(paths))],
        num_workers=workers,
        collate_fn=lambda samples: (torch.stack([sample.image for sample in samples]), [sample.bad for sample in samples]),
        multiprocessing_context="fork" if workers else None)
    with torch.inference_mode():
        for number, (images, bad) in enumerate(loader):  # uint8 [B, H, W, 3]
            logits = model((images.to(device).permute(0, 3, 1, 2) - mean) / std)  # [B, C]
            batch = paths[batch_size * number:batch_size * (number + 1)]
            yield list(zip(batch, logits.double().softmax(dim=1).cpu().numpy(), bad, strict=True))


def _read_description(folder: Path) -> dict[str, Any]:
    try:
        description = json.loads((folder / "config.json").read_text())
        return description | {"architecture": description["architecture"]}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"{folder} is not a model folder of an image run ({type(error).__name__}: {error}): it needs a config.json with an"
            " architecture, as RUN/model has", Exit.NO_INPUT) from None


def _read_weights(path: Path, flag: str) -> dict[str, Tensor]:
    try:
        weights = load_file(path) if path.suffix == ".safetensors" else torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"{flag}: there is no file {path}", Exit.NO_INPUT) from None
    except Exception as error:  # unpickling garbage raises almost anything
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        if isinstance(error, UnpicklingError):  # torch's own text advises to run what is in the file
            reason = "it is damaged, or holds more than tensors"
        raise UserError(f"{flag}: {path} cannot be read as weights (.safetensors, or a .pth of tensors): {reason}",
                        Exit.BAD_DATA) from None
    for key in ("model", "state_dict"):  # torchvision's references and others wrap it
        if isinstance(weights, dict) and isinstance(weights.get(key), dict):
            weights = weights[key]
    if not isinstance(weights, dict):
        raise UserError(f"{flag}: {path} holds a {type(weights).__name__}, not weights by name", Exit.BAD_DATA)
    return {name.removeprefix("module."): weight for name, weight in weights.items() if isinstance(weight, Tensor)}


def _named_weights(
    config: ModelOptions, architecture: str, folder: Path | None, world: World
) -> dict[str, Tensor] | None:
    """The weights that --weights, --pretrained and --model, a `folder` or not, ask for; None if none. Collective."""
    if config.weights:
        return world.everywhere(lambda: _read_weights(Path(config.weights), "--weights"))
    if config.pretrained and folder:
        return world.everywhere(lambda: _read_weights(folder / "model.safetensors", "--model"))
    return _library_weights(architecture, world) if config.pretrained else None


def _library_weights(architecture: str, world: World) -> dict[str, Tensor]:
    """torchvision's own weights, downloaded once per node, verified at every load. Collective.

    Raises UserError: 66 where they cannot be fetched, 65 where the file is damaged.
    """
    url = torchvision.models.get_model_weights(architecture).DEFAULT.url
    file = Path(torch.hub.get_dir(), "checkpoints", Path(urlparse(url).path).name)  # where torchvision keeps them
    sha256 = torch.hub.HASH_REGEX.search(file.name)[1]  # every file of torchvision has its first digits in its name

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

    world.on_rank_zero(fetch, per_node=True)  # one process per node downloads and verifies, the others find the file
    return world.everywhere(lambda: _read_weights(file, "--pretrained"))  # Collective.


def _load_backbone(model: nn.Module, weights: dict[str, Tensor], same_classes: bool) -> None:
    """Load `weights`, but for the head where the classes differ. Raises UserError (64) where anything else does not fit."""
    own = model.state_dict()
    for former, name in _FORMER_NAMES.items():
        weights = {re.sub(former, name, key): weight for key, weight in weights.items()}
    # BatchNorm counts its batches since torch 0.4.1; files from before that (resnet18's, for one) lack the counters.
    weights = {name: weight for name, weight in own.items() if name.endswith(".num_batches_tracked")} | weights
    head = [name for name, _ in model.named_parameters()][-1].rpartition(".")[0]  # torchvision's classifiers end in it
    differ = {name for name in own if name in weights and own[name].shape != weights[name].shape}
    new_head = {name for name in own if name.startswith(f"{head}.")} if differ or not same_classes else set()
    wrong = sorted((set(own) ^ set(weights)) | (differ - new_head))
    if wrong:
        raise UserError(
            f"the weights do not fit --model: {len(wrong)} tensors are missing, unknown or of another shape, {wrong[0]} for one;"
            " use weights of the same architecture")
    model.load_state_dict({name: own[name] if name in new_head else weights[name] for name in own})
