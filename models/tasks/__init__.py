"""The tasks, as import paths: an image run never imports what only text needs."""

import json
import os
from importlib import import_module
from pathlib import Path

from utils.errors import Exit, UserError, say, some

TASKS = {
    "image-classification": "models.tasks.image_classification:ImageTask",
    "image-regression": "models.tasks.image_classification:ImageTask",
    "text-classification": "models.tasks.text_classification:LabelledTextTask",
    "text-regression": "models.tasks.text_classification:LabelledTextTask",
    "masked-lm": "models.tasks.masked_lm:MaskedLM",
}


def load_task(name: str) -> type:
    """The class of task `name`, a key of TASKS; imports its module. Raises UserError (64) for models/own.py."""
    from models.trial import require_own  # imports torch

    require_own()
    module, cls = TASKS[name].split(":")
    return getattr(import_module(module), cls)


def find_model(run: Path) -> tuple[Path, str]:
    """The model folder of a run, or `run` if it is one, and its task. Raises UserError (66)."""
    # folder
    if not run.is_dir():
        raise UserError(f"there is no run directory {run}", Exit.NO_INPUT)
    folder = next((folder for folder in (run / "model", run) if (folder / "config.json").exists()), None)
    if folder is None:
        raise UserError(
            f"{run} holds no model: train first (a run writes its model after its first evaluation), or name"
            f" another run; {run} has {some(sorted(os.listdir(run)))}", Exit.NO_INPUT)

    # task
    try:
        described = json.loads((folder / "config.json").read_text())
        task = described["task"]
    except KeyError:
        raise UserError(f"{folder} is not a model of train.py: its config.json names no task; train one from it first"
                        f" (train.py --model {folder} ...), and name that run", Exit.NO_INPUT) from None
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{folder / 'config.json'} was not written by a run ({type(error).__name__}: {error}); name a"
                        " run directory of train.py, or its model folder", Exit.NO_INPUT) from None
    if not isinstance(task, str) or task not in TASKS:
        raise UserError(f"{folder / 'config.json'}: unknown task {task}; the tasks are {', '.join(TASKS)}",
                        Exit.NO_INPUT)

    # an own network
    from models.trial import SOURCE  # imports torch

    if described.get("own_source", SOURCE) != SOURCE and os.environ.get("RANK", "0") == "0":
        say(f"warning: models/own.py changed since {folder} was written; if {described['architecture']} computes"
            " something else now, so does this model")
    return folder, task
