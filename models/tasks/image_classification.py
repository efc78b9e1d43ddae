"""Images: folders of classes or tables, any image classifier; one class, several labels, or numbers.

Legend: B samples, C outputs, I images of a sample, H, W height and width in pixels.
"""

import glob
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from data import demo
from data.batch import Batch
from data.images.augment import build_transforms
from data.images.cache import CacheSpec, open_cache
from data.images.decode import EncodedImage
from data.images.folder import ImageFolder, Sample, list_images
from data.images.index import FolderIndex, without_left_out
from data.images.mixing import Mixed, build_mixing
from data.images.table import TableFiles, build_table_index, is_table
from data.labels import CLASSES, NUMBERS, label_at
from data.left_out import find_left_out
from data.shards.index import build_image_index
from data.shards.parquet import is_parquet
from data.splits import ValSplit, require_split
from data.tables.source import TableSource
from data.tables.table import IMAGES
from models.blocks import has_batch_norm
from models.objectives import build_objective, kind_of, label_columns_of
from models.output import Output, Predictions, widened
from models.own import IMAGE_MODELS
from models.tasks.base import Task
from models.trial import SOURCE
from models.vision.classifier import build_model, classify_images, load_model_folder, require_known, save_model_folder
from models.vision.preprocessing import description_of, resolve_preprocessing
from models.vision.timm_models import is_timm
from models.vision.weights import classes_of_weights
from utils.distributed.world import World
from utils.errors import Exit, UserError
from utils.files import cache_path
from utils.rundir.run import Run
from utils.settings.config import ImageClassificationConfig, ImageRegressionConfig, flag, settings
from utils.settings.image_options import ImageOptions
from utils.settings.run_options import LabelOptions

# chosen by measurement: docs/models.md
SCRATCH_LR, PRETRAINED_LR = {"adamw": 1e-3, "sgd": 0.02}, {"adamw": 3e-4, "sgd": 0.015}
# ViT, Swin, ConvNeXt: not measured, but between what BEiT and DeiT III fine-tune with, for a batch of 64
WITHOUT_BATCH_NORM_LR = PRETRAINED_LR | {"adamw": 5e-5}


class ImageTask(Task):
    """--task image-classification and image-regression: see models/tasks/base.py. Collective.

    Building it scans the data once per node.
    """

    unit = "img"

    def __init__(self, config: ImageClassificationConfig | ImageRegressionConfig, run: Run, world: World):
        # index: the first process of a node scans, the others read what it cached
        self._config, self._world, self._note = config, world, run.note
        self._is_demo = config.data.data == "demo"
        self._root = root = demo.data_root(config.data.data, config.run.task, cache_path(), world)  # Collective.
        as_they_are = config.run.eval_only and not run.is_there  # weights
        val = ValSplit(config.data.val_fraction, config.run.seed, config.run.split if as_they_are else "")
        build = partial(_index_of, config, root, val, run.note)
        world.on_rank_zero(lambda: len(build().classes), per_node=True)  # Collective.
        index = world.everywhere(build, takes_long=True)  # Collective.
        require_split(config.run.split, index.splits, root)
        described = description_of(config.model.model, world)  # Collective.
        if as_they_are and index.splits["train"].labels.ndim == 1:
            index = index.labelled(classes_of_weights(config.model, described, index.classes, world))  # Collective.
        self.classes, self.fingerprint = index.classes, index.fingerprint
        self._num_images, self._columns = index.splits["train"].num_images, index.columns

        # preprocessing, and what suits the weights
        if not described and not is_timm(config.model.model):
            require_known(config.model.model, config.model.pretrained and not config.model.weights)
        train, evaluated = index.splits["train"], index.splits[config.run.split]
        train = replace(train, left_out=find_left_out(config.data, run, train, evaluated))
        prepared, notes = resolve_preprocessing(  # Collective.
            config.images, config.model, without_left_out(train), run, world)
        self.notes, self.prepared = (*index.notes, *notes), prepared
        self.origin, self.base_lr = "from scratch", SCRATCH_LR
        self.has_weights = config.model.pretrained or config.model.weights is not None
        if self.has_weights:
            weights = config.model.weights or config.model.model
            self.origin, self.base_lr = f"with the weights of {weights}", PRETRAINED_LR

        # transforms, objective
        train_transform, eval_transform = build_transforms(
            config.images.augmentation, prepared.for_eval, config.augment, prepared.mean)
        self.objective = build_objective(
            config, self.classes, train.labels, evaluated.labels, described if described and as_they_are else None,
            left_out=train.left_out)
        self.notes += self.objective.notes
        self.metrics, self.best = self.objective.metrics, self.objective.best
        self._mix = build_mixing(config.augment, prepared.image_size)
        self._mean, self._std = (255 * torch.tensor(values * self._num_images).view(1, -1, 1, 1)
                                 for values in (prepared.mean, prepared.std))  # [1, 3 * I, 1, 1] each

        # data sets: packing may take hours, so what is refused here is refused before
        read = partial(EncodedImage, white=prepared.white_value)
        if config.images.cache != "none":
            run.require_same_data(self.fingerprint, world)  # Collective.
            spec = CacheSpec(config.images.cache, prepared.resize_size, prepared.interpolation, prepared.white_value)
            splits = (config.run.split,) if config.run.eval_only else ("train", "val")
            read = open_cache(index, spec, splits, world, run.note).read  # Collective.
        self.train_set = ImageFolder(train, train_transform, config.run.seed, read)
        self.unaugmented = ImageFolder(train, eval_transform, config.run.seed, read)
        self.eval_set = ImageFolder(evaluated, eval_transform, config.run.seed, read)

    def collate(self, samples: Sequence[Sample]) -> Batch:
        """Images stay uint8 [B, H, W, 3 * I]: a fourth of the bytes to the device, and channels_last without a copy."""
        return Batch(
            inputs={"images": torch.stack([sample.image for sample in samples])},
            labels=self.objective.encode([sample.label for sample in samples]),
            sample_weight=torch.tensor([1.0 if sample.bad is None else 0.0 for sample in samples]),
            bad=tuple(sample.bad for sample in samples if sample.bad),
            digests=tuple(sample.digest for sample in samples))

    def example(self, size: int) -> Batch:
        """Noise: with one grey level BatchNorm would divide by zero."""
        side, generator = self.prepared.image_size, torch.Generator().manual_seed(0)
        shape, labels = (size, side, side, 3 * self._num_images), self.train_set.index.labels
        images = torch.randint(256, shape, dtype=torch.uint8, generator=generator)          # [B, H, W, 3 * I]
        encoded = self.objective.encode([label_at(labels, index % len(labels)) for index in range(size)])
        return Batch(inputs={"images": images}, labels=encoded, sample_weight=torch.ones(size))

    def build_model(self, initial_weights: bool) -> nn.Module:
        """The classifier that --model names. Collective. Raises UserError (64)."""
        model, self._architecture, self.has_new_head, notes = build_model(
            self._config.model, self.classes, self.prepared.image_size, initial_weights, self._world,
            own_head=self._config.run.eval_only, num_images=self._num_images)
        for text in notes:
            self._note(text)
        self._transforms_input = getattr(model, "transform_input", False)
        if self.has_weights and not has_batch_norm(model):
            self.base_lr = WITHOUT_BATCH_NORM_LR
        return model

    def forward(self, model: nn.Module, batch: Batch) -> Output:
        """Mix in training, normalise on the device, then the loss in float32."""
        # pixels; mixed in training, but for a single sample
        mixed = self._mixed(batch) if model.training else None
        pixels = mixed.images if mixed else batch.inputs["images"]  # [B, H, W, 3 * I]
        images = pixels.permute(0, 3, 1, 2)                         # [B, 3 * I, H, W], channels_last in memory

        # logits, losses
        self._mean, self._std = self._mean.to(images.device), self._std.to(images.device)
        logits = widened(model((images - self._mean) / self._std))  # [B, C]
        losses = self.objective.losses(logits, batch.labels, model.training)  # [B]
        if mixed:
            of_partners = self.objective.losses(logits, batch.labels[mixed.partner], model.training)
            losses = mixed.share * losses + (1 - mixed.share) * of_partners
        return Output(losses * batch.sample_weight, logits)

    def _mixed(self, batch: Batch) -> Mixed | None:
        pixels = batch.inputs["images"]
        return self._mix(pixels, batch.sample_weight) if self._mix and len(pixels) > 1 else None

    def as_seen(self, batch: Batch) -> Batch:
        """Mixed."""
        mixed = self._mixed(batch)
        return replace(batch, inputs={"images": mixed.images.round().to(torch.uint8)}) if mixed else batch

    def preview(self, batch: Batch) -> list[np.ndarray]:
        """The images before they are normalised; several of a sample side by side."""
        images = batch.inputs["images"].unflatten(3, (self._num_images, 3)).transpose(2, 3)  # [B, H, I, W, 3]
        return list(images.flatten(2, 3).numpy())

    def inputs(self) -> Iterator[tuple[int, str]]:
        """Paths."""
        return ((index, self.eval_set.name(index)) for index in range(len(self.eval_set)))

    def groups(self, of_train: bool = False) -> list[str] | None:
        """Of the rows of the table."""
        if not self._config.data.group_column:
            return None
        source, files = _table_of(self._config, self._root), TableFiles()
        samples, split = (self.train_set, "train") if of_train else (self.eval_set, self._config.run.split)
        split = split if split in source.splits else "train"  # it is held out of train
        group_of = {",".join(map(os.path.normpath, files.paths)): row.group
                    for row in source.samples(split, self.classes, files.problem)}
        return [group_of.get(samples.name(index), "") for index in range(len(samples))]

    def listing(self) -> Iterator[tuple[str, str]]:
        """Paths relative to the data; those that are held out come last."""
        for index in (self.train_set.index, self.eval_set.index):
            for number in range(len(index)):
                label = self.objective.encode([label_at(index.labels, number)])[0]
                paths = (os.path.relpath(path, index.root) for path in index.paths(number))
                yield ",".join(paths), self.objective.label_words(label)

    def save_model(self, weights: dict[str, Tensor], folder: Path) -> None:
        """model.safetensors and config.json: loads into plain torchvision."""
        save_model_folder(weights, {
            "task": self._config.run.task, "architecture": self._architecture, "classes": list(self.classes),
            "num_images": self._num_images, "image_columns": self._columns, "transform_input": self._transforms_input,
            **({"own_source": SOURCE} if self._architecture in IMAGE_MODELS else {}),
            **self.objective.described(), **asdict(self.prepared)}, folder)

    def next_steps(self, run: str, python: str) -> dict[str, str]:
        """Predict the first validation image; train the same model on own images."""
        predict = {"predict": f"{python} -m models.predict {run} {shlex.quote(self.eval_set.name(0))}"}
        model = shlex.quote(self._config.model.model)
        return predict | ({"your own data": f"{python} train.py --data DIR --model {model}    with DIR/train/CLASS/*"
                                            " and DIR/val/CLASS/*, or just DIR/CLASS/*"} if self._is_demo else {})

    @staticmethod
    def predict(folder: Path, inputs: Sequence[str], device: torch.device, batch_size: int,
                is_wanted: Callable[[int], bool] = lambda number: True) -> Predictions:
        """inputs: image files; folders, whose images, those below included, are sorted by path; tables.

        Of a model that takes several images: A,B, and tables.
        """
        model, description = load_model_folder(folder)
        paths = list_images(inputs, description.get("num_images", 1), description.get("image_columns", ["image"]))
        batches = classify_images(model, description, paths, device, batch_size, is_wanted)
        return Predictions(description, batches, model, -(-len(paths) // batch_size))


def _table_of(config: ImageClassificationConfig | ImageRegressionConfig, root: str) -> TableSource:
    data, labels = config.data, config.labels
    return TableSource(
        root, IMAGES, config.images.image_column, label_columns_of(labels), kind_of(labels), data.group_column,
        data.bad_samples == "skip", config.run.split)


def _index_of(config: ImageClassificationConfig | ImageRegressionConfig, root: str, val: ValSplit,
              note: Callable[[str], None]) -> FolderIndex:
    """The index of a folder of classes, of a table, or of tar files. Raises UserError (64, 65, 66)."""
    # a table
    if is_table(root):
        return build_table_index(_table_of(config, root), val, cache_path())

    # a folder, tar files or Parquet files
    if (os.path.exists(root) or glob.glob(root)) and kind_of(config.labels) != CLASSES:
        what = "numbers" if kind_of(config.labels) == NUMBERS else "several labels"
        raise UserError(f"--data {root}: class folders hold one class of each image; for {what} give a table (.csv,"
                        " .tsv, .jsonl) with the columns image and label", Exit.BAD_DATA)
    usual = {"label_column": LabelOptions().label_column, "image_column": ImageOptions().image_column,
             "group_column": None}
    for name, value in settings(config).items():
        if name in usual and value != usual[name] and (name == "group_column" or not is_parquet(root)):
            raise UserError(f"{flag(name)} {value}: --data {root} has no columns; leave it out, or give a table")
    columns = config.images.image_column, config.labels.label_column
    return build_image_index(root, val, cache_path(), note, columns)
