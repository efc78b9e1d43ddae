"""utils/rundir/room.py: a warning at the start if the disk is too small."""

import os
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest

from utils.rundir import room
from utils.rundir.room import warn_of_room

Usage = namedtuple("Usage", "free")
pytestmark = pytest.mark.usefixtures("first_start_in_a_new_folder")


def warnings(run_bytes, writes=True):
    notes = []
    warn_of_room(run_bytes, SimpleNamespace(path=Path("run"), note=notes.append, writes=writes))
    return notes


@pytest.mark.parametrize("free_gb, writes, is_warned", [(10, True, False), (1.2, True, True), (1.2, False, False)])
def test_a_small_disk_gives_a_warning_on_the_rank_that_writes(monkeypatch, free_gb, writes, is_warned):
    monkeypatch.setattr(room.shutil, "disk_usage", lambda path: Usage(1e9 * free_gb))
    found = [note.partition(": ")[2].partition(": ")[2] for note in warnings(int(1.3e9), writes)]
    assert found == ["run has room for 1.2 GB, but its checkpoints and RUN/model may take 1.3 GB: use a smaller --keep,"
                     " or --run-dir on another disk"] * is_warned


def test_existing_checkpoints_count_as_room(monkeypatch):
    (Path("run") / "checkpoints" / "step-1-g1").mkdir(parents=True)
    os.truncate(os.open(Path("run/checkpoints/step-1-g1/state.pt"), os.O_CREAT | os.O_WRONLY), int(2e8))
    monkeypatch.setattr(room.shutil, "disk_usage", lambda path: Usage(1.2e9))
    assert warnings(int(1.3e9)) == []
