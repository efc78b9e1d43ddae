"""The run that a branch begins from, and its checkpoint. This imports no torch.

Tests: extras/branch/tests/test_launches.py
"""

import os
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from utils.errors import Exit, UserError, some
from utils.files import json_lines, read_json
from utils.rundir.identity import settings_in
from utils.settings.config import CONFIGS, facts

LAST, BEST, OF_EPOCH = "last", "best", "epoch:"


@dataclass(frozen=True)
class Parent:
    """A run, as it was when one of its checkpoints was saved."""

    path: Path
    checkpoint: Path
    trainer: Mapping[str, Any]  # of the checkpoint: "progress", "best"
    link: Mapping[str, Any]  # of the checkpoint, see utils/rundir/chain.py; {} before version 0.11
    start: Mapping[str, Any]  # of starts.jsonl, of the start that saved it; {} before version 0.11

    @property
    def step(self) -> int:
        """How many optimizer steps were done."""
        return self.trainer["progress"]["step"]

    @property
    def is_end_of_epoch(self) -> bool:
        """Whether an epoch ended with that step."""
        return self.trainer["progress"]["sample_offset"] == 0

    @property
    def settings(self) -> dict[str, Any]:
        """The run's settings then, as config.yaml has them; with what `auto` was where a run keeps that."""
        known, given = facts(CONFIGS[self._settings["task"]]()), self._settings
        return given | {name: self.resolved[name] for name, value in given.items()
                        if value == "auto" and name in known and known[name].fixed and name in self.resolved}

    @property
    def _settings(self) -> dict[str, Any]:
        return dict(self.start.get("settings") or settings_in(self.path / "config.yaml"))

    @property
    def resolved(self) -> dict[str, Any]:
        """What `auto` was then, as auto.json has it."""
        return dict(self.start.get("resolved") or read_json(self.path / "auto.json"))


def parts_of(spec: str) -> tuple[Path, str]:
    """RUN and the word for the step: a number, best, epoch:N or last."""
    run, at, word = spec.rpartition("@")
    if at and re.fullmatch(rf"\d+|{BEST}|{LAST}|{OF_EPOCH}\d+", word):
        return Path(run), word
    return Path(spec), LAST


def name_of_run(run: Path) -> str:
    """The last part of its path."""
    return os.path.basename(os.path.abspath(run))


def folder_beside(run: Path) -> Path:
    """The folder in which it lies."""
    folder = os.path.dirname(os.path.abspath(run))
    return Path(folder if run.is_absolute() else os.path.relpath(folder))


def find_parent(spec: str) -> Parent:
    """The parent that RUN@STEP names. Raises UserError: 66 where there is no such run, or no such checkpoint."""
    run, word = parts_of(spec)
    if not (run / "auto.json").exists():
        raise UserError(f"--branch {spec}: {run} is not the directory of a run that has begun", Exit.NO_INPUT)
    found = [*checkpoints_of(run)]
    if not found:
        raise UserError(f"--branch {spec}: {run} holds no checkpoint", Exit.NO_INPUT)
    best = found[0].trainer["best"].get("step")
    for parent in found:
        epoch = parent.trainer["progress"]["epoch"] if parent.is_end_of_epoch else None
        if word in (LAST, str(parent.step), f"{OF_EPOCH}{epoch}") or (word == BEST and parent.step == best):
            return parent
    wanted = int(word) if word.isdecimal() else found[0].step
    steps = sorted({parent.step for parent in found}, key=lambda step: (abs(step - wanted), step))  # the nearest first
    made = f"; this makes one: {shlex.join(['python', '-m', 'ask.verify', str(run), '--keep', word])}"
    raise UserError(f"--branch {spec}: {run} has no checkpoint there; it has those of step {some(map(str, steps))}"
                    + made * (word.isdecimal() and wanted <= found[0].step), Exit.NO_INPUT)


def checkpoints_of(run: Path) -> Iterator[Parent]:
    """The checkpoints of a run, the newest first; of two of a step the evaluated one. Those that go meanwhile are none.
    """
    starts = {line["start"]: line for line in json_lines(run / "starts.jsonl")}

    def age(path: Path) -> tuple[int, ...]:
        return *map(int, re.findall(r"\d+", path.name)), not path.name.endswith("-unevaluated")

    paths = [path for path in run.glob("checkpoints/step-*") if re.search(r"-g\d+(-unevaluated)?$", path.name)]
    for path in sorted(paths, key=age, reverse=True):
        trainer, manifest = read_json(path / "trainer.json"), read_json(path / "MANIFEST.json")
        if trainer:
            link = manifest.get("link", {})
            yield Parent(run, path, trainer, link, starts.get(link.get("start"), {}))
