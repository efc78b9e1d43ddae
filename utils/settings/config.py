"""Every setting of a run: the config of each task gathers the settings of three pages, with its own defaults.

run_options.py: those of every run; image_options.py, text_options.py: those of tasks. Nothing here imports torch.
"""

from dataclasses import dataclass, fields, is_dataclass, replace
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
class ImageClassificationConfig:
    """--task image-classification"""

    run: RunOptions = RunOptions()
    data: DataOptions = DataOptions()
    images: ImageOptions = ImageOptions()
    columns: ImageColumnOptions = ImageColumnOptions()
    labels: LabelOptions = LabelOptions()
    augment: MixOptions = MixOptions()
    model: ModelOptions = ModelOptions()
    batch: BatchOptions = BatchOptions()
    optim: OptimOptions = OptimOptions()
    loss: ClassLossOptions = ClassLossOptions()
    device: DeviceOptions = DeviceOptions()
    record: RecordOptions = RecordOptions()
    faults: FaultOptions = FaultOptions()


@dataclass(frozen=True, kw_only=True)
class ImageRegressionConfig:
    """--task image-regression"""

    run: RunOptions = RunOptions(task="image-regression")
    data: DataOptions = DataOptions()
    images: ImageOptions = ImageOptions()
    columns: ImageColumnOptions = ImageColumnOptions()
    labels: TargetOptions = TargetOptions()
    augment: AugmentOptions = AugmentOptions()
    model: ModelOptions = ModelOptions()
    batch: BatchOptions = BatchOptions()
    optim: OptimOptions = OptimOptions()
    loss: TargetLossOptions = TargetLossOptions()
    device: DeviceOptions = DeviceOptions()
    record: RecordOptions = RecordOptions()
    faults: FaultOptions = FaultOptions()


TEXT_OPTIM = OptimOptions(schedule="linear", weight_decay=0.01, max_grad_norm=1.0)


@dataclass(frozen=True, kw_only=True)
class TextClassificationConfig:
    """--task text-classification"""

    run: RunOptions = RunOptions(task="text-classification", epochs=3)
    data: DataOptions = DataOptions()
    text: TextOptions = TextOptions()
    labels: LabelOptions = LabelOptions()
    model: TextModelOptions = TextModelOptions()
    batch: BatchOptions = BatchOptions(global_batch_size=32)
    optim: OptimOptions = TEXT_OPTIM
    loss: ClassLossOptions = ClassLossOptions()
    device: DeviceOptions = DeviceOptions()
    record: RecordOptions = RecordOptions()
    faults: FaultOptions = FaultOptions()


@dataclass(frozen=True, kw_only=True)
class TextRegressionConfig:
    """--task text-regression"""

    run: RunOptions = RunOptions(task="text-regression", epochs=3)
    data: DataOptions = DataOptions()
    text: TextOptions = TextOptions()
    labels: TargetOptions = TargetOptions()
    model: TextModelOptions = TextModelOptions()
    batch: BatchOptions = BatchOptions(global_batch_size=32)
    optim: OptimOptions = TEXT_OPTIM
    loss: TargetLossOptions = TargetLossOptions()
    device: DeviceOptions = DeviceOptions()
    record: RecordOptions = RecordOptions()
    faults: FaultOptions = FaultOptions()


@dataclass(frozen=True, kw_only=True)
class MaskedLMConfig:
    """--task masked-lm"""

    run: RunOptions = RunOptions(task="masked-lm", epochs=3)
    data: DataOptions = DataOptions()
    text: TextOptions = TextOptions()
    masks: MaskOptions = MaskOptions()
    model: TextModelOptions = TextModelOptions()
    batch: BatchOptions = BatchOptions(global_batch_size=64)
    optim: OptimOptions = replace(TEXT_OPTIM, betas=(0.9, 0.98))
    loss: LossOptions = LossOptions()
    device: DeviceOptions = DeviceOptions()
    record: RecordOptions = RecordOptions()
    faults: FaultOptions = FaultOptions()


Config = (ImageClassificationConfig | ImageRegressionConfig | TextClassificationConfig | TextRegressionConfig
          | MaskedLMConfig)
CONFIGS: dict[str, type] = {config().run.task: config for config in get_args(Config)}


def settings(config: Config) -> dict[str, Any]:
    """All settings as {name: value}, flat, in the order of the page above."""
    return {item.name: getattr(group, item.name) for group in _groups(config) for item in fields(group)}


def facts(config: Config) -> dict[str, Facts]:
    """What is known about every setting, as {name: Facts}."""
    return {item.name: item.metadata["facts"] for group in _groups(config) for item in fields(group)}


def types(config: Config) -> dict[str, Any]:
    """The type of every setting, as {name: type}."""
    return {item.name: item.type for group in _groups(config) for item in fields(group)}


def flag(name: str) -> str:
    """A setting as it is typed: "--lr"."""
    return f"--{name.replace('_', '-')}"


def _groups(config: Config) -> list[Any]:
    return [getattr(config, item.name) for item in fields(config) if is_dataclass(getattr(config, item.name))]
