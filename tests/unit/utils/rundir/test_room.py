"""utils/rundir/room.py: a warning at the start if the disk or the shared memory is too small."""

import os
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest

from utils.rundir import room
from utils.rundir.room import warn_of_room

Usage = namedtuple("Usage", "free")
pytestmark = pytest.mark.usefixtures("first_start_in_a_new_folder")


def warnings(world, *needed):
    notes = []
    warn_of_room(*needed, SimpleNamespace(path=Path("run"), note=notes.append), world)
    return notes


@pytest.mark.parametrize("free_gb, shared_gb, workers, parts", [
    (10, 1, 2, []),
    (1.2, 1, 2, ["warning: ", "run has room for 1.2 GB, but its checkpoints and RUN/model may take 1.3 GB: use a"
                 " smaller --keep"]),
    (10, 0.05, 2, ["/dev/shm has 0.05 GB free, and 1 x 2 data loading processes may take 0.06 GB:"
                   " use docker run --ipc=host", "fewer --workers"]),
    (10, 0.05, 0, [])])
def test_a_small_disk_or_shared_memory_gives_a_warning(world, monkeypatch, free_gb, shared_gb, workers, parts):
    def usage(path):
        return Usage(1e9 * (shared_gb if str(path) == "/dev/shm" else free_gb))

    monkeypatch.setattr(room.shutil, "disk_usage", usage)
    notes = warnings(world, int(1.3e9), int(1e7), workers)
    assert len(notes) == bool(parts)
    assert [part for part in parts if part not in notes[0]] == []


def test_existing_checkpoints_count_as_room(world, monkeypatch):
    (Path("run") / "checkpoints" / "step-1-g1").mkdir(parents=True)
    os.truncate(os.open(Path("run/checkpoints/step-1-g1/state.pt"), os.O_CREAT | os.O_WRONLY), int(2e8))
    monkeypatch.setattr(room.shutil, "disk_usage", lambda path: Usage(1.2e9))
    assert warnings(world, int(1.3e9), 0, 0) == []
