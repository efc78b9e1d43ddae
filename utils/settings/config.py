"""Every setting of a run on one page.

One frozen dataclass per concern; a task's config gathers them with its own defaults. A setting has one kind (utils/rundir/identity.py
acts on it): DEFINING settings name the run, TOLERATED ones name it too but may change within it, OPERATIONAL ones do neither.
Nothing here imports torch.
"""

import re
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Annotated, Any, Literal

import tyro

from utils.errors import UserError

DEFINING, TOLERATED, OPERATIONAL = "defining", "tolerated", "operational"
Auto = Literal["auto"]


def option(default: Any, text: str, kind: str = DEFINING) -> Any:
    """A setting: its default, the help text and its kind, written once."""
    return field(default=default, metadata={"help": text, "kind": kind})


def options(cls: type) -> type:
    """Make `cls` a frozen dataclass whose option() texts reach the command line's help."""
    cls = dataclass(frozen=True, kw_only=True)(cls)
    for item in fields(cls):
        if "help" in item.metadata:
            cls.__annotations__[item.name] = Annotated[item.type, tyro.conf.arg(help=item.metadata["help"])]
    return cls


@options
class RunOptions:
    """The run: what, where, how long"""

    task: str = option("image-classification", "what is trained")
    run_dir: str = option("", "run directory; default runs/TASK-MODEL-DATA-HASH: the same command continues the same run", OPERATIONAL)
    config: str | None = option(None, "YAML file of settings; the command line comes first", OPERATIONAL)
    fresh: bool = option(False, "start over, once per launch; the old run directory is moved to runs/.old/", OPERATIONAL)
    seed: int = option(0, "reaches initial weights, order, augmentation, masking, dropout")
    epochs: int = option(30, "passes over the training data; shapes the schedule")
    max_steps: int | None = option(None, "end after this many optimizer steps, if that comes first; shapes the schedule")
    stop_after: str | None = option(
        None, "save and leave with 75 after so many steps, or a duration (30s, 5min, 2h), of this start", OPERATIONAL)
    eval_only: bool = option(False, "evaluate the run's best checkpoint; one JSON line on standard output", OPERATIONAL)
    split: str = option("val", "what --eval-only evaluates: train, val or test", OPERATIONAL)
    nproc_per_node: int | None = option(None, "so many processes, by ./launch.sh", OPERATIONAL)


@options
class DataOptions:
    """Data"""

    data: str = option("demo", "a folder (images: train/CLASS/*, val/CLASS/*, or CLASS/*; text: train.csv, val.csv, ...), or a file of"
                       " texts (.csv, .tsv, .jsonl, .txt); demo = the built-in data")
    val_fraction: float = option(0.1, "share of train held out, per class, where there is no val, valid, validation or test")
    bad_samples: Literal["stop", "skip"] = option(
        "stop", "an unreadable sample stops the run (65), or has weight 0 and is listed", OPERATIONAL)
    workers: int | Auto = option("auto", "data loading processes per process; auto = spare cores", OPERATIONAL)


@options
class ImageOptions:
    """Images"""

    image_size: int = option(224, "side of the square the model sees, in pixels")
    augmentation: Literal["auto", "photo", "small", "shift", "none"] = option(
        "auto", "photo: random resized crop, flip; small: padded crop, flip; shift: padded crop; auto: photo above 64 px, else small")
    mean: tuple[float, float, float] = option((0.485, 0.456, 0.406), "channel means of the training pixels, in 0..1")
    std: tuple[float, float, float] = option((0.229, 0.224, 0.225), "channel standard deviations, in 0..1")
    interpolation: Literal["bilinear", "bicubic"] = option("bilinear", "how images are resized (antialiased)")


@options
class ModelOptions:
    """Model"""

    model: str = option("resnet18", "a torchvision classifier's name, or the model folder of another run")
    pretrained: bool = option(
        False, "start from the library's weights for --model NAME, or those in --model FOLDER; a new head where classes differ")
    weights: str | None = option(None, "file with weights for --model NAME (.pth or .safetensors); implies --pretrained")


@options
class TextOptions:
    """Text"""

    text_column: str = option("auto", "column with the text; A,B = a sentence pair; auto = text, else the only one besides the label")
    max_length: int = option(128, "tokens in a sample, special ones included")
    tokenizer: str = option("auto", "a tokenizer's name or folder; auto = that of --model, or one trained on the training texts")
    vocab_size: int = option(8192, "tokens of a tokenizer that is trained")


@options
class LabelOptions:
    """Labels"""

    label_column: str = option("label", "column with the class, in words or numbers")


@options
class MaskOptions:
    """Masks"""

    mask_probability: float = option(0.15, "share of a sample's tokens that are predicted; 80 % masked, 10 % random, 10 % as they are")


@options
class TextModelOptions:
    """Model"""

    model: str = option("bert-small", "built from scratch: bert-tiny, -mini, -small or -base; else a transformers name, or a model folder")
    pretrained: bool = option(False, "start from the weights of --model; a new head where the task or the classes differ")


@options
class BatchOptions:
    """Batches: ranks share out the micro-batches of a global batch"""

    global_batch_size: int = option(64, "samples per optimizer step, over all processes")
    micro_batch_size: int | Auto = option(
        "auto", "samples per forward and backward; auto = at most 64, under exact an eighth of the global batch", TOLERATED)
    eval_batch_size: int | Auto = option("auto", "samples per batch of an evaluation; auto = twice the micro-batch, at most 64", TOLERATED)


@options
class OptimOptions:
    """Optimization"""

    optimizer: Literal["adamw", "adam", "sgd"] = option("adamw", "AdamW, Adam with L2 decay, or SGD with Nesterov momentum")
    lr: float = option(0.001, "peak learning rate")
    min_lr: float = option(0.0, "learning rate at the end of the cosine or linear schedule")
    schedule: Literal["cosine", "linear", "constant"] = option("cosine", "after the warm-up")
    warmup_steps: int | Auto = option("auto", "optimizer steps of linear warm-up; auto = 5 % of the run")
    momentum: float = option(0.9, "of SGD")
    betas: tuple[float, float] = option((0.9, 0.999), "of AdamW and Adam")
    weight_decay: float = option(0.05, "not on biases and normalisation layers")
    max_grad_norm: float = option(0.0, "clip the gradient's norm at this; 0 = off")
    label_smoothing: float = option(0.0, "in the training loss; the evaluation loss is never smoothed")


@options
class DeviceOptions:
    """Device, precision, processes"""

    device: str = option("auto", "cpu, cuda or another accelerator that torch knows; auto = the accelerator, where there is one", TOLERATED)
    precision: Literal["auto", "fp32", "bf16", "fp16"] = option("auto", "auto = bf16 where the hardware computes in it", TOLERATED)
    tf32: Literal["auto", "always", "never"] = option(
        "auto", "CUDA: float32 products and convolutions in TF32 (three decimals); auto = not with fp32", TOLERATED)
    strategy: Literal["ddp", "exact"] = option("ddp", "exact: the same bits on any number of processes", TOLERATED)
    compile: bool = option(False, "torch.compile the model", TOLERATED)
    deterministic: bool = option(False, "deterministic algorithms, no autotuning; on the CPU always so", TOLERATED)
    threads: int | Auto = option(
        "auto", "arithmetic threads per process; auto = cores / processes at the first start, on the CPU under exact 1", TOLERATED)


@options
class RecordOptions:
    """Records and checkpoints"""

    log_every: int = option(10, "optimizer steps between train records", OPERATIONAL)
    eval_every: int | Literal["epoch"] = option("epoch", "optimizer steps between evaluations; epoch = at each epoch's end", OPERATIONAL)
    save_every: str = option("1000", "optimizer steps between checkpoints, or a duration (5min)", OPERATIONAL)
    keep: int = option(3, "newest checkpoints kept; the best one besides, and never fewer than two valid ones", OPERATIONAL)
    ledger: bool = option(False, "write the samples of every optimizer step into RUN/ledger.jsonl", OPERATIONAL)


@options
class FaultOptions:
    """Faults: seconds after which a process that does not get on leaves with 76, and what is tolerated"""

    start_timeout: float = option(300, "for the processes to meet, and for the first step", OPERATIONAL)
    step_timeout: float = option(100, "for a micro-batch with what follows it, and for its data", OPERATIONAL)
    section_timeout: float = option(
        300, "for a batch of an evaluation, a checkpoint (1 s more per 10 MB), what rank 0 does alone", OPERATIONAL)
    max_nonfinite: int = option(0, "optimizer steps whose gradient may be not finite; they change nothing (one more: 80)", OPERATIONAL)


@dataclass(frozen=True, kw_only=True)
class ImageClassificationConfig:
    """--task image-classification"""

    run: RunOptions = RunOptions()
    data: DataOptions = DataOptions()
    images: ImageOptions = ImageOptions()
    model: ModelOptions = ModelOptions()
    batch: BatchOptions = BatchOptions()
    optim: OptimOptions = OptimOptions()
    device: DeviceOptions = DeviceOptions()
    record: RecordOptions = RecordOptions()
    faults: FaultOptions = FaultOptions()


TEXT_OPTIM = OptimOptions(lr=5e-5, schedule="linear", weight_decay=0.01, max_grad_norm=1.0)


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
    optim: OptimOptions = replace(TEXT_OPTIM, lr=5e-4, betas=(0.9, 0.98))
    device: DeviceOptions = DeviceOptions()
    record: RecordOptions = RecordOptions()
    faults: FaultOptions = FaultOptions()


Config = ImageClassificationConfig | TextClassificationConfig | MaskedLMConfig
CONFIGS: dict[str, type] = {
    "image-classification": ImageClassificationConfig,
    "text-classification": TextClassificationConfig,
    "masked-lm": MaskedLMConfig,
}
NOT_KEPT = ("run_dir", "config", "fresh", "eval_only", "split", "nproc_per_node", "stop_after")  # say how this start runs, not what


def settings(config: Config) -> dict[str, Any]:
    """All settings as {name: value}, flat, in the order of the page above."""
    return {item.name: getattr(group, item.name) for group in _groups(config) for item in fields(group)}


def kinds(config: Config) -> dict[str, str]:
    """The kind of every setting, as {name: DEFINING | TOLERATED | OPERATIONAL}."""
    return {item.name: item.metadata["kind"] for group in _groups(config) for item in fields(group)}


def flag(name: str) -> str:
    """A setting as it is typed: "--lr"."""
    return f"--{name.replace('_', '-')}"


def duration_or_steps(name: str, text: str) -> tuple[int | None, float | None]:
    """(steps, None) for "1000", (None, seconds) for "90s", "5min", "2h". Raises UserError otherwise."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|min|h|)", text.strip())
    if not match or (not match[2] and "." in match[1]) or float(match[1]) <= 0:
        raise UserError(f"{flag(name)} {text}: give a number of optimizer steps (1000) or a duration (90s, 5min, 2h)")
    if not match[2]:
        return int(match[1]), None
    return None, float(match[1]) * {"s": 1, "min": 60, "h": 3600}[match[2]]


def _groups(config: Config) -> list[Any]:
    return [getattr(config, item.name) for item in fields(config) if is_dataclass(getattr(config, item.name))]
