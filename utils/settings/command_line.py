"""The command line: words and a YAML file become one config.

    config = parse_command_line(argv, demo_settings)     # 0.15 s; nothing here imports torch

Precedence: task defaults < settings of the built-in data < --config FILE < command line.
"""

import argparse
import difflib
import io
import math
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import tyro
import yaml

from utils.errors import SIGNALS, Exit, UserError, record_exit
from utils.settings.config import CONFIGS, Config, RunOptions, duration_or_steps, flag, settings

LAUNCHER = Path(__file__).parents[2] / "launch.sh"


def parse_command_line(argv: Sequence[str], demo_settings: Mapping[str, Mapping[str, Any]]) -> Config:
    """The settings of this start.

    demo_settings: {task: {name: value}}, defaults of the built-in data. Exits (64) on what the user got wrong, 0 after --help;
    under torchrun the first process of each node alone prints. `--nproc-per-node N` replaces this process by launch.sh.
    """
    speaks = os.environ.get("LOCAL_RANK", "0") == "0"  # for its own node: files and arguments may differ between nodes
    try:
        return _parse(list(argv), demo_settings, speaks)
    except UserError as error:
        if speaks:
            print(f"train.py: {error}", file=sys.stderr)
        record_exit(error.code)
        raise SystemExit(int(error.code)) from None


def _parse(argv: list[str], demo_settings: Mapping, speaks: bool) -> Config:
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
    if "fresh" in file_settings:
        raise UserError(f"{first.config}: fresh is about one start, not about a run: give --fresh on the command line")
    demo = demo_settings.get(task, {}) if (first.data or file_settings.get("data", "demo")) == "demo" else {}
    words = _tokens(demo) + _tokens(file_settings) + argv
    prog = "train.py" if task == RunOptions().task else f"train.py --task {task}"  # an error points to the --help of the task
    try:
        with redirect_stderr(sys.stderr if speaks else io.StringIO()):  # console_outputs leaves errors in values out (tyro 1.0)
            config = tyro.cli(cls, args=words, prog=prog, description=_USAGE, console_outputs=speaks, config=(tyro.conf.OmitArgPrefixes,))
    except SystemExit as stop:  # tyro has said why
        record_exit(Exit.USAGE if stop.code else Exit.DONE)
        raise SystemExit(int(Exit.USAGE) if stop.code else 0) from None
    _check(config)
    if (config.run.nproc_per_node or 1) > 1 and "LOCAL_RANK" not in os.environ:
        _become_launcher(config.run.nproc_per_node, argv)
    return config


_USAGE = "Train a model, on one process or many. The same command continues the same run; `--task T --help` lists the settings of task T."


def _check(config: Config) -> None:
    """Rules on single settings. Raises UserError."""
    at_least = {
        "epochs": 1, "max_steps": 1, "global_batch_size": 1, "micro_batch_size": 1, "eval_batch_size": 1, "threads": 1,
        "workers": 0, "log_every": 1, "eval_every": 1, "keep": 1, "image_size": 1, "max_length": 8, "vocab_size": 64,
        "warmup_steps": 0, "lr": 0, "min_lr": 0, "weight_decay": 0, "max_grad_norm": 0, "nproc_per_node": 1, "momentum": 0,
        "label_smoothing": 0, "seed": 0, "start_timeout": 1, "step_timeout": 1, "section_timeout": 1, "max_nonfinite": 0}
    values = settings(config)
    for name, least in at_least.items():
        value = values.get(name)
        if isinstance(value, int | float) and not least <= value < math.inf:
            raise UserError(f"{flag(name)} {value}: must be a number, at least {least}")
    for name in ("start_timeout", "step_timeout", "section_timeout", "seed"):
        most = 2**63 - 1 if name == "seed" else 10**7
        if values[name] > most:
            raise UserError(f"{flag(name)} {values[name]}: must be at most {most}")
    for name in ("val_fraction", "label_smoothing", "momentum", "mask_probability"):
        if not 0 <= values.get(name, 0) < 1:
            raise UserError(f"{flag(name)} {values[name]}: must be at least 0 and below 1")
    if values.get("mask_probability") == 0:
        raise UserError("--mask-probability 0: must be above 0, or there is nothing to predict")
    if not all(0 <= value < 1 for value in values["betas"]):
        raise UserError(f"--betas {values['betas']}: both must be at least 0 and below 1")
    mean, std = values.get("mean", ()), values.get("std", ())  # of images
    if not all(0 < value < math.inf for value in std) or not all(map(math.isfinite, mean)):
        raise UserError(f"--mean {mean} --std {std}: numbers, those of --std above 0")
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
        if isinstance(value, bool):
            words.append(flag(name) if value else flag(f"no_{name}"))
        elif isinstance(value, list | tuple):
            words += [flag(name), *map(str, value)]
        else:
            words += [flag(name), str(value)]
    return words


def _become_launcher(processes: int, argv: list[str]) -> None:
    sys.stdout.flush()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # which the watchdog had blocked
    os.environ |= {"LOCKSTEP_PYTHON": sys.executable, "LOCKSTEP_SCRIPT": sys.argv[0]}
    os.execvp("bash", ["bash", str(LAUNCHER), "--nnodes=1", f"--nproc-per-node={processes}", "--", *argv])


def _close(word: str, known: Mapping) -> str:
    match = difflib.get_close_matches(str(word), list(known), n=1)
    return f" (did you mean {match[0]}?)" if match else ""
