"""Image classification: an ImageFolder, any torchvision classifier.

Legend: B samples, C classes, H, W height and width in pixels.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from data import demo
from data.augment import build_transforms
from data.batch import Batch
from data.image_folder import ImageFolder, Sample, list_images
from data.image_index import build_index
from data.mixing import build_mixing
from data.splits import ValSplit, require_split
from models.losses import ClassificationLoss
from models.metrics import classification_metrics
from models.preprocessing import resolve_preprocessing
from models.tasks.base import Output, Prediction, widened
from models.vision import build_model, classify_images, load_model_folder, save_model_folder
from utils.distributed.world import World
from utils.files import cache_path
from utils.rundir.run import Run
from utils.settings.config import ImageClassificationConfig

SCRATCH_LR, PRETRAINED_LR = {"adamw": 1e-3, "sgd": 0.05}, {"adamw": 1e-4, "sgd": 0.005}  # measured: docs/defaults.md


class ImageClassification:
    """See models/tasks/base.py. Building it scans the data once per node. Collective."""

    best, best_is_high = "top1", True
    unit, lengths = "img", None

    def __init__(self, config: ImageClassificationConfig, run: Run, world: World):
        # index: the first process of a node scans, the others read what it cached
        self._config, self._world = config, world
        cache = cache_path()
        self._is_demo = config.data.data == "demo"
        self._root = demo.data_root(config.data.data, config.run.task, cache, world)  # Collective.
        arguments = (self._root, ValSplit(config.data.val_fraction, config.run.seed), cache)
        world.on_rank_zero(lambda: len(build_index(*arguments).classes), per_node=True)  # Collective.
        index = world.everywhere(lambda: build_index(*arguments), takes_long=True)  # Collective.
        require_split(config.run.split, index.splits, self._root)
        self.classes, self.fingerprint = index.classes, index.fingerprint

        # preprocessing, and what suits the weights
        self._prepared, notes = resolve_preprocessing(  # Collective.
            config.images, config.model, index.splits["train"], run, world)
        self.notes = (*index.notes, *notes)
        is_pretrained = config.model.pretrained or config.model.weights is not None
        self.origin = f"with the weights of {config.model.weights or config.model.model}" if is_pretrained else (
            "from scratch")
        self.base_lr = PRETRAINED_LR if is_pretrained else SCRATCH_LR

        # data sets
        train_transform, eval_transform = build_transforms(
            config.images.augmentation, self._prepared.for_eval, config.augment, self._prepared.mean)
        self.train_set = ImageFolder(index.splits["train"], train_transform, config.run.seed)
        self.eval_set = ImageFolder(index.splits[config.run.split], eval_transform, config.run.seed)
        self.class_counts, self.eval_counts = (
            np.bincount(each.index.labels, minlength=len(self.classes)) for each in (self.train_set, self.eval_set))
        self.metrics = classification_metrics(len(self.classes), self.eval_set.index.labels)
        self._mix = build_mixing(config.augment, self._prepared.image_size)
        self._loss = ClassificationLoss(config.loss, self.classes, self.train_set.index.labels)
        self._mean, self._std = (
            255 * torch.tensor(values).view(1, 3, 1, 1) for values in (self._prepared.mean, self._prepared.std))

    def collate(self, samples: Sequence[Sample]) -> Batch:
        """Images stay uint8 [B, H, W, 3]: four times fewer bytes to the device, and channels_last without a copy."""
        return Batch(
            inputs={"images": torch.stack([sample.image for sample in samples])},
            labels=torch.tensor([sample.label for sample in samples]),
            sample_weight=torch.tensor([0.0 if sample.bad else 1.0 for sample in samples]),
            bad=tuple(sample.bad for sample in samples if sample.bad))

    def normalizer(self, indices: Tensor) -> float:
        """Samples in the global batch, or the sum of their class weights; a bad one that is skipped still counts."""
        return self._loss.normalizer(indices)

    def example(self, size: int) -> Batch:
        """Noise: with one grey level BatchNorm would divide by zero."""
        side, generator = self._prepared.image_size, torch.Generator().manual_seed(0)
        images = torch.randint(256, (size, side, side, 3), dtype=torch.uint8, generator=generator)  # [B, H, W, 3]
        labels = torch.arange(size) % len(self.classes)
        return Batch(inputs={"images": images}, labels=labels, sample_weight=torch.ones(size))

    def build_model(self, initial_weights: bool) -> nn.Module:
        """The torchvision classifier that --model names. Collective. Raises UserError (64)."""
        model, self._architecture = build_model(
            self._config.model, self.classes, self._prepared.image_size, initial_weights, self._world,
            own_head=self._config.run.eval_only)
        self._transforms_input = getattr(model, "transform_input", False)
        return model

    def forward(self, model: nn.Module, batch: Batch) -> Output:
        """Mix in training, normalise on the device, then the loss in float32."""
        # pixels; mixed in training, but for a single sample
        pixels, mixed = batch.inputs["images"], None                # [B, H, W, 3]
        if self._mix and model.training and len(pixels) > 1:
            mixed = self._mix(pixels, batch.sample_weight)
            pixels = mixed.images
        images = pixels.permute(0, 3, 1, 2)                         # [B, 3, H, W], channels_last in memory

        # logits, losses
        self._mean, self._std = self._mean.to(images.device), self._std.to(images.device)
        logits = widened(model((images - self._mean) / self._std))  # [B, C]
        losses = self._loss(logits, batch.labels, model.training)   # [B]
        if mixed:
            of_partners = self._loss(logits, batch.labels[mixed.partner], model.training)
            losses = mixed.share * losses + (1 - mixed.share) * of_partners
        return Output((losses * batch.sample_weight).sum(), logits)

    def preview(self, batch: Batch) -> list[np.ndarray]:
        """The images before they are normalised."""
        return list(batch.inputs["images"].numpy())

    def inputs(self) -> Iterator[tuple[int, str]]:
        """Paths."""
        return ((index, self.eval_set.name(index)) for index in range(len(self.eval_set)))

    def save_model(self, weights: dict[str, Tensor], folder: Path) -> None:
        """model.safetensors and config.json: loads into plain torchvision."""
        save_model_folder(weights, {
            "task": "image-classification", "architecture": self._architecture, "classes": list(self.classes),
            "loss": self._config.loss.loss, "transform_input": self._transforms_input} | asdict(self._prepared), folder)

    def baselines(self) -> dict[str, float]:
        """Always the most frequent class; for the built-in digits also a linear model on the pixels."""
        share = self.eval_counts[self.class_counts.argmax()] / len(self.eval_set)
        baselines = {"always the most frequent class": float(share)}
        if self._is_demo:
            baselines["a linear model on the pixels"] = demo.linear_baseline(Path(self._root))
        return baselines

    def next_steps(self, run: str, python: str) -> dict[str, str]:
        """Predict the first validation image; train on own images."""
        return {"predict": f"{python} -m models.predict {run} {self.eval_set.index.path(0)}",
                "your own data": f"{python} train.py --data DIR    with DIR/train/CLASS/* and DIR/val/CLASS/*,"
                                 " or just DIR/CLASS/*"}

    @staticmethod
    def predict(
        folder: Path, inputs: Sequence[str], device: torch.device, batch_size: int
    ) -> tuple[Sequence[str], Iterator[list[Prediction]]]:
        """inputs: image files, and folders; the images in a folder and below are sorted by path."""
        paths = list_images(inputs)
        model, description = load_model_folder(folder)
        batches = classify_images(model, description, paths, device, batch_size)
        return description["classes"], (
            [Prediction(path, None if bad else row, bad or "") for path, row, bad in batch] for batch in batches)
