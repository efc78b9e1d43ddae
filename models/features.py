"""Features of new inputs by weights as they are, without a run: `python -m models.predict --model NAME INPUT...`

Images: what goes into the last layer of a classifier. Texts: the mean of an encoder's last layer over the tokens of a
text, because few encoders come with a trained pooler. Rows have the input alone.
Legend: B samples, T tokens, D features.

Tests: tests/end_to_end/test_features.py
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import torchvision
from torch import Tensor, nn

from models.linear_head import mean_over_tokens
from models.output import Prediction, Predictions
from models.vision.timm_models import is_timm
from utils.distributed.world import World, is_folder
from utils.errors import Exit, UserError, first_line, say, some
from utils.files import file_sha256, read_json
from utils.rundir.run import Run
from utils.settings.image_options import ModelOptions

NAMELESS = {"classes": [], "target_mean": [], "target_std": []}  # a description: rows have no prediction
MAX_TOKENS = 512  # of a text, or what the encoder takes, if that is less


def open_features(given: argparse.Namespace, world: World, is_wanted: Callable[[int], bool]) -> Predictions:
    """The inputs, whose features the last layer of the model will see. Collective.

    given: the arguments of models.predict. is_wanted: as in Task.predict. Raises UserError (64, 65, 66).
    """
    name, known = given.model, torchvision.models.list_models(module=torchvision.models)
    of_run = read_json(Path(name, "config.json")) if is_folder(name, world) else {}  # Collective.
    are_images = given.weights or is_timm(name) or name.lower() in known or "architecture" in of_run
    return (_of_images if are_images else _of_texts)(given, world, is_wanted)  # Collective.


def _of_images(given: argparse.Namespace, world: World, is_wanted: Callable[[int], bool]) -> Predictions:
    from data.images.decode import WHITES
    from data.images.folder import list_images
    from models.vision.classifier import build_model, classify_images
    from models.vision.preprocessing import IMAGENET, Preprocessing, preprocessing_of_weights

    options = ModelOptions(model=given.model, pretrained=not given.weights, weights=given.weights)
    known = world.everywhere(partial(preprocessing_of_weights, options, True)) or {  # Collective.
        "image_size": 224, "resize_size": 256, **IMAGENET}
    known |= {"white_value": WHITES[-1]}
    if size := given.image_size:
        known |= {"resize_size": round(size * known["resize_size"] / known["image_size"]), "image_size": size}
    prepared = asdict(Preprocessing(**{key: known[key] for key in Preprocessing.__dataclass_fields__}))
    model, *_ = build_model(options, ("",), prepared["image_size"], True, world)  # Collective.
    if given.weights:
        given.weights_sha256 = file_sha256(Path(given.weights))  # parts of other weights are not these
    paths = world.everywhere(lambda: list_images(given.inputs), takes_long=True)  # Collective.
    batches = classify_images(model.eval(), prepared, paths, world.device, given.batch_size, is_wanted)
    return Predictions(NAMELESS, _nameless(batches), model, -(-len(paths) // given.batch_size))


def _of_texts(given: argparse.Namespace, world: World, is_wanted: Callable[[int], bool]) -> Predictions:
    from data.texts.tokenizer import load_tokenizer
    from models.tasks.text_classification import predictions_of, rows_of
    from models.text.bert import BUILT
    from models.text.hub import find_folder
    from models.text.padding import outputs_for_texts

    # weights
    if given.model in BUILT:
        raise UserError(f"--model {given.model} is built from scratch and has no weights; name a model folder, or a"
                        " transformers name")
    alone = Run(Path(), {}, {"start": 1, "cores_per_process": 1}, say, lock=None)  # it keeps nothing
    folder = find_folder(given.model, alone, world)  # Collective.
    given.weights_sha256 = world.everywhere(  # Collective.
        lambda: [file_sha256(file) for file in sorted(Path(folder).glob("model*.safetensors"))], takes_long=True)
    encoder, longest = world.everywhere(partial(_load_encoder, folder), takes_long=True)  # Collective.
    model, tokenizer = MeanPooled(encoder).to(world.device).eval(), load_tokenizer(folder)
    if world.is_main:
        say(f"predict: the features of a text are the mean of the last layer of {given.model} over its tokens, of which"
            f" there are at most {longest}", sys.stderr)

    # texts
    columns = tuple(given.text_column.split(","))
    rows, count = world.everywhere(partial(rows_of, given.inputs, columns), takes_long=True)  # Collective.
    outputs = partial(outputs_for_texts, model, tokenizer, longest, None)
    batches = predictions_of(lambda texts: outputs(texts).cpu().numpy(), rows, given.batch_size, is_wanted)
    return Predictions(NAMELESS, _nameless(batches), model, -(-count // given.batch_size))


def _load_encoder(folder: str) -> tuple[nn.Module, int]:
    """The encoder in a model folder, with its weights; the most tokens of a text. Raises UserError (66)."""
    import transformers

    from models.text.bert import max_tokens, read_config

    read_config(folder)  # raises UserError
    try:
        encoder, found = transformers.AutoModel.from_pretrained(
            folder, dtype=torch.float32, use_safetensors=True, local_files_only=True, trust_remote_code=False,
            output_loading_info=True)
    except Exception as error:  # whatever the library raises about values
        raise UserError(f"--model {folder} has no weights that can be read ({first_line(error)}); it needs"
                        " model.safetensors", Exit.NO_INPUT) from None
    if lacking := [name for name in found["missing_keys"] if not name.startswith("pooler.")]:
        raise UserError(f"--model {folder}: its weights lack {some(sorted(lacking))}; name another", Exit.NO_INPUT)
    return encoder, int(min(MAX_TOKENS, max_tokens(encoder)))


class MeanPooled(nn.Module):
    """An encoder whose features are the mean over tokens; its last layer is there for blocks.watch_features to see."""

    def __init__(self, encoder: nn.Module):
        super().__init__()
        self.encoder, self.last = encoder, nn.Linear(encoder.config.hidden_size, 1)

    def forward(self, **inputs: Tensor) -> SimpleNamespace:
        """inputs: as models.text.padding.encode_texts gives them."""
        hidden = self.encoder(**inputs).last_hidden_state                                       # [B, T, D]
        return SimpleNamespace(logits=self.last(mean_over_tokens(hidden, inputs)))


def _nameless(batches: Iterable[list[Prediction]]) -> Iterator[list[Prediction]]:
    """Without values: the head of the model means nothing."""
    for batch in batches:
        yield [one if one.values is None else replace(one, values=one.values[:0]) for one in batch]
