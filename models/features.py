"""Features of new inputs by weights as they are, without a run: `python -m models.predict --model NAME INPUT...`

Images: what goes into the last layer of a classifier. Texts: the mean of an encoder's last layer over tokens, because
few come with a trained pooler. Rows have the input alone.

Tests: tests/end_to_end/test_features.py
"""

import argparse
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from models.output import Prediction, Predictions
from models.vision.timm_models import is_timm
from utils.distributed.world import World, is_folder
from utils.files import file_sha256, read_json
from utils.settings.image_options import ModelOptions

NAMELESS = {"classes": [], "target_mean": [], "target_std": []}  # a description: rows have no prediction


def open_features(given: argparse.Namespace, world: World, is_wanted: Callable[[int], bool]) -> Predictions:
    """The inputs, whose features the last layer of the model will see. Collective.

    given: the arguments of models.predict. is_wanted: as in Task.predict. Raises UserError (64, 65, 66).
    """
    import torchvision  # a run with texts does not need it

    name, known = given.model, torchvision.models.list_models(module=torchvision.models)
    of_run = read_json(Path(name, "config.json")) if is_folder(name, world) else {}  # Collective.
    are_images = given.weights or is_timm(name) or name.lower() in known or "architecture" in of_run
    if are_images:
        predictions = _of_images(given, world, is_wanted)  # Collective.
    else:
        from models.tasks.text_classification import of_texts

        predictions = of_texts(given, world, is_wanted)  # Collective.
    return predictions._replace(description=NAMELESS, batches=_nameless(predictions.batches))


def _of_images(given: argparse.Namespace, world: World, is_wanted: Callable[[int], bool]) -> Predictions:
    from data.images.decode import WHITES
    from data.images.folder import list_images
    from models.vision.classifier import build_model, classify_images
    from models.vision.preprocessing import IMAGENET, Preprocessing, preprocessing_of_weights

    options = ModelOptions(model=given.model, pretrained=not given.weights, weights=given.weights)
    known = world.everywhere(partial(preprocessing_of_weights, options, True)) or {  # Collective.
        "image_size": 224, "resize_size": 256, **IMAGENET}
    known = {"white_value": WHITES[-1]} | known
    if size := given.image_size:
        known |= {"resize_size": round(size * known["resize_size"] / known["image_size"]), "image_size": size}
    prepared = asdict(Preprocessing(**{key: known[key] for key in Preprocessing.__dataclass_fields__}))
    model, *_ = build_model(options, ("",), prepared["image_size"], True, world)  # Collective.
    if given.weights:
        given.weights_sha256 = file_sha256(Path(given.weights))  # parts of other weights are not these
    paths = world.everywhere(lambda: list_images(given.inputs), takes_long=True)  # Collective.
    batches = classify_images(model.eval(), prepared, paths, world.device, given.batch_size, is_wanted)
    return Predictions(prepared, batches, model, -(-len(paths) // given.batch_size))


def _nameless(batches: Iterable[list[Prediction]]) -> Iterator[list[Prediction]]:
    """Without values: the head of the model means nothing."""
    for batch in batches:
        yield [one if one.values is None else replace(one, values=one.values[:0]) for one in batch]
