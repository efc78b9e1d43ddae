"""Which run a command belongs to: what names it, and what its run directory and every node must have in common.

What a run directory keeps of it is a contract: docs/run-directory.md. Nothing here imports torch.
"""

import hashlib
import json
import os
import re
import shlex
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from utils.errors import Exit, UserError, some
from utils.files import file_sha256, read_json
from utils.settings.command_line import as_words
from utils.settings.config import Config, facts, flag, settings, types
from utils.settings.habits import WITHOUT_EFFECT, without_former
from utils.settings.option import DEFINING, NAME_OR_PATH, OPERATIONAL, PATH, own_names

if TYPE_CHECKING:
    from utils.distributed.world import World

ROOT = Path(__file__).parents[2]
LOGS = {".log", ".out", ".err"}  # what a shell or a scheduler writes there, even before the first start
FORMER_VALUES = {"head_init": "random"}  # of settings that are newer than a run
BEFORE_AUTO = {"config.yaml", "command.txt", "env.txt", "starts.jsonl", "status.json", "tokenizer", "encoder",
               "bad_samples.txt"}


def identity(config: Config) -> dict[str, Any]:
    """The settings that make a run what it is, with paths made absolute."""
    known, defaults, values = facts(config), settings(type(config)()), settings(config)
    for name, value in values.items():
        path = known[name].path
        is_path = value != defaults[name] if path == PATH else (
            path == NAME_OR_PATH and value and value not in own_names() and Path(value).exists())
        if is_path:  # neither "demo" nor a library's name, which may have a slash, too
            values[name] = os.path.abspath(value)
    return {name: value for name, value in values.items() if known[name].kind != OPERATIONAL}


def kept_settings(config: Config) -> dict[str, Any]:
    """What config.yaml holds: the run's settings but those that are off, in types that YAML and JSON have."""
    known = facts(config)
    kept = {name: value for name, value in (settings(config) | identity(config)).items()
            if known[name].kept and value is not None}
    return json.loads(json.dumps(kept))


def run_path(config: Config) -> Path:
    """--run-dir, or runs/TASK-MODEL-DATA-HASH.

    The hash leaves out settings at their defaults, and at those that became `auto`, so that a new setting or default
    renames no run.
    """
    if config.run.run_dir:
        return Path(config.run.run_dir)
    values, defaults = identity(config), identity(type(config)())
    chosen = {name: value for name, value in values.items() if value not in (defaults[name], config.usual.get(name))}
    digest = hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()[:8]
    names = [re.sub(r"[^A-Za-z0-9._-]", "-", os.path.basename(str(values[name]))) for name in ("task", "model", "data")]
    return Path("runs") / "-".join([*names, digest])


def compare(config: Config, path: Path, note: Callable[[str], None] = lambda text: None) -> None:
    """Raise UserError (78) if the run in `path` has different defining settings; note different tolerated ones."""
    file, known = path / "config.yaml", facts(config)
    if not (path / "auto.json").exists():  # it never trained: a wrong setting may be corrected here
        # an empty log is one of a start that was killed while it cleaned up
        if strange := sorted(each.name for each in path.iterdir() if each.name not in BEFORE_AUTO
                             and not each.name.startswith((".", "log", "slurm-")) and each.suffix not in LOGS
                             and (each.is_dir() or each.stat().st_size)):
            raise UserError(f"{path} has {some(strange)} but no auto.json: it is no run directory, or a damaged one;"
                            " use a --run-dir that is new or empty", Exit.OTHER_RUN)
        return
    if (kept := read_json(path / "auto.json")) and kept.get("names_as_written", True):
        raise UserError(f"{path} was begun by a version before 0.10, which trained otherwise; finish it with version"
                        " 0.13, or use another --run-dir or --fresh", Exit.OTHER_RUN)

    # A setting that the file does not have is off, or newer than the run: its default counts.
    defaults, new = (json.loads(json.dumps(identity(each))) for each in (type(config)(), config))
    old = defaults | settings_in(file) | fixed_values(config, path)
    differ = {name: f"{flag(name)} was {old[name]} and is now {new[name]}" for name in new
              if old[name] != new[name] and not known[name].resolved  # Run.resolve and require_same compare those
              and not (known[name].fixed and new[name] == "auto")}
    if defining := [name for name in differ if known[name].kind == DEFINING]:
        words = [word for name in differ for word in as_words(name, new[name], types(config)[name])]
        is_longer = any(known[name].ends_run for name in defining)
        raise UserError(f"{path} was created with different settings: {'; '.join(map(differ.get, defining))}. Use its"
                        f" settings, another --run-dir, or --fresh{train_on(config, path, words) * is_longer}",
                        Exit.OTHER_RUN)
    if differ:
        changes_bits = any(known[name].changes_bits for name in differ)
        note("; ".join(differ.values()) + "; the run is not bit-exact from here on" * changes_bits)


def train_on(config: Config, path: Path, words: Iterable[str]) -> str:
    """How to train on from the end of the run in `path`, in words; "" where no extra takes --branch. words: as typed.
    """
    command = shlex.join(["python", "train.py", "--branch", str(path), *words])
    return f"; to train on from its end: {command}" if "branch" in facts(config) else ""


def fixed_values(config: Config, path: Path) -> dict[str, Any]:
    """What the settings that are fixed at the first start became in the run in `path`; {} before that start.

    Where auto.json of an older run does not say it, the setting was not `auto`: config.yaml has it, or FORMER_VALUES.
    """
    if not (kept := read_json(path / "auto.json")):
        return {}
    given = {name: value for name, value in settings_in(path / "config.yaml").items() if value != "auto"}
    found = FORMER_VALUES | given | kept
    return {name: found[name] for name, known in facts(config).items() if known.fixed and name in found}


def weights_digest(config: Config) -> str | None:
    """The sha256 of the initial weights in the file or folder that --weights or --model names; None if none is there.
    """
    values = settings(config)  # not every task has these
    if file := values.get("weights"):
        files = [Path(file)]
    else:
        files = sorted(Path(values["model"]).glob("model*.safetensors")) if values.get("pretrained") else []
    digests = [file_sha256(path) for path in files if path.is_file()]
    return hashlib.sha256("".join(digests).encode()).hexdigest() if digests else None


def settings_in(file: Path) -> dict[str, Any]:
    """config.yaml of a run. Raises UserError (64, 74)."""
    try:
        kept = {**yaml.safe_load(file.read_text())}
        return without_former({name: value for name, value in kept.items() if name not in WITHOUT_EFFECT}, file)
    except (yaml.YAMLError, TypeError) as error:
        raise UserError(f"{file} is damaged ({error}); restore it, or use another --run-dir or --fresh",
                        Exit.IO) from None


def require_same_program(config: Config, world: "World") -> None:
    """Raise UserError on every rank if settings, code or torch differ between nodes (65), or a folder (66). Collective.

    --pretrained is on by default if --model is a folder: which node lacks it is said first.
    """
    from utils.distributed.world import is_folder  # imports torch, without which restart.py reads a run's settings

    known = facts(config)
    values = {name: value for name, value in settings(config).items() if not known[name].per_node}
    pretrained = values.pop("pretrained", None)  # not every task has it
    world.require_same(code_digest(), "the program")
    world.require_same(extras_digest(), "the extras")  # their settings are among the settings
    world.require_same(json.dumps(values, sort_keys=True), "the settings")
    if "model" in values:
        is_folder(values["model"], world)  # Collective.
    world.require_same(json.dumps(pretrained), "--pretrained")
    world.require_same(metadata.version("torch"), "torch's version")


def code_digest() -> str:
    """The program: a digest of train.py and of every module of data/, engine/, models/ and utils/."""
    folders = ("data", "engine", "models", "utils")  # not all of data/: a user's data set may be there
    patterns = ("train.py", *(f"{folder}/{names}" for folder in folders for names in ("*.py", "*/*.py")))
    return _digest_of(file for pattern in patterns for file in ROOT.glob(pattern))


def extras_digest() -> str:
    """A digest of the extras and their list, without their tests and pages. What a run computes does not need them."""
    return _digest_of(file for file in (ROOT / "extras").rglob("*") if file.is_file() and not {
        "tests", "conftest.py", "README.md", "__pycache__"} & {*file.parts[len(ROOT.parts):]})


def _digest_of(files: Iterable[Path]) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in sorted(files))).hexdigest()[:16]
