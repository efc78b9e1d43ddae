"""Every setting of a run: the config of each task gathers the settings of three pages, with its own defaults.

run_options.py: those of every run; image_options.py, text_options.py: those of tasks. Nothing here imports torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, get_args

from utils.settings.image_options import AugmentOptions, ImageColumnOptions, ImageOptions, MixOptions, ModelOptions
from utils.settings.option import Facts
from utils.settings.run_options import (
    BatchOptions,
    ClassLossOptions,
    DataOptions,
    DeviceOptions,
    FaultOptions,
    LabelOptions,
    LossOptions,
    OptimOptions,
    RecordOptions,
    RunOptions,
    TargetLossOptions,
    TargetOptions,
)
from utils.settings.text_options import MaskOptions, TextModelOptions, TextOptions


@dataclass(frozen=True, kw_only=True)
class CommonConfig:
    """What every task has."""

    run: RunOptions = RunOptions()
    data: DataOptions = DataOptions()
    batch: BatchOptions = BatchOptions()
    optim: OptimOptions = OptimOptions()
    device: DeviceOptions = DeviceOptions()
    record: RecordOptions = RecordOptions()
    faults: FaultOptions = FaultOptions()


@dataclass(frozen=True, kw_only=True)
class ImageClassificationConfig(CommonConfig):
    """--task image-classification"""

    images: ImageOptions = ImageOptions()
    columns: ImageColumnOptions = ImageColumnOptions()
    labels: LabelOptions = LabelOptions()
    augment: MixOptions = MixOptions()
    model: ModelOptions = ModelOptions()
    loss: ClassLossOptions = ClassLossOptions()


@dataclass(frozen=True, kw_only=True)
class ImageRegressionConfig(CommonConfig):
    """--task image-regression"""

    run: RunOptions = RunOptions(task="image-regression")
    images: ImageOptions = ImageOptions()
    columns: ImageColumnOptions = ImageColumnOptions()
    labels: TargetOptions = TargetOptions()
    augment: AugmentOptions = AugmentOptions()
    model: ModelOptions = ModelOptions()
    loss: TargetLossOptions = TargetLossOptions()


@dataclass(frozen=True, kw_only=True)
class TextConfig(CommonConfig):
    """What every task with texts has."""

    batch: BatchOptions = BatchOptions(global_batch_size=32)
    optim: OptimOptions = OptimOptions(schedule="linear", weight_decay=0.01, max_grad_norm=1.0)
    text: TextOptions = TextOptions()
    model: TextModelOptions = TextModelOptions()


@dataclass(frozen=True, kw_only=True)
class TextClassificationConfig(TextConfig):
    """--task text-classification"""

    run: RunOptions = RunOptions(task="text-classification", epochs=3)
    labels: LabelOptions = LabelOptions()
    loss: ClassLossOptions = ClassLossOptions()


@dataclass(frozen=True, kw_only=True)
class TextRegressionConfig(TextConfig):
    """--task text-regression"""

    run: RunOptions = RunOptions(task="text-regression", epochs=3)
    labels: TargetOptions = TargetOptions()
    loss: TargetLossOptions = TargetLossOptions()


@dataclass(frozen=True, kw_only=True)
class MaskedLMConfig(TextConfig):
    """--task masked-lm"""

    run: RunOptions = RunOptions(task="masked-lm", epochs=3)
    batch: BatchOptions = BatchOptions(global_batch_size=64)
    optim: OptimOptions = replace(TextConfig().optim, betas=(0.9, 0.98))
    masks: MaskOptions = MaskOptions()
    loss: LossOptions = LossOptions()


Config = (ImageClassificationConfig | ImageRegressionConfig | TextClassificationConfig | TextRegressionConfig
          | MaskedLMConfig)
# of the groups, in --help and in config.yaml
ORDER = ("run", "data", "images", "columns", "text", "labels", "augment", "masks", "model", "batch", "optim", "loss",
         "device", "record", "faults")
CONFIGS: dict[str, type] = {config().run.task: config for config in get_args(Config)}


def settings(config: Config) -> dict[str, Any]:
    """All settings as {name: value}, flat, in ORDER."""
    return {item.name: getattr(group, item.name) for group in groups(config) for item in fields(group)}


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """The config with other settings. values: {name: value}."""
    parts = {}
    for part in fields(config):
        group = getattr(config, part.name)
        names = {item.name for item in fields(group)} & values.keys()
        parts[part.name] = replace(group, **{name: values[name] for name in names})
    return replace(config, **parts)


def facts(config: Config) -> dict[str, Facts]:
    """What is known about every setting, as {name: Facts}."""
    return {item.name: item.metadata["facts"] for group in groups(config) for item in fields(group)}


def types(config: Config) -> dict[str, Any]:
    """The type of every setting, as {name: type}."""
    return {item.name: item.type for group in groups(config) for item in fields(group)}


def flag(name: str) -> str:
    """A setting as it is typed: "--lr"."""
    return f"--{name.replace('_', '-')}"


def groups(config: Config) -> list[Any]:
    """The pages of settings, in ORDER; others come last."""
    names = [item.name for item in fields(config)]
    return [getattr(config, name) for name in sorted(names, key=(*ORDER, *names).index)]
