"""What the tests of run directories share: starts of a run in a new folder, and what they left."""

import json
from pathlib import Path

import pytest

from utils.errors import UserError
from utils.rundir import lock
from utils.rundir.run import open_run
from utils.settings.command_line import parse_command_line


@pytest.fixture
def first_start_in_a_new_folder(tmp_path, monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT",
                 "LOCKSTEP_LAUNCH_ID", "SLURM_JOB_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(lock, "LOCK_WAIT_S", 0.2)


def config_of(*words):
    return parse_command_line(words, {})


def start(world, *words):
    """One start of a run, opened and left; returns what the user was told."""
    notes = []
    with open_run(config_of(*words), world, notes.append) as run:
        run.keep_resolved()
    return notes


def refusal(world, *words):
    with pytest.raises(UserError) as refused:
        start(world, *words)
    return refused.value


def status():
    return json.loads(Path("run/status.json").read_text())
