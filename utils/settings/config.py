"""Every setting of a run: the config of each task gathers the settings of three pages, with its own defaults.

run_options.py: those of every run; image_options.py, text_options.py: those of tasks. Nothing here imports torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, NamedTuple, TypeVar, get_args

from utils.settings import image_options as image_page
from utils.settings import run_options as page
from utils.settings import text_options as text_page
from utils.settings.option import Facts

EXTRA_PAGES: list[Any] = []  # pages of settings besides: the entry point hands them in before it parses
Page = TypeVar("Page")


class Few(NamedTuple):
    """What few samples with pretrained weights get by --epochs auto and --global-batch-size auto."""

    steps: int  # optimizer steps ...
    epochs: int  # ... within so many epochs
    batch: int  # at least so many samples in a step; BatchNorm needs some


@dataclass(frozen=True, kw_only=True)
class CommonConfig:
    """What every task has."""

    run: page.RunOptions = page.RunOptions()
    data: page.DataOptions = page.DataOptions()
    batch: page.BatchOptions = page.BatchOptions()
    optim: page.OptimOptions = page.OptimOptions()
    device: page.DeviceOptions = page.DeviceOptions()
    record: page.RecordOptions = page.RecordOptions()
    faults: page.FaultOptions = page.FaultOptions()
    extras: tuple[Any, ...] = field(default_factory=lambda: tuple(EXTRA_PAGES))

    # --epochs and --global-batch-size of large data, by which --lr auto is measured; before 0.15 the defaults of all
    usual: ClassVar[Mapping[str, int]] = {"epochs": 30, "global_batch_size": 64}
    few: ClassVar[Few | None] = Few(steps=300, epochs=30, batch=16)

    def extra(self, kind: type[Page]) -> Page:
        """The page of settings of this class; at its defaults if the entry point handed in none."""
        return next((each for each in self.extras if isinstance(each, kind)), kind())

    @property
    def mode(self) -> str:
        """The module whose run() takes the place of a training, if an extra is asked for that; else ""."""
        return next(filter(None, (getattr(each, "mode", "") for each in self.extras)), "")

    @property
    def beginning(self) -> str:
        """The module whose begin() lays out what a run begins with, if an extra is asked for that; else ""."""
        return next(filter(None, (getattr(each, "beginning", "") for each in self.extras)), "")


@dataclass(frozen=True, kw_only=True)
class ImageClassificationConfig(CommonConfig):
    """--task image-classification"""

    images: image_page.ImageOptions = image_page.ImageOptions()
    labels: page.LabelOptions = page.LabelOptions()
    augment: image_page.MixOptions = image_page.MixOptions()
    model: image_page.ModelOptions = image_page.ModelOptions()
    loss: page.ClassLossOptions = page.ClassLossOptions()


@dataclass(frozen=True, kw_only=True)
class ImageRegressionConfig(CommonConfig):
    """--task image-regression"""

    run: page.RunOptions = page.RunOptions(task="image-regression")
    images: image_page.ImageOptions = image_page.ImageOptions()
    labels: page.TargetOptions = page.TargetOptions()
    augment: image_page.AugmentOptions = image_page.AugmentOptions()
    model: image_page.ModelOptions = image_page.ModelOptions()
    loss: page.TargetLossOptions = page.TargetLossOptions()


@dataclass(frozen=True, kw_only=True)
class TextConfig(CommonConfig):
    """What every task with texts has."""

    optim: page.OptimOptions = page.OptimOptions(schedule="linear", weight_decay=0.01, max_grad_norm=1.0)
    text: text_page.TextOptions = text_page.TextOptions()
    model: text_page.TextModelOptions = text_page.TextModelOptions()
    usual: ClassVar[Mapping[str, int]] = {"epochs": 3, "global_batch_size": 32}
    few: ClassVar[Few | None] = Few(steps=200, epochs=20, batch=8)


@dataclass(frozen=True, kw_only=True)
class TextClassificationConfig(TextConfig):
    """--task text-classification"""

    run: page.RunOptions = page.RunOptions(task="text-classification")
    labels: page.LabelOptions = page.LabelOptions()
    loss: page.ClassLossOptions = page.ClassLossOptions()


@dataclass(frozen=True, kw_only=True)
class TextRegressionConfig(TextConfig):
    """--task text-regression"""

    run: page.RunOptions = page.RunOptions(task="text-regression")
    labels: page.TargetOptions = page.TargetOptions()
    loss: page.TargetLossOptions = page.TargetLossOptions()


@dataclass(frozen=True, kw_only=True)
class MaskedLMConfig(TextConfig):
    """--task masked-lm"""

    run: page.RunOptions = page.RunOptions(task="masked-lm")
    optim: page.OptimOptions = replace(TextConfig().optim, betas=(0.9, 0.98))
    loss: page.LossOptions = page.LossOptions()
    usual: ClassVar[Mapping[str, int]] = {"epochs": 3, "global_batch_size": 64}
    few: ClassVar[Few | None] = None  # not measured


Config = (ImageClassificationConfig | ImageRegressionConfig | TextClassificationConfig | TextRegressionConfig
          | MaskedLMConfig)
# of the groups, in --help and in config.yaml
ORDER = ("run", "data", "images", "text", "labels", "augment", "model", "batch", "optim", "loss",
         "device", "record", "faults")
FIRST = ("task", "data", "model", "epochs", "global_batch_size", "lr")  # in --help, before the groups
CONFIGS: dict[str, type] = {config().run.task: config for config in get_args(Config)}


def settings(config: Config) -> dict[str, Any]:
    """All settings as {name: value}, flat, in ORDER."""
    return {item.name: getattr(group, item.name) for group in groups(config) for item in fields(group)}


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """The config with other settings. values: {name: value}."""
    def changed(group: Any) -> Any:
        names = {item.name for item in fields(group)} & values.keys()
        return replace(group, **{name: values[name] for name in names})

    parts = {part.name: getattr(config, part.name) for part in fields(config)}
    extras = tuple(map(changed, parts.pop("extras")))
    return replace(config, **{name: changed(group) for name, group in parts.items()}, extras=extras)


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
    """The pages of settings, in ORDER; those of extras come last."""
    names = [item.name for item in fields(config) if item.name != "extras"]
    return [*(getattr(config, name) for name in sorted(names, key=(*ORDER, *names).index)), *config.extras]
