"""What users of other trainers type out of habit, and what answers it here.

    answer("learning-rate", "masked-lm")                       # "use --lr"
    answer("resume", "masked-lm")                              # "not needed: the same command continues the run"

Spellings: timm, torchvision's references, Hugging Face's Trainer, Lightning, Ultralytics. Nothing here imports torch.

Tests: tests/unit/utils/settings/test_spelling.py
"""

import difflib
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from utils.errors import UserError
from utils.settings.config import CONFIGS, facts, types

# Settings that are gone, and what each of them always is now.
FORMER = {"flip": "auto", "crop_scale": 0.08, "randaugment_ops": 2, "randaugment_magnitude": 9, "cache_size": "auto",
          "min_lr": 0, "step_factor": 0.1, "tf32": "auto", "debug_distributed": False,
          "early_stop_min_delta": 0, "head_lr_factor": "auto", "interpolation": "auto", "mask_probability": 0.15,
          "section_timeout": 300, "start_timeout": 300, "step_epochs": 30, "ledger": False}
# of FORMER: no result of a run depends on the first three, and auto.json has what the others became
WITHOUT_EFFECT = ("debug_distributed", "ledger", "section_timeout", "start_timeout", "head_lr_factor", "interpolation")
FORMERLY_KEPT = ("report",)  # settings of extras that config.yaml and starts.jsonl of older runs have
CLOSE = 0.8  # difflib's ratio of two spellings: --epoch is close to --epochs, --amp to nothing


@cache
def answers() -> dict[str, str]:
    """The answer to each spelling, with dashes; habits.tsv says what an answer is."""
    lines = Path(__file__).with_suffix(".tsv").read_text().splitlines()
    rows = [line.split("\t") for line in lines if line and not line.startswith("#")]
    return {spelling: said for said, spellings in rows for spelling in spellings.split()}


def without_former(values: Mapping[str, Any], file: str | Path) -> dict[str, Any]:
    """The settings of `file` without those that are gone. Raises UserError (64) if one was not what it is now."""
    is_idle = {"step_epochs": values.get("schedule") != "step",
               "early_stop_min_delta": not _plain(values.get("early_stop_patience", 0))}
    for name in (name for name in FORMER if name in values):
        is_usual = name != "step_epochs" and _plain(values[name]) == _plain(FORMER[name])
        if not (is_usual or is_idle.get(name)):
            said = answers()[name.replace("_", "-")]
            raise UserError(f"{file}: {name}: {values[name]}: {said}; remove it from a file of your own; a run that"
                            " began with it needs the version that began it")
    return {name: value for name, value in values.items() if name not in FORMER}


def _plain(value: Any) -> float | str:
    """A value as a file may have it: 0.1 and "1e-1" are one number, False and "false" one word."""
    with suppress(ValueError):
        return float(str(value))
    return str(value).lower()


def answer(name: str, task: str) -> str:
    """What to say of an unknown setting. name: with dashes, as in "learning-rate"; "" if there is nothing to say."""
    name = name.lower().rpartition(".")[2]  # Lightning: --trainer.max-epochs
    known = [known.replace("_", "-") for known in facts(CONFIGS[task]())]
    if name in known:  # --LR, -lr, --optim.lr
        return f"use --{name}"
    if (said := _of_habit(name, task) or _of_other_tasks(name, task)) or name in answers():
        return said
    if close := difflib.get_close_matches(name, known, n=1, cutoff=CLOSE):
        return f"did you mean --{close[0]}?"
    close = difflib.get_close_matches(name, answers(), n=1, cutoff=CLOSE)
    return _of_habit(close[0], task) if close else ""


def _of_habit(name: str, task: str) -> str:
    """The table's answer, if this program has what it names; for another task, with the task's name."""
    said = answers().get(name, "")
    if not said.startswith("--"):
        return said
    having = [each for each in CONFIGS if _has_all(said, each)]
    if task in having:
        return f"use {said}"
    return f"use {said}, with --task {' or '.join(having)}" if having else ""


def _of_other_tasks(name: str, task: str) -> str:
    having = [each for each in CONFIGS if name.replace("-", "_") in facts(CONFIGS[each]())]
    return f"a setting of --task {' and '.join(having)}; this is --task {task}" if having else ""


def _has_all(said: str, task: str) -> bool:
    """Whether the task has every flag of an answer, and the choice that stands behind it."""
    known = types(CONFIGS[task]())

    def has(name: str, choice: str) -> bool:
        kind = known.get(name.replace("-", "_"))
        return kind is not None and (not choice or get_origin(kind) is not Literal or choice in get_args(kind))

    return all(has(*found) for found in re.findall(r"--([a-z-]+)(?: ([a-z0-9][a-z0-9-]*))?", said))
