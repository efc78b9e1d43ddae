"""The command line: words and a YAML file become one config.

    config = parse_command_line(argv, demo_settings)     # 0.15 s; nothing here imports torch

Precedence: task defaults < settings of the built-in data < --config FILE < command line.
"""

import os
import re
import shlex
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

import utils
from utils.errors import SIGNALS, Exit, UserError, leave, some
from utils.settings.config import CONFIGS, EXTRA_PAGES, Config, facts, flag, settings, types, with_values
from utils.settings.habits import FORMERLY_KEPT, without_former
from utils.settings.help import help_text
from utils.settings.run_options import RunOptions
from utils.settings.spelling import read_settings, setting_of, split, suggestion, what_to_say

_COPY = {**dict.fromkeys(("http", "https", "ftp"), "curl -LO {url}"), "s3": "aws s3 sync {url} DIR",
         "gs": "gcloud storage rsync --recursive {url} DIR",
         "hf": "hf download {name} --local-dir DIR"}  # how to get what stands at an address
LAUNCHER = Path(__file__).parents[2] / "launch.sh"
DEFAULT_TASK = RunOptions().task
_SWITCH = dict.fromkeys(("true", "yes", "on"), True) | dict.fromkeys(("false", "no", "off"), False)  # of YAML 1.1
_HELP = {"-h": False, "--help": False, "--help-all": True, "--help_all": True}  # whether it shows rare settings too


def parse_command_line(argv: Sequence[str], demo_settings: Mapping[str, Mapping[str, Any]],
                       extras: Sequence[Any] = ()) -> Config:
    """The settings of this start.

    demo_settings: {task: {name: value}}, defaults of the built-in data. extras: more pages of settings, from here on in
    every config. `--nproc-per-node N` replaces this process by launch.sh. Exits with 0 after --help and --version; with
    64 if a setting is wrong, 66 if a file is missing. Under torchrun only the first process of each node prints.
    """
    EXTRA_PAGES[:] = extras
    try:
        return _parse(argv, demo_settings)
    except UserError as error:
        leave(f"train.py: {error}", error.code)


def _parse(argv: Sequence[str], demo_settings: Mapping[str, Mapping[str, Any]]) -> Config:
    # torch.distributed.launch passes --local-rank; torchrun's LOCAL_RANK says the same
    flags = [each for each in split(argv) if setting_of(each[0]) != "local_rank"]
    first = {setting_of(word): behind[0] if behind else None for word, *behind in flags}
    if first.get("version", "") is None:
        leave(f"lockstep {utils.__version__}", Exit.DONE, sys.stdout)
    _refuse_numbers_of_nodes()

    # the file, or the run that this one goes on from, and the task
    file = _config_file(first)
    file_settings = _read_yaml(file) if file else {}
    for page in EXTRA_PAGES:
        if hasattr(page, "base"):
            file_settings |= page.base(flags)
    given = file_settings | {name: value for name, value in first.items() if value is not None}
    task = str(given.get("task") or DEFAULT_TASK)
    if task not in CONFIGS:
        raise UserError(f"--task {task}: unknown task{suggestion(task, CONFIGS)}; choose from {', '.join(CONFIGS)}")
    kinds = types(CONFIGS[task]())
    # of an older run, and the extra was deleted
    file_settings = {name: value for name, value in file_settings.items() if name in kinds or name not in FORMERLY_KEPT}
    _check_keys(file, file_settings, task)

    # all settings; the later one counts
    values = _defaults(task, given, demo_settings.get(task, {}))
    of_file = [as_words(name, value, kinds[name]) for name, value in file_settings.items()]
    values |= read_settings(of_file, task, f"{file}: " if file else "")
    if not _HELP.keys().isdisjoint(argv):
        is_demo = given.get("data", "demo") == "demo" and task in demo_settings
        defaults = with_values(CONFIGS[task](), values)
        leave(help_text(defaults, _origin(is_demo, file), any(map(_HELP.get, argv))), Exit.DONE, sys.stdout)
    config = with_values(CONFIGS[task](), values | read_settings(flags, task))
    _check_values(config)
    if (config.run.nproc_per_node or 1) > 1 and "LOCAL_RANK" not in os.environ:
        _become_launcher(config.run.nproc_per_node, argv)
    return config


def config_of(values: Mapping[str, Any]) -> Config:
    """The config with these settings, as config.yaml has them; the others are at their defaults. Raises UserError."""
    config = CONFIGS[values["task"]]()
    words = [as_words(name, value, types(config)[name]) for name, value in values.items() if name in types(config)]
    return with_values(config, read_settings(words, values["task"]))


def _defaults(task: str, given: Mapping[str, Any], demo: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults that depend on other settings: on --model, and on --data if that is the built-in data.

    demo: what suits the built-in data. Its rate is for its model and optimizer alone.
    """
    config = CONFIGS[task]()
    known, usual = facts(config), settings(config) | demo
    defaults = dict(demo) if given.get("data", "demo") == "demo" else {}
    if any(given.get(name, usual[name]) != usual[name] for name in ("model", "optimizer")):
        defaults.pop("lr", None)
    if "model" in given and "pretrained" in known and config.model.has_weights(str(given["model"])):
        defaults["pretrained"] = True
    return defaults


def _refuse_numbers_of_nodes() -> None:
    rank, world_size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if "LOCAL_RANK" not in os.environ and (rank is not None or int(world_size or 1) > 1):
        raise UserError(
            f"RANK={rank} WORLD_SIZE={world_size} without LOCAL_RANK: these number nodes, not processes, and come"
            " from a platform; start with ./launch.sh or torchrun --nnodes=... --node-rank=... train.py")


def _config_file(first: Mapping[str, str | None]) -> str:
    """--config, or with --eval-only the file in --run-dir. "" without a file."""
    if not ("eval_only" in first and first.get("run_dir")):
        return first.get("config") or ""
    file = Path(first["run_dir"]) / "config.yaml"
    if not file.is_file():
        raise UserError(f"--eval-only --run-dir {file.parent}: this is not a run directory, it has no config.yaml",
                        Exit.NO_INPUT)
    return str(file)


def _read_yaml(path: str) -> dict[str, Any]:
    try:
        text = Path(path).read_text(encoding="utf-8")
        content, node = yaml.load(text, Loader=yaml.BaseLoader), yaml.compose(text)  # all values are words
    except FileNotFoundError:
        raise UserError(f"--config {path}: there is no such file", Exit.NO_INPUT) from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"--config {path}: cannot be read as YAML: {error}") from None
    if content and not isinstance(content, dict):
        raise UserError(f"--config {path}: must contain `name: value` lines")
    names = [str(name.value).replace("-", "_") for name, _ in node.value] if content else []
    if twice := [name for place, name in enumerate(names) if name in names[:place]]:
        raise UserError(f"--config {path}: {some(twice)} stands there twice; leave one of the two out")
    return without_former({str(name).replace("-", "_"): value for name, value in (content or {}).items()}, path)


def _check_keys(file: str, names: Iterable[str], task: str) -> None:
    """Raise UserError if a setting in `file` is unknown to `task`, or may not stand in a file."""
    known = facts(CONFIGS[task]())
    for name in names:
        if name not in known:
            said = re.sub(r"(`.*?`)|--([a-z][a-z-]*)", lambda found: found[1] or found[2].replace("-", "_"),
                          what_to_say(name, task).removeprefix("unknown; "))
            raise UserError(f"{file}: {name}: unknown key; {said}")
        if not known[name].in_file:
            raise UserError(f"{file}: {name} is for one launch, not for a run: give {flag(name)} on the command line")


def as_words(name: str, value: Any, kind: Any = None) -> list[str]:
    """A setting of a file as it is typed, so that both are read alike."""
    if kind is bool and str(value).lower() in _SWITCH:
        return [flag(name if _SWITCH[str(value).lower()] else f"no_{name}")]
    if isinstance(value, dict):  # class_weights: {cat: 1, dog: 2}
        value = ",".join(f"{key}={each}" for key, each in value.items())
    return [flag(name), *map(str, value if isinstance(value, list | tuple) else [value])]


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
            raise UserError(f"{' '.join(as_words(name, value))}: must be {rule}")


def _origin(is_demo: bool, file: str) -> str:
    if is_demo:
        return "The defaults are those of the built-in data; --data DIR --help shows those of your own."
    return f"The defaults are those of {file}." if file else ""


def _become_launcher(processes: int, argv: Sequence[str]) -> None:
    sys.stdout.flush()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # the watchdog has blocked them
    os.environ |= {"LOCKSTEP_PYTHON": sys.executable, "LOCKSTEP_SCRIPT": sys.argv[0]}
    os.execvp("bash", ["bash", str(LAUNCHER), "--nnodes=1", f"--nproc-per-node={processes}", "--", *argv])
