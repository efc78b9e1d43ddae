"""Which run a command belongs to: what names it, and what its run directory and every node must have in common.

What a run directory keeps of it is a contract: docs/run-directory.md. Nothing here imports torch.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from utils.errors import Exit, UserError
from utils.settings.config import DEFINING, OPERATIONAL, TOLERATED, Config, kinds, settings


def identity(config: Config) -> dict[str, Any]:
    """The settings that make a run what it is, with paths made absolute."""
    values = {name: value for name, value in settings(config).items() if kinds(config)[name] != OPERATIONAL}
    if values["data"] != "demo":
        values["data"] = os.path.abspath(values["data"])
    for name in ("model", "tokenizer", "weights"):
        if values.get(name) and Path(values[name]).exists():  # else a library's name, which may have a slash in it too
            values[name] = os.path.abspath(values[name])
    return values


def run_path(config: Config) -> Path:
    """--run-dir, or runs/TASK-MODEL-DATA-HASH. Settings at their defaults are left out of the hash: a new setting renames no run."""
    if config.run.run_dir:
        return Path(config.run.run_dir)
    values, defaults = identity(config), identity(type(config)())
    chosen = {name: value for name, value in values.items() if value != defaults[name]}
    digest = hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()[:8]
    names = [re.sub(r"[^A-Za-z0-9._-]", "-", os.path.basename(str(part))) for part in (values["task"], values["model"], values["data"])]
    return Path("runs") / "-".join([*names, digest])


def compare(config: Config, path: Path, note: Callable[[str], None] = lambda text: None) -> None:
    """Raise UserError (78) if the run in `path` has other defining settings; note other tolerated ones."""
    file = path / "config.yaml"
    if not (path / "auto.json").exists():  # it never came to training: whoever mends a wrong setting may go on here
        if any(path.glob("checkpoints/step-*")):
            raise UserError(f"{path} has checkpoints and no auto.json: it is no run directory of this program", Exit.OTHER_RUN)
        return
    defaults = json.loads(json.dumps(identity(type(config)())))  # of what the file does not name: it is off, or newer than the run
    try:
        old, new = defaults | yaml.safe_load(file.read_text()), json.loads(json.dumps(identity(config)))
    except (yaml.YAMLError, TypeError) as error:
        raise UserError(f"{file} is damaged ({error}); restore it, or use another --run-dir or --fresh", Exit.IO) from None
    # Compared by fingerprint (require_same), and by what auto became (settle).
    apart = ("data", "device", "threads", "precision", "micro_batch_size", "eval_batch_size")
    differ = {kind: [f"{name} is {old[name]} there and {new[name]} here" for name in new
                     if old[name] != new[name] and kinds(config)[name] == kind and name not in apart]
              for kind in (DEFINING, TOLERATED)}
    if differ[DEFINING]:
        is_longer = re.search(r"'(epochs|max_steps) is", str(differ))
        longer = " To train past the end, start a new run from it: --model RUN/model --pretrained." if is_longer else ""
        raise UserError(f"{path} belongs to other settings: {'; '.join(differ[DEFINING])}."
                        f" Use these, another --run-dir, or --fresh.{longer}", Exit.OTHER_RUN)
    if differ[TOLERATED]:
        note(f"{'; '.join(differ[TOLERATED])}: not bit-exact from here")


def require_same_program(config: Config, world: Any) -> None:
    """Raise UserError (65) on every rank where settings, code or torch differ between nodes: each would compute its own. Collective."""
    of_a_node = ("data", "config", "run_dir", "workers", "nproc_per_node")  # data: by fingerprint, not by path
    values = {name: value for name, value in settings(config).items() if name not in of_a_node}
    world.require_same(json.dumps(values, sort_keys=True), "the settings")
    world.require_same(code_digest(), "the program")
    world.require_same(metadata.version("torch"), "torch's version")


def code_digest() -> str:
    """The program: a digest of train.py and of every module of data/, engine/, models/ and utils/."""
    root = Path(__file__).parents[2]  # not all of data/: a data set of the user's may lie there
    patterns = ("train.py", *(f"{folder}/{names}" for folder in ("data", "engine", "models", "utils") for names in ("*.py", "*/*.py")))
    files = sorted(file for pattern in patterns for file in root.glob(pattern))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
