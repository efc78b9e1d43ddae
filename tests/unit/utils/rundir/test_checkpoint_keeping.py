"""utils/rundir/checkpoint_folder.py: which checkpoints are kept, and when; a full disk."""

import os
import resource
from contextlib import contextmanager
from dataclasses import replace

import pytest

from tests.unit.utils.rundir.conftest import beside, build_state, contents, flip, names_in, save, train_step
from utils.errors import Exit, UserError
from utils.rundir import checkpoint_folder
from utils.rundir.checkpoint_folder import CheckpointFolder, find_damage
from utils.settings.option import Interval

# --- which are kept


@pytest.mark.parametrize("keep, best, expected", [
    (2, 1, [1, 4, 5]), (2, 4, [4, 5]), (1, 3, [3, 5]), (3, None, [3, 4, 5]), (9, 1, [1, 2, 3, 4, 5])])
def test_the_newest_are_kept_and_the_best_besides(world, checkpoints_of, folder, keep, best, expected):
    state, (checkpoints, _) = build_state(world), checkpoints_of(keep=keep)
    for step in range(1, 6):
        train_step(state)
        state.best = {"step": best, "metric": "top1", "value": 1.0} if best and step >= best else {}
        save(checkpoints, state)
    assert names_in(folder) == [f"step-{step:010d}-g1" for step in expected]


def test_the_save_after_an_evaluation_replaces_the_one_before_it(world, checkpoints_of, folder):
    state, (checkpoints, _) = build_state(world), checkpoints_of(keep=2)
    found = []
    for _ in range(3):
        train_step(state)
        checkpoints.save(state, beside(), awaits_evaluation=True)
        checkpoints.flush()
        found.append([name.removeprefix("step-000000000") for name in names_in(folder)])
        state.progress = replace(state.progress, evaluated_step=state.progress.step)
        save(checkpoints, state)
    # The first stays until there are two others: there are always two valid ones.
    assert found == [["1-g1-unevaluated"], ["1-g1", "2-g1-unevaluated"], ["2-g1", "3-g1-unevaluated"]]
    assert [name.removeprefix("step-000000000") for name in names_in(folder)] == ["2-g1", "3-g1"]
    restored = build_state(world)
    checkpoints_of(start=2)[0].restore(restored)
    assert restored.progress == state.progress


def test_of_one_step_the_evaluated_checkpoint_is_the_newest(world, checkpoints_of, folder):
    state, (checkpoints, _) = build_state(world), checkpoints_of()
    train_step(state)
    checkpoints.save(state, beside(), awaits_evaluation=True)
    checkpoints.flush()
    state.progress = replace(state.progress, evaluated_step=1)
    save(checkpoints, state)
    assert CheckpointFolder(folder, 3, print).names() == ["step-0000000001-g1", "step-0000000001-g1-unevaluated"]
    flip(folder / "step-0000000001-g1" / "state.pt", 100)
    restored = build_state(world)
    checkpoints_of(start=2)[0].restore(restored)
    assert restored.progress.evaluated_step == 0


def test_of_keep_1_two_valid_ones_remain(world, checkpoints_of, folder):
    state, (checkpoints, _) = build_state(world), checkpoints_of(keep=1)
    for _ in range(4):
        train_step(state)
        save(checkpoints, state)
    assert names_in(folder) == ["step-0000000003-g1", "step-0000000004-g1"]


def test_a_newest_one_that_the_disk_damaged_does_not_count(world, checkpoints_of, folder, monkeypatch):
    """No valid one is removed because of it."""
    def spoil(path):
        if path == folder and names_in(folder)[-1] == "step-0000000004-g1":  # the last sync of a save, after its rename
            flip(folder / "step-0000000004-g1" / "state.pt", 100)

    state, (checkpoints, _) = build_state(world), checkpoints_of(keep=2)
    monkeypatch.setattr(checkpoint_folder, "sync", spoil)
    kept = []
    for _ in range(6):
        train_step(state)
        save(checkpoints, state)
        kept.append([int(name[5:15]) for name in names_in(folder)])
    assert kept == [[1], [1, 2], [2, 3], [2, 3, 4], [3, 4, 5], [5, 6]]


def test_one_damaged_after_it_was_written_does_not_count_at_the_next_start(world, checkpoints_of, saved, folder):
    flip(saved[1] / "state.pt", 100)
    state, (checkpoints, _) = build_state(world), checkpoints_of(start=2, keep=1)
    checkpoints.restore(state)
    train_step(state)
    flip(saved[2] / "state.pt", 100)  # this start has checked it already; the next start checks again
    save(checkpoints, state)
    again = checkpoints_of(start=3, keep=1)[0]
    again.restore(state)
    train_step(state)
    save(again, state)
    valid = [name for name in names_in(folder) if find_damage(folder / name) is None]
    assert valid == ["step-0000000004-g2", "step-0000000005-g3"]


def test_an_older_one_is_removed_after_the_newer_ones_were_read_back(world, checkpoints_of, saved, folder, monkeypatch):
    events, rename, find = [], os.rename, checkpoint_folder.find_damage
    state, (checkpoints, _) = build_state(world), checkpoints_of(start=2, keep=2)
    checkpoints.restore(state)
    train_step(state)
    monkeypatch.setattr(
        checkpoint_folder, "find_damage", lambda path: (events.append(("reads", path.name)), find(path))[1])
    monkeypatch.setattr(os, "rename", lambda old, new: (events.append(("renames", old.name)), rename(old, new))[1])
    save(checkpoints, state)
    removals = [events.index(("renames", path.name)) for path in saved[:2]]
    assert events.index(("reads", "step-0000000004-g2")) < min(removals)


def test_steps_between_checkpoints_are_counted_from_the_runs_beginning(checkpoints_of):
    checkpoints, _ = checkpoints_of(save_every=Interval("5"))
    due = [step for step in range(1, 16) if checkpoints.is_due(step)]
    assert (due, checkpoints.is_due_by_clock()) == ([5, 10, 15], False)


def test_a_duration_between_checkpoints_is_measured_by_the_clock(world, checkpoints_of):
    soon, late = (checkpoints_of(save_every=Interval(text))[0] for text in ("0.000001s", "1h"))
    assert (soon.is_due_by_clock(), late.is_due_by_clock()) == (True, False)
    assert not any(soon.is_due(step) for step in range(1, 9))


# --- --keep-every


def kept_after(world, checkpoints_of, folder, total, **options):
    """Steps of the checkpoints that a run of so many steps leaves, each of which it saves; its checkpoints."""
    state, (checkpoints, _) = build_state(world), checkpoints_of(**options)
    folder.parent.mkdir(exist_ok=True)
    checkpoints.follow(state, total)
    for _ in range(total):
        train_step(state)
        save(checkpoints, state)
    return [int(name[5:15]) for name in names_in(folder)], checkpoints


@pytest.mark.rows(1)
@pytest.mark.parametrize("every, expected", [(0, [8, 9]), (3, [3, 6, 8, 9]), (4, [4, 8, 9]), ("auto", [8, 9])])
def test_besides_the_newest_those_of_every_nth_step_are_kept(world, checkpoints_of, folder, every, expected):
    assert kept_after(world, checkpoints_of, folder, 9, keep=2, keep_every=every)[0] == expected


@pytest.mark.parametrize("every, total, due, count", [
    ("auto", 900, [], 0), ("auto", 2500, [1000, 2000], 2), ("auto", 20_000, [*range(1000, 20_001, 1000)], 20),
    ("auto", 20_001, [*range(1001, 20_001, 1001)], 19), ("auto", 100_000, [*range(5000, 100_001, 5000)], 20),
    (0, 5000, [], 0), (2000, 5000, [2000, 4000], 2)])
def test_auto_is_a_twentieth_of_the_run_but_at_least_1000_steps(
        world, checkpoints_of, folder, every, total, due, count):
    checkpoints, _ = checkpoints_of(keep_every=every, save_every=Interval("1h"))
    folder.parent.mkdir(exist_ok=True)
    checkpoints.follow(build_state(world), total)
    assert [step for step in range(1, total + 1) if checkpoints.is_due(step)] == due
    checkpoints._num_bytes = 1
    assert checkpoints.most_bytes == 3 + 2 + count


def test_an_abandoned_and_a_repeated_checkpoint_of_a_step_are_kept_once(world, checkpoints_of, folder):
    kept_after(world, checkpoints_of, folder, 4, keep=2, keep_every=2)
    flip(folder / "step-0000000004-g1" / "state.pt", 100)
    flip(folder / "step-0000000003-g1" / "state.pt", 100)
    state, (checkpoints, _) = build_state(world), checkpoints_of(start=2, keep=1, keep_every=2)
    checkpoints.restore(state)
    checkpoints.follow(state, 6)
    while state.progress.step < 6:
        train_step(state)
        save(checkpoints, state)
    assert [name for name in names_in(folder) if name.startswith("step-")] == [
        "step-0000000002-g1", "step-0000000004-g2", "step-0000000005-g2", "step-0000000006-g2"]


def test_checkpoints_to_repeat_from_are_not_read_back_at_each_start(world, checkpoints_of, folder, monkeypatch):
    """A long run has twenty: reading them takes longer than a save."""
    kept_after(world, checkpoints_of, folder, 8, keep=2, keep_every=2)
    state, (checkpoints, _) = build_state(world), checkpoints_of(start=2, keep=2, keep_every=2)
    checkpoints.restore(state)
    checkpoints.follow(state, 10)
    read, find = [], checkpoint_folder.find_damage
    monkeypatch.setattr(checkpoint_folder, "find_damage", lambda path: (read.append(path.name), find(path))[1])
    for _ in range(2):
        train_step(state)
        save(checkpoints, state)
    assert read == ["step-0000000009-g2"]
    assert [int(name[5:15]) for name in names_in(folder)] == [2, 4, 6, 8, 9, 10]


# --- a full disk


@contextmanager
def files_of_at_most(size):
    """Writing more fails as on a full disk (EFBIG instead of ENOSPC), in every thread."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("file, share", [("model.safetensors", 0.5), ("state.pt", 0.9)])
def test_a_full_disk_is_74_and_earlier_checkpoints_are_unchanged(world, checkpoints_of, saved, folder, file, share):
    before, limit = contents(folder), int(share * (saved[0] / file).stat().st_size)
    if file != "model.safetensors":
        assert limit > (saved[0] / "model.safetensors").stat().st_size  # so that `file` is the one that fails
    state, (checkpoints, _) = build_state(world), checkpoints_of(start=2)
    checkpoints.restore(state)
    train_step(state)
    with files_of_at_most(limit), pytest.raises(UserError, match="earlier checkpoints are unchanged") as refused:
        save(checkpoints, state)
    assert (refused.value.code, contents(folder), names_in(folder)) == (Exit.IO, before, [path.name for path in saved])


def test_when_there_is_room_again_the_next_start_saves_the_same_state(world, checkpoints_of, saved, folder):
    state, (checkpoints, _) = build_state(world), checkpoints_of(start=2)
    checkpoints.restore(state)
    train_step(state)
    with files_of_at_most(100), pytest.raises(UserError):
        save(checkpoints, state)
    save(checkpoints_of(start=3)[0], state)
    assert find_damage(folder / "step-0000000004-g3") is None
