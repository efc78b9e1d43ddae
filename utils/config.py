"""Every setting of a run on one page, and the command line made of it.

    config, given = parse_command_line(argv, demo_settings)     # 0.15 s; nothing here imports torch

One frozen dataclass per concern; a task's config gathers them with its own defaults. A setting has one kind (utils/run.py
acts on it): DEFINING settings name the run, TOLERATED ones name it too but may change within it, OPERATIONAL ones do neither.
Precedence: task defaults < settings of the built-in data < --config FILE < command line.
"""

import argparse
import difflib
import io
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
import yaml

from utils.errors import Exit, UserError, record_exit

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
    fresh: bool = option(False, "start over; the old run directory is moved to runs/.old/", OPERATIONAL)
    seed: int = option(0, "reaches initial weights, order, augmentation, dropout")
    epochs: int = option(30, "passes over the training data; shapes the schedule")
    max_steps: int | None = option(None, "end after this many optimizer steps, if that comes first; shapes the schedule")
    stop_after: str | None = option(
        None, "save and leave with 75 after so many steps, or a duration (30s, 5min, 2h), of this start", OPERATIONAL)
    eval_only: bool = option(False, "evaluate the run's best checkpoint; one JSON line on standard output", OPERATIONAL)
    split: str = option("val", "what --eval-only evaluates: train, val or test", OPERATIONAL)
    nproc_per_node: int | None = option(None, "run under torchrun with so many processes", OPERATIONAL)


@options
class DataOptions:
    """Data"""

    data: str = option("demo", "a folder with train/CLASS/* and val/CLASS/*, or of CLASS/*; demo = the built-in data")
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
class BatchOptions:
    """Batches: ranks share out the micro-batches of a global batch"""

    global_batch_size: int = option(64, "samples per optimizer step, over all processes")
    micro_batch_size: int | Auto = option("auto", "samples per forward and backward; ranks share the micro-batches out", TOLERATED)


@options
class OptimOptions:
    """Optimization"""

    optimizer: Literal["adamw", "sgd"] = option("adamw", "AdamW, or SGD with Nesterov momentum")
    lr: float = option(0.001, "peak learning rate")
    min_lr: float = option(0.0, "learning rate at the end of the cosine or linear schedule")
    schedule: Literal["cosine", "linear", "constant"] = option("cosine", "after the warm-up")
    warmup_steps: int | Auto = option("auto", "optimizer steps of linear warm-up; auto = 5 % of the run")
    momentum: float = option(0.9, "of SGD")
    betas: tuple[float, float] = option((0.9, 0.999), "of AdamW")
    weight_decay: float = option(0.05, "not on biases and normalisation layers")
    max_grad_norm: float = option(0.0, "clip the gradient's norm at this; 0 = off")
    label_smoothing: float = option(0.0, "in the training loss; the evaluation loss is never smoothed")


@options
class DeviceOptions:
    """Device, precision, processes"""

    device: Literal["auto", "cpu", "cuda"] = option("auto", "auto = cuda where there is one", TOLERATED)
    precision: Literal["auto", "fp32", "bf16", "fp16"] = option("auto", "auto = bf16 where the hardware computes in it", TOLERATED)
    strategy: Literal["ddp", "exact"] = option("ddp", "exact: the same bits on any number of processes", TOLERATED)
    compile: bool = option(False, "torch.compile the model", TOLERATED)
    deterministic: bool = option(False, "CUDA: deterministic algorithms, no autotuning; on CPU always so", TOLERATED)
    threads: int | Auto = option("auto", "arithmetic threads per process; auto = cores / processes at the first start", TOLERATED)


@options
class RecordOptions:
    """Records and checkpoints"""

    log_every: int = option(10, "optimizer steps between train records", OPERATIONAL)
    eval_every: int | Literal["epoch"] = option("epoch", "optimizer steps between evaluations; epoch = at each epoch's end", OPERATIONAL)
    save_every: str = option("1000", "optimizer steps between checkpoints, or a duration (5min)", OPERATIONAL)
    keep: int = option(3, "newest checkpoints kept; the best one is kept besides", OPERATIONAL)


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


CONFIGS: dict[str, type] = {"image-classification": ImageClassificationConfig}
Config = ImageClassificationConfig  # the type of any task's config; more tasks make it a Union
NOT_KEPT = ("run_dir", "config", "fresh", "eval_only", "split", "nproc_per_node", "stop_after")  # say how this start runs, not what


def settings(config: Config) -> dict[str, Any]:
    """All settings as {name: value}, flat, in the order of the page above."""
    return {item.name: getattr(group, item.name) for group in _groups(config) for item in fields(group)}


def kinds(config: Config) -> dict[str, str]:
    """The kind of every setting, as {name: DEFINING | TOLERATED | OPERATIONAL}."""
    return {item.name: item.metadata["kind"] for group in _groups(config) for item in fields(group)}


def duration_or_steps(name: str, text: str) -> tuple[int | None, float | None]:
    """(steps, None) for "1000", (None, seconds) for "90s", "5min", "2h". Raises UserError otherwise."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|min|h|)", text.strip())
    if not match or (not match[2] and "." in match[1]) or float(match[1]) <= 0:
        raise UserError(f"--{_dashed(name)} {text}: give a number of optimizer steps (1000) or a duration (90s, 5min, 2h)")
    if not match[2]:
        return int(match[1]), None
    return None, float(match[1]) * {"s": 1, "min": 60, "h": 3600}[match[2]]


def parse_command_line(argv: Sequence[str], demo_settings: Mapping[str, Mapping[str, Any]]) -> tuple[Config, frozenset[str]]:
    """The config, and the names of the settings that were given on the command line or in --config.

    demo_settings: {task: {name: value}}, defaults of the built-in data. Exits (64) on what the user got wrong, 0 after --help;
    under torchrun rank 0 alone prints. `--nproc-per-node N` replaces this process by torchrun.
    """
    speaks = os.environ.get("RANK", "0") == "0" or "LOCAL_RANK" not in os.environ  # without that it is a node's number
    try:
        return _parse(list(argv), demo_settings, speaks)
    except UserError as error:
        if speaks:
            print(f"train.py: {error}", file=sys.stderr)
        record_exit(error.code)
        raise SystemExit(int(error.code)) from None


def _parse(argv: list[str], demo_settings: Mapping, speaks: bool) -> tuple[Config, frozenset[str]]:
    # torch.distributed.launch passes --local-rank; torchrun's LOCAL_RANK says the same.
    argv = [word for before, word in zip(["", *argv], argv, strict=False)
            if not re.match(r"--local[-_]rank(=|$)", word) and not re.fullmatch(r"--local[-_]rank", before)]
    if "LOCAL_RANK" not in os.environ and ("RANK" in os.environ or int(os.environ.get("WORLD_SIZE", 1)) > 1):
        raise UserError(
            f"RANK={os.environ.get('RANK')} WORLD_SIZE={os.environ.get('WORLD_SIZE')} without LOCAL_RANK: these are numbers of nodes,"
            " set by a platform, not of processes; start with ./launch.sh or torchrun --nnodes=... --node-rank=... train.py")
    first = _first_look(argv)
    if first.eval_only and first.run_dir and not (Path(first.run_dir) / "config.yaml").is_file():
        raise UserError(f"--eval-only --run-dir {first.run_dir}: there is no config.yaml there, so it is no run directory", Exit.NO_INPUT)
    if first.eval_only and first.run_dir:
        first.config = str(Path(first.run_dir) / "config.yaml")
    file_settings = _read_yaml(first.config) if first.config else {}
    task = first.task or file_settings.get("task") or "image-classification"
    if str(task) not in CONFIGS:
        raise UserError(f"--task {task}: there is no such task{_close(task, CONFIGS)}; there is {', '.join(CONFIGS)}")
    cls = CONFIGS[task]
    names = settings(cls())
    for name in file_settings:
        if name not in names:
            raise UserError(f"{first.config}: unknown key {name}{_close(name, names)}; `train.py --task {task} --help` lists the settings")
    demo = demo_settings.get(task, {}) if (first.data or file_settings.get("data", "demo")) == "demo" else {}
    words = _tokens(demo) + _tokens(file_settings) + argv
    try:
        with redirect_stderr(sys.stderr if speaks else io.StringIO()):  # console_outputs leaves errors in values out (tyro 1.0)
            config = tyro.cli(
                cls, args=words, prog="train.py", description=_USAGE, console_outputs=speaks, config=(tyro.conf.OmitArgPrefixes,))
    except SystemExit as stop:  # tyro has said why
        record_exit(Exit.USAGE if stop.code else Exit.DONE)
        raise SystemExit(int(Exit.USAGE) if stop.code else 0) from None
    typed = {word[2:].split("=")[0].replace("-", "_") for word in argv if word.startswith("--")}
    typed |= {name[3:] for name in typed if name.startswith("no_")}
    _check(config)
    if config.run.nproc_per_node and "LOCAL_RANK" not in os.environ:
        _become_torchrun(config.run.nproc_per_node, argv)
    return config, frozenset(names) & (frozenset(typed) | frozenset(file_settings))


_USAGE = "Train a model, on one process or many. The same command continues the same run; `--task T --help` lists the settings of task T."


def _check(config: Config) -> None:
    """Rules on single settings. Raises UserError."""
    at_least = {"epochs": 1, "max_steps": 1, "global_batch_size": 1, "micro_batch_size": 1, "threads": 1, "workers": 0, "log_every": 1,
                "eval_every": 1, "keep": 1, "image_size": 1, "warmup_steps": 0, "lr": 0, "min_lr": 0, "weight_decay": 0, "max_grad_norm": 0,
                "nproc_per_node": 1, "momentum": 0, "label_smoothing": 0, "seed": 0}
    values = settings(config)
    for name, least in at_least.items():
        value = values.get(name)
        if isinstance(value, int | float) and not least <= value < math.inf:
            raise UserError(f"--{_dashed(name)} {value}: must be a number, at least {least}")
    for name in ("val_fraction", "label_smoothing", "momentum"):
        if not 0 <= values[name] < 1:
            raise UserError(f"--{_dashed(name)} {values[name]}: must be at least 0 and below 1")
    if not all(0 <= value < 1 for value in values["betas"]):
        raise UserError(f"--betas {values['betas']}: both must be at least 0 and below 1")
    if not all(0 < value < math.inf for value in values["std"]) or not all(map(math.isfinite, values["mean"])):
        raise UserError(f"--mean {values['mean']} --std {values['std']}: numbers, those of --std above 0")
    if values["split"] not in ("train", "val", "test"):
        raise UserError(f"--split {values['split']}: must be train, val or test")
    for name in ("stop_after", "save_every"):
        if values[name] is not None:
            duration_or_steps(name, values[name])


def _first_look(argv: list[str]) -> argparse.Namespace:
    """What decides how the rest is parsed: task, data, config file, run directory."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in ("task", "data", "config", "run-dir"):
        parser.add_argument(f"--{name}", f"--{name.replace('-', '_')}")
    parser.add_argument("--eval-only", "--eval_only", action="store_true")
    try:
        return parser.parse_known_args(argv)[0]
    except argparse.ArgumentError as error:
        raise UserError(str(error)) from None


def _read_yaml(path: str) -> dict[str, Any]:
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"--config {path}: there is no such file", Exit.NO_INPUT) from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"--config {path}: cannot be read as YAML: {error}") from None
    if content is not None and not isinstance(content, dict):
        raise UserError(f"--config {path}: must hold `name: value` lines")
    return {str(name).replace("-", "_"): value for name, value in (content or {}).items()}


def _tokens(values: Mapping[str, Any]) -> list[str]:
    """Settings as command-line words, so that files and command lines are validated alike (in YAML 1.1 `lr: 1e-3` is a string)."""
    words = []
    for name, value in values.items():
        flag = f"--{_dashed(name)}"
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{_dashed(name)}")
        elif isinstance(value, list | tuple):
            words += [flag, *map(str, value)]
        else:
            words += [flag, str(value)]
    return words


def _become_torchrun(processes: int, argv: list[str]) -> None:
    words = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={processes}", sys.argv[0], *argv]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *words])


def _groups(config: Config) -> list[Any]:
    return [getattr(config, item.name) for item in fields(config) if is_dataclass(getattr(config, item.name))]


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _close(word: str, known: Mapping) -> str:
    match = difflib.get_close_matches(str(word), list(known), n=1)
    return f" (did you mean {match[0]}?)" if match else ""
