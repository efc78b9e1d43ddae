"""utils/rundir/checkpoint.py, utils/rundir/checkpoint_folder.py: what was saved comes back bit for bit, or is not taken; saving waits for nothing."""

import hashlib
import json
import os
import resource
import shutil
import struct
import time
from contextlib import contextmanager
from dataclasses import replace
from threading import Event, Thread
from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError
from torch import nn

from utils.errors import Exit, UserError, explain
from utils.numerics.optimizers import build_optimizer
from utils.rundir import checkpoint_folder
from utils.rundir.checkpoint import Checkpoints, Progress, TrainState
from utils.rundir.checkpoint_folder import CHUNK, CheckpointFolder, find_damage
from utils.settings.config import OptimOptions, RecordOptions
from utils.settings.option import Interval
from utils.strategies.ddp import DDP

LIMIT_S = 60  # of whatever another thread does
FILES = ("model.safetensors", "state.pt", "trainer.json", "MANIFEST.json")


def build_net(channels=4):
    return nn.Sequential(nn.Conv2d(3, channels, 3), nn.BatchNorm2d(channels), nn.Flatten(), nn.Linear(channels * 4, 5))


def build_state(world, optimizer="sgd", model=None):
    """A state that has never trained."""
    model = model or build_net().to(memory_format=torch.channels_last)
    return TrainState(DDP(model, world, 1), build_optimizer(model, OptimOptions(optimizer=optimizer)), torch.amp.GradScaler("cpu"))


def train_step(state):
    state.strategy.module(torch.randn(8, 3, 4, 4)).square().sum().backward()
    state.optimizer.step()
    state.optimizer.zero_grad()
    state.progress = state.progress.after(8 * (state.progress.step + 1), 800)


def save(checkpoints, state, beside=lambda weights: None):
    """Save, and wait until it is on disk."""
    checkpoints.save(state, beside)
    checkpoints.flush()


@pytest.fixture
def folder(run_dir):
    return run_dir / "checkpoints"


@pytest.fixture
def checkpoints_of(world, folder):
    """Checkpoints of a start of one run, and what the user was told of them."""
    def build(start=1, **options):
        notes = []
        return Checkpoints(folder, world, RecordOptions(**options), start, notes.append), notes
    return build


@pytest.fixture
def saved(world, checkpoints_of, folder):
    """Three checkpoints, of steps 1, 2 and 3."""
    torch.manual_seed(0)
    state, (checkpoints, _) = build_state(world), checkpoints_of()
    for _ in range(3):
        train_step(state)
        save(checkpoints, state)
    return [folder / f"step-{step:010d}-g1" for step in (1, 2, 3)]


def everything(state):
    """All that a state is, comparable bit for bit."""
    def plain(value):
        return (value.dtype, value.tolist()) if isinstance(value, torch.Tensor) else value

    optimizer = {name: {key: plain(value) for key, value in values.items()} for name, values in state.state_dict()["optimizer"].items()}
    weights = {name: plain(tensor) for name, tensor in state.strategy.model_state().items()}
    return weights, optimizer, state.scaler.state_dict(), state.progress, state.best


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def names_of(folder):
    """Of its checkpoints, where there may be none yet."""
    return sorted(path.name for path in folder.glob("step-*"))


def contents(folder):
    return {path.relative_to(folder): hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()}


def flip(file, place, mask=1):
    data = bytearray(file.read_bytes())
    data[place] ^= mask
    file.write_bytes(data)


# --- round trip


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_state_comes_back_bit_for_bit(world, checkpoints_of, optimizer):
    state, (checkpoints, _) = build_state(world, optimizer), checkpoints_of()
    for _ in range(3):
        train_step(state)
    state.scaler.scale(torch.ones(()))  # so that it has a scale to keep
    state.scaler.update(128.0)
    state.best = {"step": 2, "metric": "top1", "value": 0.1 + 0.2}
    save(checkpoints, state)
    other = build_state(world, optimizer)
    assert (checkpoints_of()[0].restore(other), everything(other)) == (True, everything(state))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_state_that_came_back_goes_on_as_one_that_never_left(world, checkpoints_of, optimizer):
    state = build_state(world, optimizer)
    train_step(state)
    save(checkpoints_of()[0], state)
    other = build_state(world, optimizer)
    checkpoints_of()[0].restore(other)
    for each in (state, other):
        torch.manual_seed(1)
        train_step(each)
    assert everything(other) == everything(state)


def test_optimizer_state_is_kept_by_the_weights_names(world, checkpoints_of, folder):
    state = build_state(world)
    train_step(state)
    save(checkpoints_of()[0], state)
    values = torch.load(folder / "step-0000000001-g1" / "state.pt", weights_only=True)
    assert set(values["optimizer"]) == {name for name, _ in state.strategy.module.named_parameters()}


def test_optimizer_state_finds_its_weight_in_an_optimizer_of_another_order(world, checkpoints_of):
    state = build_state(world, "adamw")
    train_step(state)
    save(checkpoints_of()[0], state)
    other = build_state(world, "adamw")
    other.optimizer = torch.optim.AdamW(reversed(list(other.strategy.module.named_parameters())))
    checkpoints_of()[0].restore(other)
    assert everything(other)[1] == everything(state)[1]


def test_the_restored_state_keeps_this_starts_group_settings(world, checkpoints_of):
    state = build_state(world)
    train_step(state)
    state.optimizer.param_groups[0]["lr"] = 123.0  # a function of config and step: not state
    save(checkpoints_of()[0], state)
    other = build_state(world)
    checkpoints_of()[0].restore(other)
    assert [group["lr"] for group in other.optimizer.param_groups] == [OptimOptions().lr] * 2


def test_without_a_checkpoint_nothing_is_restored(world, checkpoints_of):
    state = build_state(world)
    before = everything(state)
    assert (checkpoints_of()[0].restore(state), everything(state)) == (False, before)


def test_nothing_is_saved_before_the_first_step(world, checkpoints_of, folder):
    save(checkpoints_of()[0], build_state(world))
    assert not folder.exists()


def test_nothing_is_saved_twice(world, checkpoints_of, folder):
    state, (checkpoints, _) = build_state(world), checkpoints_of()
    train_step(state)
    save(checkpoints, state)
    before = contents(folder)
    save(checkpoints, state)
    again = checkpoints_of(start=2)[0]
    again.restore(state)
    save(again, state)  # nothing happened since it was loaded
    assert contents(folder) == before


# --- format


def test_the_bytes_of_the_weights_are_a_pure_function_of_the_weights(world, checkpoints_of, folder):
    state, (checkpoints, _) = build_state(world), checkpoints_of()
    train_step(state)
    save(checkpoints, state)
    model = build_net()
    model.load_state_dict(state.strategy.module.state_dict())
    other = build_state(world, "adamw", model)  # contiguous weights, another optimizer, another step
    other.progress = Progress(step=2)
    save(checkpoints_of(start=2)[0], other)
    files = [(folder / name / "model.safetensors").read_bytes() for name in names_in(folder)]
    assert len(files) == 2 and files[0] == files[1]


def test_the_header_of_the_weights_holds_no_more_than_their_format(saved):
    data = (saved[0] / "model.safetensors").read_bytes()
    [length] = struct.unpack("<Q", data[:8])
    assert json.loads(data[8:8 + length])["__metadata__"] == {"format": "pt"}


def test_a_checkpoint_holds_its_four_files_and_nothing_else(saved):
    assert {name: names_in(saved[0].parent / name) for name in names_in(saved[0].parent)} == {path.name: sorted(FILES) for path in saved}


# --- beside the training


@pytest.fixture
def writer():
    """beside(weights) of a save: says `came` and waits until it `may_go` on. Whatever a test does, no writer waits in the end."""
    class Writer:
        def __init__(self):
            self.came, self.may_go, self.weights = Event(), Event(), None

        def __call__(self, weights):
            self.weights = weights
            self.came.set()
            assert self.may_go.wait(LIMIT_S)

    writer = Writer()
    yield writer
    writer.may_go.set()


@pytest.mark.parametrize("wait", [Checkpoints.flush, Checkpoints.close])
def test_the_training_does_not_wait_for_a_save_and_flush_and_close_do(world, checkpoints_of, folder, writer, wait):
    state, (checkpoints, _) = build_state(world), checkpoints_of()
    train_step(state)
    checkpoints.save(state, writer)
    is_under_way = writer.came.wait(LIMIT_S)
    seen = names_of(folder)
    waiting = Thread(target=lambda: (wait(checkpoints), seen.append("waited")))
    waiting.start()
    waiting.join(0.1)  # if it did not wait, it would have its moment
    seen.append("held")
    writer.may_go.set()
    waiting.join(LIMIT_S)
    assert (is_under_way, seen, names_in(folder)) == (True, ["held", "waited"], ["step-0000000001-g1"])


def test_close_does_not_wait_for_ever(world, checkpoints_of, folder, writer, monkeypatch):
    monkeypatch.setattr("utils.rundir.checkpoint.LAST_SAVE_S", 0.01)
    state, (checkpoints, _) = build_state(world), checkpoints_of()
    train_step(state)
    checkpoints.save(state, writer)
    checkpoints.close()
    writer.may_go.set()
    checkpoints.flush()  # had it waited for the writer, that would have given up
    assert names_in(folder) == ["step-0000000001-g1"]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_what_is_saved_is_the_state_at_that_moment_whatever_the_training_does_meanwhile(world, checkpoints_of, writer, optimizer):
    state, (checkpoints, _) = build_state(world, optimizer), checkpoints_of()
    state.scaler.scale(torch.ones(()))  # so that it has a scale to keep
    train_step(state)
    state.best = {"step": 1, "metric": "top1", "value": 0.5}
    at_that_moment = everything(state)
    checkpoints.save(state, writer)
    assert writer.came.wait(LIMIT_S)
    train_step(state)
    state.scaler.update(128.0)
    state.best = {"step": 2, "metric": "top1", "value": 0.6}
    writer.may_go.set()
    checkpoints.flush()
    other = build_state(world, optimizer)
    checkpoints_of(start=2)[0].restore(other)
    assert everything(other) == at_that_moment != everything(state)


def test_what_is_written_beside_gets_the_weights_of_that_moment_and_comes_before_the_checkpoint(world, checkpoints_of, folder, writer):
    state, (checkpoints, _) = build_state(world), checkpoints_of()
    train_step(state)
    expected = {name: weight.tolist() for name, weight in state.strategy.model_state().items()}
    checkpoints.save(state, writer)
    assert writer.came.wait(LIMIT_S)
    train_step(state)
    before = names_of(folder)
    writer.may_go.set()
    checkpoints.flush()
    assert (before, {name: weight.tolist() for name, weight in writer.weights.items()}) == ([], expected)


def test_one_save_is_under_way_at_a_time(world, checkpoints_of, folder, writer):
    state, (checkpoints, _) = build_state(world), checkpoints_of()
    train_step(state)
    checkpoints.save(state, writer)
    assert writer.came.wait(LIMIT_S)
    train_step(state)
    found = []
    second = Thread(target=lambda: (checkpoints.save(state, lambda weights: found.extend(names_of(folder))), found.append("returned")))
    second.start()
    second.join(0.1)  # if it did not wait, it would have its moment
    found.append("the first is held")
    writer.may_go.set()
    second.join(LIMIT_S)
    checkpoints.flush()
    assert (sorted(found[1:]), found[0]) == (["returned", "step-0000000001-g1"], "the first is held")


@pytest.mark.parametrize("error, code", [
    (UserError("the disk is full", Exit.IO), Exit.IO), (OSError(28, "No space left on device"), Exit.IO),
    (SafetensorError("I/O error: No space left on device"), Exit.IO), (KeyError("a bug"), Exit.INTERNAL)])
def test_an_error_of_what_is_written_beside_has_its_code_and_no_checkpoint_tells_of_it(world, checkpoints_of, saved, folder, error, code):
    def fail(weights):
        raise error

    before = contents(folder)
    state, (checkpoints, _) = build_state(world), checkpoints_of(start=2)
    checkpoints.restore(state)
    train_step(state)
    with pytest.raises(Exception) as refused:
        save(checkpoints, state, fail)
    assert (explain(refused.value)[1], contents(folder)) == (code, before)


def test_an_error_of_the_writer_is_known_before_anybody_waits_for_it_and_ends_the_saving(world, checkpoints_of, saved, folder, writer):
    def fail(weights):
        writer(weights)
        raise UserError("the disk is full", Exit.IO)

    before = contents(folder)
    state, (checkpoints, _) = build_state(world), checkpoints_of(start=2)
    checkpoints.restore(state)
    train_step(state)
    checkpoints.save(state, fail)
    known = [checkpoints.has_failed()]
    writer.may_go.set()
    deadline = time.monotonic() + LIMIT_S
    while not checkpoints.has_failed() and time.monotonic() < deadline:
        time.sleep(0.001)
    known.append(checkpoints.has_failed())
    train_step(state)
    codes, written = [], []
    for wait in (lambda: checkpoints.save(state, written.append), checkpoints.flush, checkpoints.flush):
        with pytest.raises(UserError, match="the disk is full") as refused:
            wait()
        codes.append(refused.value.code)
    checkpoints.close()  # raises nothing
    assert (known, codes, written, contents(folder)) == ([False, True], [Exit.IO] * 3, [], before)


def test_a_save_that_came_through_is_no_error(world, checkpoints_of):
    state, (checkpoints, _) = build_state(world), checkpoints_of()
    train_step(state)
    save(checkpoints, state)
    assert (checkpoints.flush(), checkpoints.has_failed()) == (None, False)


def test_where_nothing_was_saved_there_is_nothing_to_wait_for(checkpoints_of):
    checkpoints, _ = checkpoints_of()
    assert (checkpoints.flush(), checkpoints.close(), checkpoints.has_failed()) == (None, None, False)


def test_the_seconds_that_the_training_waited_are_counted(world, checkpoints_of, writer, monkeypatch):
    state, (checkpoints, _) = build_state(world), checkpoints_of()
    now = iter(range(0, 1000, 10))
    monkeypatch.setattr("utils.rundir.checkpoint.time", SimpleNamespace(monotonic=lambda: next(now)))  # 10 s from one look to the next
    train_step(state)
    checkpoints.save(state, lambda weights: None)
    in_save = checkpoints.stall_s
    checkpoints.flush()
    assert (in_save > 0, checkpoints.stall_s > in_save, checkpoints.count) == (True, True, 1)


# --- damage


@pytest.mark.parametrize("file", FILES)
def test_any_flipped_byte_is_found(saved, file):
    path = saved[0] / file
    size = path.stat().st_size
    step = 1 if file == "MANIFEST.json" else 997
    missed = []
    for place in {*range(0, size, step), size - 1}:
        flip(path, place)
        if find_damage(saved[0]) is None:
            missed.append(place)
        flip(path, place)
    assert (missed, find_damage(saved[0])) == ([], None)


@pytest.mark.parametrize("mask", [0x02, 0x20, 0x80, 0xFF])
def test_other_flips_of_the_manifest_are_found(saved, mask):
    path, missed = saved[0] / "MANIFEST.json", []
    for place in range(path.stat().st_size):
        flip(path, place, mask)
        if find_damage(saved[0]) is None:
            missed.append(place)
        flip(path, place, mask)
    assert missed == []


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", ["truncate", "empty", "grow", "remove"])
def test_a_file_that_lost_or_gained_bytes_is_found(saved, file, damage):
    path = saved[0] / file
    data = path.read_bytes()
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes({"truncate": data[:-1], "empty": b"", "grow": data + b"x"}[damage])
    assert find_damage(saved[0]) is not None


def test_a_file_larger_than_a_chunk_is_hashed_to_its_end(world, checkpoints_of, folder):
    state = build_state(world, model=nn.Linear(CHUNK // 4 // 1000, 1001))
    state.progress = Progress(step=1)
    save(checkpoints_of()[0], state)
    [path] = folder.iterdir()
    chunks = json.loads((path / "MANIFEST.json").read_text())["files"]["model.safetensors"]["sha256"]
    flip(path / "model.safetensors", -1)
    assert (len(chunks), find_damage(path)) == (2, "model.safetensors: checksum differs")


def test_the_newest_valid_one_is_taken_and_the_damaged_one_set_aside_with_a_note(world, checkpoints_of, saved, folder):
    flip(saved[2] / "state.pt", 100)
    state, (checkpoints, notes) = build_state(world), checkpoints_of(start=2)
    checkpoints.restore(state)
    assert (state.progress.step, names_in(folder), len(notes)) == (2, [f"damaged-{saved[2].name}", saved[0].name, saved[1].name], 1)
    assert "state.pt: checksum differs" in notes[0] and "1 steps will be repeated" in notes[0]


def test_a_run_that_fell_back_saves_the_same_step_again(world, checkpoints_of, saved, folder):
    flip(saved[2] / "state.pt", 100)
    state, (checkpoints, _) = build_state(world), checkpoints_of(start=2)
    checkpoints.restore(state)
    train_step(state)
    save(checkpoints, state)
    assert checkpoints_of(start=3)[0].restore(build_state(world)) and "step-0000000003-g2" in names_in(folder)


def test_of_two_starts_at_the_same_step_the_later_one_is_taken(world, checkpoints_of, saved):
    state, (first, _), (later, _) = build_state(world), checkpoints_of(start=9), checkpoints_of(start=10)  # in the order of numbers
    train_step(state)
    for checkpoints, value in ((first, 0.1), (later, 0.2)):
        state.progress, state.best = Progress(step=7), {"step": 7, "metric": "top1", "value": value}
        save(checkpoints, state)
    other = build_state(world)
    checkpoints_of(start=11)[0].restore(other)
    assert other.best["value"] == 0.2


def test_where_all_are_damaged_82_says_so_and_nothing_is_deleted(world, checkpoints_of, saved, folder):
    for path in saved:
        flip(path / "model.safetensors", -1)
    codes = []
    for _ in range(2):  # a second start must not begin anew either
        with pytest.raises(UserError) as refused:
            checkpoints_of(start=2)[0].restore(build_state(world))
        codes.append(refused.value.code)
    assert (codes, names_in(folder)) == ([Exit.NO_CHECKPOINT] * 2, [f"damaged-{path.name}" for path in saved])


def test_what_was_never_finished_is_removed(world, checkpoints_of, saved, folder):
    for name in (".tmp-step-0000000004-g1", ".tmp-removed-step-0000000000-g1"):
        (folder / name).mkdir()
        (folder / name / "model.safetensors").write_text("half")
    state = build_state(world)
    checkpoints_of(start=2)[0].restore(state)
    assert (state.progress.step, names_in(folder)) == (3, [path.name for path in saved])


def test_a_checkpoint_of_a_newer_program_is_78_and_stays(world, checkpoints_of, saved, folder):
    manifest = json.loads((saved[2] / "MANIFEST.json").read_text()) | {"format": 2}
    del manifest["sha256"]
    manifest["sha256"] = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    (saved[2] / "MANIFEST.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError) as refused:
        checkpoints_of(start=2)[0].restore(build_state(world))
    assert (refused.value.code, names_in(folder)) == (Exit.OTHER_RUN, [path.name for path in saved])


def test_of_several_damaged_ones_each_is_named_with_the_steps_to_be_repeated_and_what_is_used(world, checkpoints_of, saved, folder):
    flip(saved[2] / "state.pt", 100)
    (saved[1] / "trainer.json").unlink()
    (state, (checkpoints, notes)) = build_state(world), checkpoints_of(start=2)
    checkpoints.restore(state)
    missing = f"FileNotFoundError: [Errno 2] No such file or directory: '{saved[1] / 'trainer.json'}'"
    assert (state.progress.step, notes) == (1, [
        f"checkpoint {path.name} is damaged ({problem}) and set aside as damaged-{path.name}; using {saved[0].name},"
        f" {steps} steps will be repeated"
        for path, problem, steps in ((saved[2], "state.pt: checksum differs", 2), (saved[1], missing, 1))])


@pytest.mark.parametrize("model", [build_net(channels=3), nn.Sequential(nn.Conv2d(3, 4, 3)), nn.Linear(2, 2)])
def test_a_checkpoint_of_another_model_is_78(world, checkpoints_of, saved, model):
    with pytest.raises(UserError, match="holds another model") as refused:
        checkpoints_of(start=2)[0].restore(build_state(world, model=model))
    assert refused.value.code == Exit.OTHER_RUN


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


def test_the_one_saved_after_an_evaluation_takes_the_place_of_the_one_before(world, checkpoints_of, folder):
    state, (checkpoints, _) = build_state(world), checkpoints_of(keep=2)
    found = []
    for _ in range(3):
        train_step(state)
        checkpoints.save(state, lambda weights: None, is_evaluated=False)
        checkpoints.flush()
        found.append([name.removeprefix("step-000000000") for name in names_in(folder)])
        state.progress = replace(state.progress, evaluated_step=state.progress.step)
        save(checkpoints, state)
    # The first is spared until there are two others: there shall always be two valid ones.
    assert found == [["1-g1-unevaluated"], ["1-g1", "2-g1-unevaluated"], ["2-g1", "3-g1-unevaluated"]]
    assert [name.removeprefix("step-000000000") for name in names_in(folder)] == ["2-g1", "3-g1"]
    restored = build_state(world)
    checkpoints_of(start=2)[0].restore(restored)
    assert restored.progress == state.progress


def test_of_one_step_the_evaluated_checkpoint_is_the_newest(world, checkpoints_of, folder):
    state, (checkpoints, _) = build_state(world), checkpoints_of()
    train_step(state)
    checkpoints.save(state, lambda weights: None, is_evaluated=False)
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


def test_a_newest_one_that_the_disk_spoiled_does_not_count_and_takes_no_other_ones_place(world, checkpoints_of, folder, monkeypatch):
    def spoil(path):
        if path == folder and names_in(folder)[-1] == "step-0000000004-g1":  # the last sync of a save: it has just been renamed
            flip(folder / "step-0000000004-g1" / "state.pt", 100)

    state, (checkpoints, _) = build_state(world), checkpoints_of(keep=2)
    monkeypatch.setattr(checkpoint_folder, "sync", spoil)
    kept = []
    for _ in range(6):
        train_step(state)
        save(checkpoints, state)
        kept.append([int(name[5:15]) for name in names_in(folder)])
    assert kept == [[1], [1, 2], [2, 3], [2, 3, 4], [3, 4, 5], [5, 6]]


def test_an_old_one_that_was_spoiled_since_it_was_written_counts_for_nothing_in_the_next_start(world, checkpoints_of, saved, folder):
    flip(saved[1] / "state.pt", 100)
    state, (checkpoints, _) = build_state(world), checkpoints_of(start=2, keep=1)
    checkpoints.restore(state)
    train_step(state)
    flip(saved[2] / "state.pt", 100)  # read and found valid by this start: it is trusted; the next one looks anew
    save(checkpoints, state)
    again = checkpoints_of(start=3, keep=1)[0]
    again.restore(state)
    train_step(state)
    save(again, state)
    valid = [name for name in names_in(folder) if find_damage(folder / name) is None]
    assert valid == ["step-0000000004-g2", "step-0000000005-g3"]


def test_an_older_one_is_removed_only_after_the_newer_ones_were_read_back(world, checkpoints_of, saved, folder, monkeypatch):
    events, rename, find = [], os.rename, checkpoint_folder.find_damage
    state, (checkpoints, _) = build_state(world), checkpoints_of(start=2, keep=2)
    checkpoints.restore(state)
    train_step(state)
    monkeypatch.setattr(checkpoint_folder, "find_damage", lambda path: (events.append(("reads", path.name)), find(path))[1])
    monkeypatch.setattr(os, "rename", lambda old, new: (events.append(("renames", old.name)), rename(old, new))[1])
    save(checkpoints, state)
    removals = [events.index(("renames", path.name)) for path in saved[:2]]
    assert events.index(("reads", "step-0000000004-g2")) < min(removals)


def test_the_steps_between_checkpoints_are_counted_from_the_runs_beginning(checkpoints_of):
    checkpoints, _ = checkpoints_of(save_every=Interval("5"))
    assert ([step for step in range(1, 16) if checkpoints.is_due(step)], checkpoints.is_due_by_clock()) == ([5, 10, 15], False)


def test_a_duration_between_checkpoints_goes_by_the_clock(world, checkpoints_of):
    soon, late = (checkpoints_of(save_every=Interval(text))[0] for text in ("0.000001s", "1h"))
    assert (soon.is_due_by_clock(), late.is_due_by_clock(), any(soon.is_due(step) for step in range(1, 9))) == (True, False, False)


# --- the best


def test_the_best_checkpoint_is_loaded_and_the_newest_where_none_was_evaluated(world, checkpoints_of, saved):
    newest = checkpoints_of()[0].load_best(DDP(build_net(), world, 1)).step
    state, (checkpoints, _) = build_state(world), checkpoints_of(start=2)
    checkpoints.restore(state)
    train_step(state)
    state.best = {"step": 2, "metric": "top1", "value": 0.9}
    save(checkpoints, state)
    strategy = DDP(build_net(), world, 1)
    best = checkpoints_of()[0].load_best(strategy).step
    assert (newest, best) == (3, 2)


@pytest.mark.parametrize("best, how_lost, found", [(2, None, 2), (2, "damaged", 3), (2, "gone", 3), (None, None, 3), (None, "damaged", 3)])
def test_where_another_checkpoint_takes_the_place_of_the_best_one_a_note_says_so(world, checkpoints_of, folder, best, how_lost, found):
    state, (checkpoints, _) = build_state(world), checkpoints_of()
    for step in (1, 2, 3):
        train_step(state)
        state.best = {"step": 2, "metric": "top1", "value": 0.9} if best and step >= 2 else {}
        save(checkpoints, state)
    second = folder / "step-0000000002-g1"
    if how_lost == "damaged":
        flip(second / "model.safetensors", -1)
    elif how_lost == "gone":
        shutil.rmtree(second)
    reader, notes = checkpoints_of(start=2)
    step = reader.load_best(DDP(build_net(), world, 1)).step
    note = "the checkpoint of the best evaluation, at step 2, is damaged or gone; step-0000000003-g1 takes its place"
    assert (step, notes) == (found, [note] if best and how_lost else [])


def test_loading_the_best_changes_nothing_on_disk(world, checkpoints_of, saved, folder):
    flip(saved[2] / "state.pt", 100)
    (folder / ".tmp-step-0000000004-g1").mkdir()  # of a training that is under way
    before = contents(folder), names_in(folder)
    progress = checkpoints_of()[0].load_best(DDP(build_net(), world, 1))
    assert (progress.step, (contents(folder), names_in(folder))) == (2, before)


def test_where_nothing_was_saved_there_is_no_best_66(world, checkpoints_of):
    with pytest.raises(UserError) as refused:
        checkpoints_of()[0].load_best(DDP(build_net(), world, 1))
    assert refused.value.code == Exit.NO_INPUT


# --- a full disk


@contextmanager
def files_of_at_most(size):
    """Writing beyond it fails as on a full disk (EFBIG for ENOSPC), in every thread."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("file, share", [("model.safetensors", 0.5), ("state.pt", 0.9)])
def test_a_disk_that_fills_up_is_74_and_earlier_checkpoints_stay_as_they_were(world, checkpoints_of, saved, folder, file, share):
    before, limit = contents(folder), int(share * (saved[0] / file).stat().st_size)
    assert file == "model.safetensors" or limit > (saved[0] / "model.safetensors").stat().st_size  # so that `file` is the one that fails
    state, (checkpoints, _) = build_state(world), checkpoints_of(start=2)
    checkpoints.restore(state)
    train_step(state)
    with files_of_at_most(limit), pytest.raises(UserError, match="earlier checkpoints are untouched") as refused:
        save(checkpoints, state)
    assert (refused.value.code, contents(folder), names_in(folder)) == (Exit.IO, before, [path.name for path in saved])


def test_once_there_is_room_again_the_next_start_saves_the_same_state(world, checkpoints_of, saved, folder):
    state, (checkpoints, _) = build_state(world), checkpoints_of(start=2)
    checkpoints.restore(state)
    train_step(state)
    with files_of_at_most(100), pytest.raises(UserError):
        save(checkpoints, state)
    save(checkpoints_of(start=3)[0], state)
    assert find_damage(folder / "step-0000000004-g3") is None


# --- Progress


def test_progress_wraps_at_the_end_of_an_epoch():
    progress, seen = Progress(), []
    for end in (4, 8, 10, 4):
        progress = progress.after(end, num_samples=10)
        seen.append((progress.epoch, progress.sample_offset, progress.step))
    assert seen == [(0, 4, 1), (0, 8, 2), (1, 0, 3), (1, 4, 4)]


def test_a_tied_weight_is_saved_under_one_name_and_comes_back_under_both(world, checkpoints_of, folder):
    def build_tied():
        model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6, bias=False))
        model[1].weight = model[0].weight
        return build_state(world, model=model)

    state, (checkpoints, _) = build_tied(), checkpoints_of()
    state.strategy.module(torch.arange(6)).square().sum().backward()
    state.optimizer.step()
    state.progress = state.progress.after(6, 60)
    save(checkpoints, state)
    assert set(state.strategy.model_state()) == {"0.weight"}

    other = build_tied()
    assert checkpoints_of(start=2)[0].restore(other)
    assert torch.equal(other.strategy.module[1].weight, state.strategy.module[0].weight)
    assert other.strategy.module[1].weight is other.strategy.module[0].weight


def test_the_time_for_a_save_grows_with_the_size_of_a_checkpoint(world, checkpoints_of):
    """By a second for each 10 MB, of weights and Adam's two averages; a small one has --section-timeout."""
    state, (checkpoints, _) = build_state(world, model=nn.Linear(2500, 1000, bias=False)), checkpoints_of()
    before = checkpoints.limit_s
    checkpoints.restore(state)
    assert (before, checkpoints.limit_s) == (300, 300 + 3 * 1)


def test_rank_0_has_time_to_check_all_checkpoints(saved, checkpoints_of):
    """Each but the oldest may be damaged."""
    total = sum(file.stat().st_size for path in saved for file in path.iterdir())
    assert checkpoints_of()[0]._folder.num_bytes() == total > 0
