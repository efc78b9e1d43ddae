"""Checkpoints that cannot lie.

Any moment of a save may be the last, any call may fail, the disk may be full, any bit may flip. The
points are swept by tests/faults/sweep_saves.py; `make test` tries one in SAMPLE, `make faults` all of them.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.faults.sweep_saves import (
    can_trace,
    flip,
    flips,
    leftovers,
    save,
    say_nothing,
    step_in,
    step_in_model,
    unsynced,
    valid,
)
from utils.errors import Exit, UserError
from utils.rundir.checkpoint_folder import CheckpointFolder, find_damage
from utils.rundir.lock import RunLock
from utils.rundir.run import Run

ROOT = Path(__file__).parent.parent.parent
FILES = ("model.safetensors", "state.pt", "samples.safetensors", "trainer.json", "MANIFEST.json")
NAMES = [f"step-{step:010d}-g1" for step in (3, 2, 1)]  # the newest first
SAMPLE = 11  # of the points of the sweep, `make test` tries every so-many-th
FLOATS = 2**20 // 2 // 4  # in half a MiB: a checkpoint of this many floats is 1 MiB, half of it beside the weights


# --- any call may be the last, or fail


@pytest.fixture(scope="module")
def swept():
    """What the sweep of every so-many-th point comes to; swept once."""
    problem, kept = can_trace(), {}

    def sweep(every):
        if problem:
            pytest.skip(problem)
        if every not in kept:
            done = subprocess.run([sys.executable, "-m", "tests.faults.sweep_saves", "--json", f"--every={every}"],
                                  cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            kept[every] = json.loads(done.stdout)
        return kept[every]
    return sweep


@pytest.mark.long
@pytest.mark.parametrize("every", [SAMPLE, pytest.param(1, marks=pytest.mark.slow)])
def test_a_kill_at_any_call_leaves_the_old_checkpoint_or_the_new_one(swept, every):
    rows = [row for row in swept(every)["rows"] if row["fault"] == "SIGKILL"]
    assert [problem for row in rows for problem in row["bad"]] == []
    assert sum(row["points"] for row in rows) >= sum(row["calls"] for row in rows) // every > 20


@pytest.mark.parametrize("every", [SAMPLE, pytest.param(1, marks=pytest.mark.slow)])
def test_an_error_of_any_call_is_74_or_nothing_and_the_next_save_is_whole(swept, every):
    rows = [row for row in swept(every)["rows"] if row["fault"] != "SIGKILL"]
    assert [problem for row in rows for problem in row["bad"]] == []
    assert sum(row["points"] for row in rows) >= sum(row["calls"] for row in rows) // every > 20


def test_nothing_gets_its_final_name_before_what_it_stands_for_is_on_disk(swept):
    assert swept(SAMPLE)["unsynced"] == []


def test_the_order_of_syncs_is_looked_at():
    lines = ['1 openat(AT_FDCWD, "/r/checkpoints/.tmp-a/f", O_WRONLY|O_CREAT) = 3',
             '1 write(3</r/checkpoints/.tmp-a/f>, ""..., 9) = 9',
             '1 fsync(3</r/checkpoints/.tmp-a/f>) = 0', '1 fsync(3</r/checkpoints/.tmp-a>) = 0',
             '1 rename("/r/checkpoints/.tmp-a", "/r/checkpoints/step-4") = 0', '1 fsync(3</r/checkpoints>) = 0',
             '1 rename("/r/checkpoints/step-1", "/r/checkpoints/.tmp-removed-step-1") = 0']
    assert unsynced(lines) == []
    assert [bool(unsynced([line for line in lines if line is not without])) for without in lines] == [
        False, False, True, True, False, True, False]


# --- a disk that is full, or read-only


@contextmanager
def mounted(folder, options):
    """A file system of its own in `folder`."""
    folder.mkdir()
    if os.geteuid() or shutil.which("mount") is None:
        pytest.skip("only root can mount a file system")
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount a file system: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.fixture
def small_disk(run_dir):
    """A run directory on a disk of 2 MiB."""
    with mounted(run_dir, "size=2m") as folder:
        yield folder


@pytest.mark.parametrize("is_best", [False, True])  # where RUN/model is written first, it is what does not fit
def test_a_full_disk_is_74_and_the_earlier_checkpoint_stays(small_disk, is_best):
    save(small_disk, 1, size=FLOATS, is_best=False)
    with pytest.raises(UserError, match=re.escape(str(small_disk))) as refused:
        save(small_disk, 2, size=2 * FLOATS, is_best=is_best)
    assert (refused.value.code, valid(small_disk), leftovers(small_disk)) == (Exit.IO, [NAMES[2]], [])
    save(small_disk, 2, start=2, size=FLOATS // 2, is_best=False)  # what fits
    assert valid(small_disk) == ["step-0000000002-g2", NAMES[2]]


def test_the_message_of_a_full_disk_says_how_much_is_free(small_disk):
    save(small_disk, 1, size=FLOATS, is_best=False)
    with pytest.raises(UserError, match=r"cannot save .*step-0000000002-g1: .*\(\d+ MiB free\)"):
        save(small_disk, 2, size=2 * FLOATS, is_best=False)


def test_where_the_status_cannot_be_written_either_the_first_error_is_told(small_disk):
    lock = RunLock()
    lock.acquire(small_disk)
    run = Run(small_disk, {}, {"start": 1, "cores_per_process": 1}, say_nothing, lock)
    with pytest.raises(UserError, match="cannot save"), run:
        with (small_disk / "filler").open("wb", buffering=0) as file, pytest.raises(OSError):
            while True:
                file.write(bytes(4096))
        raise UserError("cannot save", Exit.IO)


@pytest.fixture
def read_only(run_dir):
    """Checkpoints of steps 1, 2 and 3 on a disk that becomes read-only when called."""
    with mounted(run_dir, "size=2m") as folder:
        for step in (1, 2, 3):
            save(folder, step, keep=3)
        yield lambda: subprocess.run(["mount", "-o", "remount,ro", folder], check=True) and folder


@pytest.mark.parametrize("is_best", [False, True])
def test_a_read_only_disk_is_74_and_all_checkpoints_stay(read_only, is_best):
    run = read_only()
    with pytest.raises(UserError, match=re.escape(str(run))) as refused:
        save(run, 4, is_best=is_best)
    assert (refused.value.code, valid(run)) == (Exit.IO, NAMES)


def test_a_damaged_checkpoint_that_cannot_be_set_aside_is_74(read_only, run_dir):
    flip(run_dir / "checkpoints" / NAMES[0] / "state.pt", 99, 0)
    folder = CheckpointFolder(read_only() / "checkpoints", 1, say_nothing)
    with pytest.raises(UserError, match=NAMES[0]) as refused:
        folder.newest_valid()
    assert refused.value.code == Exit.IO


# --- damage


@pytest.fixture(scope="module")
def saved_once(session_dir):
    run = session_dir / "saved-once"
    run.mkdir()
    for step in (1, 2, 3):
        save(run, step, keep=3)
    return run


@pytest.fixture
def saved(saved_once, run_dir):
    """A run with checkpoints of steps 1, 2 and 3, to spoil."""
    return Path(shutil.copytree(saved_once, run_dir))


@pytest.fixture
def newest(saved):
    return saved / "checkpoints" / NAMES[0]


@pytest.mark.rows(2)
@pytest.mark.parametrize("file", FILES)
def test_a_flipped_bit_is_found(newest, file, record_property):
    tried, missed = flips(newest, file, every=1, bits=8) if file.endswith(".json") else flips(newest, file)
    record_property("flips", tried)
    assert (missed, tried >= newest.joinpath(file).stat().st_size // 997, find_damage(newest)) == ([], True, None)


def rewritten(change):
    """Damage that makes other bytes of a file's bytes."""
    def damage(path):
        path.write_bytes(change(path.read_bytes()))
    return damage


def make_hole(path):
    """A page of a file lost, or what it has of one."""
    size = path.stat().st_size
    data, start = path.read_bytes(), max(0, size // 2 - 2048)
    path.write_bytes(data[:start] + bytes(len(data[start:start + 4096])) + data[start + 4096:])
    assert path.stat().st_size == size and path.read_bytes() != data


def lose_tail(path):
    """The second half was never written, as after a power failure."""
    size = path.stat().st_size
    os.truncate(path, size // 2)
    os.truncate(path, size)


DAMAGE = {
    "empty": rewritten(lambda data: b""), "half": rewritten(lambda data: data[:len(data) // 2]),
    "one byte less": rewritten(lambda data: data[:-1]), "one byte more": rewritten(lambda data: data + b"\n"),
    "a hole": make_hole, "a tail of zeros": lose_tail, "missing": Path.unlink,
    "another checkpoint's": lambda path: shutil.copy(path.parent.parent / NAMES[1] / path.name, path),
    "a folder": lambda path: (path.unlink(), path.mkdir())}


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_checkpoint_with_a_damaged_file_is_set_aside_and_an_older_used(saved, newest, file, damage):
    DAMAGE[damage](newest / file)
    notes = []
    folder = CheckpointFolder(saved / "checkpoints", 1, notes.append)
    name = folder.newest_valid()
    assert (name, step_in(folder.path / name)) == (NAMES[1], 2)
    assert sorted(os.listdir(folder.path)) == sorted([f"damaged-{NAMES[0]}", *NAMES[1:]])
    [note] = notes
    assert NAMES[0] in note and f"using {NAMES[1]}, to repeat 1 step" in note


def test_an_empty_folder_is_damaged(saved, newest):
    shutil.rmtree(newest)
    newest.mkdir()
    assert CheckpointFolder(saved / "checkpoints", 1, say_nothing).newest_valid() == NAMES[1]


def test_all_damaged_is_82_again_and_again_and_nothing_is_deleted(saved):
    for name, file in zip(NAMES, FILES, strict=False):
        flip(saved / "checkpoints" / name / file, 5, 0)
    before = {path.relative_to(saved / "checkpoints"): path.read_bytes() for path in saved.glob("checkpoints/*/*")}
    for _ in range(2):
        with pytest.raises(UserError, match="none is valid") as refused:
            CheckpointFolder(saved / "checkpoints", 1, say_nothing).newest_valid()
        assert refused.value.code == Exit.NO_CHECKPOINT
    after = {path.relative_to(saved / "checkpoints"): path.read_bytes() for path in saved.glob("checkpoints/*/*")}
    assert after == {Path(f"damaged-{path}"): data for path, data in before.items()}


def test_a_damaged_checkpoint_does_not_count_as_one_that_is_kept(saved, newest):
    flip(newest / "state.pt", 99, 0)
    save(saved, 4, keep=1)
    assert (valid(saved), step_in_model(saved / "model")) == (["step-0000000004-g1", NAMES[1]], 4)
