"""The command line: words and a YAML file become one config.

    config = parse_command_line(argv, demo_settings)     # 0.15 s; nothing here imports torch

Precedence: task defaults < settings of the built-in data < --config FILE < command line.
"""

import argparse
import io
import os
import re
import shlex
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import tyro
import yaml

import utils
from utils.errors import SIGNALS, Exit, UserError, record_exit, say
from utils.settings.config import CONFIGS, Config, facts, flag, settings
from utils.settings.help import help_text
from utils.settings.run_options import RunOptions
from utils.settings.spelling import check_flags, one_by_one, suggestion, what_is_wrong, what_to_say

_COPY = {**dict.fromkeys(("http", "https", "ftp"), "curl -LO {url}"), "s3": "aws s3 sync {url} DIR",
         "gs": "gcloud storage rsync --recursive {url} DIR",
         "hf": "hf download {name} --local-dir DIR"}  # how to get what stands at an address
LAUNCHER = Path(__file__).parents[2] / "launch.sh"
DEFAULT_TASK = RunOptions().task
_HELP = {"-h": False, "--help": False, "--help-all": True, "--help_all": True}  # whether it shows rare settings too


def parse_command_line(argv: Sequence[str], demo_settings: Mapping[str, Mapping[str, Any]]) -> Config:
    """The settings of this start.

    demo_settings: {task: {name: value}}, defaults of the built-in data. `--nproc-per-node N` replaces this process by
    launch.sh. Exits with 0 after --help and --version; with 64 if a setting is wrong, 66 if a file is missing. Under
    torchrun only the first process of each node prints.
    """
    prints = os.environ.get("LOCAL_RANK", "0") == "0"  # on every node: files and arguments may differ between nodes
    try:
        return _parse(_without_local_rank(argv), demo_settings, prints)
    except UserError as error:
        if prints:
            say(f"train.py: {error}")
        record_exit(error.code)
        raise SystemExit(int(error.code)) from None


def _parse(argv: list[str], demo_settings: Mapping[str, Mapping[str, Any]], prints: bool) -> Config:
    first = _first_look(argv)
    if first.version:
        if prints:
            say(f"lockstep {utils.__version__}", sys.stdout)
        raise SystemExit(0)
    _refuse_numbers_of_nodes()

    # the file, and the task
    file = _config_file(first)
    file_settings = _read_yaml(file) if file else {}
    task = str(first.task or file_settings.get("task") or DEFAULT_TASK)
    if task not in CONFIGS:
        raise UserError(f"--task {task}: unknown task{suggestion(task, CONFIGS)}; choose from {', '.join(CONFIGS)}")
    _check_keys(file, file_settings, task)

    # all settings; the later word counts
    given = file_settings | {name: value for name, value in vars(first).items() if value is not None}
    defaults = _defaults(task, given, demo_settings.get(task, {}))
    words = [*_as_words(defaults), *_as_words(file_settings)]
    if not _HELP.keys().isdisjoint(argv):
        if prints:
            is_demo = given.get("data", "demo") == "demo" and task in demo_settings
            say(help_text(_call_tyro(task, words), _origin(is_demo, file), any(map(_HELP.get, argv))), sys.stdout)
        raise SystemExit(0)
    check_flags(argv, task)
    config = _call_tyro(task, [*words, *argv])
    _check_values(config)
    if (config.run.nproc_per_node or 1) > 1 and "LOCAL_RANK" not in os.environ:
        _become_launcher(config.run.nproc_per_node, argv)
    return config


def _defaults(task: str, given: Mapping[str, Any], demo: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults that depend on other settings: on --model, and on --data if that is the built-in data.

    demo: what suits the built-in data. What suits its model and optimizer is for these two alone.
    """
    config = CONFIGS[task]()
    known, usual = facts(config), settings(config) | demo
    defaults = dict(demo) if given.get("data", "demo") == "demo" else {}
    if any(given.get(name, usual[name]) != usual[name] for name in ("model", "optimizer")):
        defaults = {name: value for name, value in defaults.items() if not known[name].of_model}
    if "model" in given and "pretrained" in known and config.model.has_weights(str(given["model"])):
        defaults["pretrained"] = True
    return defaults


def _without_local_rank(argv: Sequence[str]) -> list[str]:
    """torch.distributed.launch passes --local-rank; torchrun's LOCAL_RANK says the same."""
    return [word for before, word in zip(["", *argv], argv, strict=False)
            if not re.match(r"--local[-_]rank(=|$)", word) and not re.fullmatch(r"--local[-_]rank", before)]


def _refuse_numbers_of_nodes() -> None:
    rank, world_size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if "LOCAL_RANK" not in os.environ and (rank is not None or int(world_size or 1) > 1):
        raise UserError(
            f"RANK={rank} WORLD_SIZE={world_size} without LOCAL_RANK: these number nodes, not processes, and come"
            " from a platform; start with ./launch.sh or torchrun --nnodes=... --node-rank=... train.py")


def _first_look(argv: list[str]) -> argparse.Namespace:
    """What decides how the rest is parsed: task, data, model, ..."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in ("task", "data", "model", "optimizer", "config", "run-dir"):
        parser.add_argument(f"--{name}", f"--{name.replace('-', '_')}")
    parser.add_argument("--eval-only", "--eval_only", action="store_true")
    parser.add_argument("--version", action="store_true")
    try:
        return parser.parse_known_args(argv)[0]
    except argparse.ArgumentError as error:
        raise UserError(f"{str(error.argument_name).partition('/')[0]}: give a value") from None


def _config_file(first: argparse.Namespace) -> str | None:
    """--config, or with --eval-only the file in --run-dir."""
    if not (first.eval_only and first.run_dir):
        return first.config
    file = Path(first.run_dir) / "config.yaml"
    if not file.is_file():
        raise UserError(f"--eval-only --run-dir {first.run_dir}: this is not a run directory, it has no config.yaml",
                        Exit.NO_INPUT)
    return str(file)


def _read_yaml(path: str) -> dict[str, Any]:
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"--config {path}: there is no such file", Exit.NO_INPUT) from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"--config {path}: cannot be read as YAML: {error}") from None
    if content is not None and not isinstance(content, dict):
        raise UserError(f"--config {path}: must contain `name: value` lines")
    return {str(name).replace("-", "_"): value for name, value in (content or {}).items()}


def _check_keys(file: str | None, names: Iterable[str], task: str) -> None:
    """Raise UserError if a setting in `file` is unknown to `task`, or may not stand in a file."""
    known = facts(CONFIGS[task]())
    for name in names:
        if name not in known:
            said = re.sub(r"--([a-z][a-z-]*)", lambda found: found[1].replace("-", "_"), what_to_say(name, task))
            raise UserError(f"{file}: {name}: unknown key; {said}")
        if not known[name].in_file:
            raise UserError(f"{file}: {name} is for one launch, not for a run: give {flag(name)} on the command line")


def _as_words(values: Mapping[str, Any]) -> list[str]:
    """Settings as words of a command line: both are checked alike (in YAML 1.1 `lr: 1e-3` is a string)."""
    words = []
    for name, value in values.items():
        if isinstance(value, bool):
            words.append(flag(name) if value else flag(f"no_{name}"))
        elif isinstance(value, dict):  # class_weights: {cat: 1, dog: 2}
            words += [flag(name), ",".join(f"{key}={each}" for key, each in value.items())]
        elif isinstance(value, list | tuple):
            words += [flag(name), *map(str, value)]
        else:
            words += [flag(name), str(value)]
    return words


def _call_tyro(task: str, words: Sequence[str]) -> Config:
    """Raises UserError if a value is wrong, or a word is no value."""
    if (config := _try_tyro(task, words)) is not None:
        return config
    wrong = next((each for each in one_by_one(words) if _try_tyro(task, each) is None), words)
    raise UserError(what_is_wrong(wrong, task))


def _try_tyro(task: str, words: Sequence[str]) -> Config | None:
    """None if something is wrong: tyro's own message is a box of many lines, so it is not shown."""
    try:
        with redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()):
            return tyro.cli(CONFIGS[task], args=words, config=(tyro.conf.OmitArgPrefixes,))
    except SystemExit:
        return None


def _check_values(config: Config) -> None:
    known = facts(config)
    for name, value in settings(config).items():
        if known[name].path and (remote := re.match(r"([\w+.-]+)://(.*)", str(value))):
            if remote[1].lower() == "file":
                raise UserError(f"{flag(name)} {value}: give the path alone: {remote[2]}")
            name_on_hub = re.sub("^datasets/(.*)", r"--repo-type dataset \1", remote[2])
            copy = _COPY.get(remote[1].lower(), "").format(url=shlex.quote(value), name=name_on_hub)
            way_out = "; copy it first" + (f", for example: {copy}" if copy else "")
            raise UserError(f"{flag(name)} {value}: must be on this machine{'' if name == 'run_dir' else way_out}")
        if rule := known[name].broken_rule(value):
            raise UserError(f"{' '.join(_as_words({name: value}))}: must be {rule}")


def _origin(is_demo: bool, file: str | None) -> str:
    if is_demo:
        return "The defaults are those of the built-in data; --data DIR --help shows those of your own."
    return f"The defaults are those of {file}." if file else ""


def _become_launcher(processes: int, argv: list[str]) -> None:
    sys.stdout.flush()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # the watchdog has blocked them
    os.environ |= {"LOCKSTEP_PYTHON": sys.executable, "LOCKSTEP_SCRIPT": sys.argv[0]}
    os.execvp("bash", ["bash", str(LAUNCHER), "--nnodes=1", f"--nproc-per-node={processes}", "--", *argv])
