"""utils/rundir/checkpoint.py: what was saved comes back bit for bit."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.unit.utils.rundir.conftest import (
    build_net,
    build_state,
    contents,
    everything,
    flip,
    names_in,
    save,
    train_step,
)
from utils.errors import Exit, UserError
from utils.numerics.averages import Averages
from utils.rundir.checkpoint import Checkpoints
from utils.rundir.resolved import Resolved
from utils.settings.run_options import RecordOptions
from utils.strategies.ddp import DDP

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
def test_a_restored_state_trains_on_like_one_that_was_never_saved(world, checkpoints_of, optimizer):
    state = build_state(world, optimizer)
    train_step(state)
    save(checkpoints_of()[0], state)
    other = build_state(world, optimizer)
    checkpoints_of()[0].restore(other)
    for each in (state, other):
        torch.manual_seed(1)
        train_step(each)
    assert everything(other) == everything(state)


def test_optimizer_state_is_keyed_by_parameter_names(world, checkpoints_of, folder):
    state = build_state(world)
    train_step(state)
    save(checkpoints_of()[0], state)
    values = torch.load(folder / "step-0000000001-g1" / "state.pt", weights_only=True)
    assert set(values["optimizer"]) == {name for name, _ in state.strategy.module.named_parameters()}


def test_optimizer_state_finds_its_parameter_in_another_order(world, checkpoints_of):
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
    assert [group["lr"] for group in other.optimizer.param_groups] == [0.001] * 2


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


def test_a_tied_weight_is_saved_under_one_name_and_comes_back_under_both(world, checkpoints_of, folder):
    def build_tied():
        model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6, bias=False))
        model[1].weight = model[0].weight
        return build_state(world, model=model)

    state, (checkpoints, _) = build_tied(), checkpoints_of()
    state.strategy.module(torch.arange(6)).square().sum().backward()
    state.optimizer.step()
    state.progress = state.progress.after(0, 6)
    save(checkpoints, state)
    assert set(state.strategy.model_state()) == {"0.weight"}

    other = build_tied()
    assert checkpoints_of(start=2)[0].restore(other)
    assert torch.equal(other.strategy.module[1].weight, state.strategy.module[0].weight)
    assert other.strategy.module[1].weight is other.strategy.module[0].weight


# --- size


@pytest.mark.parametrize("ema_decay", [0.0, 0.9])
def test_the_room_it_asks_for_is_what_checkpoints_take(world, checkpoints_of, folder, ema_decay):
    """--keep of them, the best one and one being written, each with Adam's averages and --ema-decay's; RUN/model."""
    model = nn.Linear(512, 512)  # 1 MiB: names and positions count for little beside it
    state, (checkpoints, _) = build_state(world, "adamw", model), checkpoints_of(keep=2)
    state.averages = Averages(state.strategy.model_state(), ema_decay)
    checkpoints.restore(state)
    model(torch.ones(1, 512)).sum().backward()
    state.optimizer.step()
    state.progress = state.progress.after(0, 1)
    save(checkpoints, state)
    [size] = [sum(file.stat().st_size for file in each.iterdir()) for each in folder.iterdir()]
    assert checkpoints.most_bytes == pytest.approx(4 * size + sum(each.nbytes for each in model.parameters()), rel=0.01)


# --- the best


def test_the_best_one_is_loaded_or_the_newest_if_none_was_evaluated(world, checkpoints_of, saved):
    newest, _ = checkpoints_of()[0].load_best(DDP(build_net(), world))
    state, (checkpoints, _) = build_state(world), checkpoints_of(start=2)
    checkpoints.restore(state)
    train_step(state)
    state.best = {"step": 2, "metric": "top1", "value": 0.9}
    save(checkpoints, state)
    strategy = DDP(build_net(), world)
    best, _ = checkpoints_of()[0].load_best(strategy)
    assert (newest.step, best.step) == (3, 2)


@pytest.mark.parametrize("best, how_lost, found", [
    (2, None, 2), (2, "damaged", 3), (2, "gone", 3), (None, None, 3), (None, "damaged", 3)])
def test_if_the_best_one_is_lost_a_note_says_which_is_used(world, checkpoints_of, folder, best, how_lost, found):
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
    progress, _ = reader.load_best(DDP(build_net(), world))
    note = "the checkpoint of the best evaluation, at step 2, is damaged or missing; using step-0000000003-g1"
    assert (progress.step, notes) == (found, [note] if best and how_lost else [])


def test_loading_the_best_changes_nothing_on_disk(world, checkpoints_of, saved, folder):
    flip(saved[2] / "state.pt", 100)
    (folder / ".tmp-step-0000000004-g1").mkdir()  # of a training that is running
    before = contents(folder), names_in(folder)
    progress, _ = checkpoints_of()[0].load_best(DDP(build_net(), world))
    assert (progress.step, (contents(folder), names_in(folder))) == (2, before)


def test_without_a_checkpoint_there_is_no_best_66(world, checkpoints_of):
    with pytest.raises(UserError) as refused:
        checkpoints_of()[0].load_best(DDP(build_net(), world))
    assert refused.value.code == Exit.NO_INPUT


# --- time


def test_the_time_for_a_save_grows_with_the_size_of_a_checkpoint(world, checkpoints_of):
    """By a second for each 10 MB, of weights and Adam's two averages; a small one has three times --step-timeout."""
    state, (checkpoints, _) = build_state(world, model=nn.Linear(2500, 1000, bias=False)), checkpoints_of()
    before = checkpoints.limit_s
    checkpoints.restore(state)
    assert (before, checkpoints.limit_s) == (300, 300 + 3 * 1)


def test_rank_0_has_time_to_check_all_checkpoints(saved, checkpoints_of):
    """Each but the oldest may be damaged."""
    total = sum(file.stat().st_size for path in saved for file in path.iterdir())
    assert checkpoints_of()[0]._folder.num_bytes() == total > 0


@pytest.mark.parametrize("free_gb, saved_gb, writes, is_warned", [
    (10, 0, True, False), (1.2, 0, True, True), (1.2, 0.2, True, False), (1.2, 0, False, False)])
def test_a_small_disk_is_warned_of_on_the_rank_that_writes(
        world, tmp_path, monkeypatch, free_gb, saved_gb, writes, is_warned):
    """What earlier checkpoints have taken counts as room."""
    monkeypatch.chdir(tmp_path)
    notes, saved = [], Path("run", "checkpoints", "step-0000000001-g1")
    saved.mkdir(parents=True)
    (saved / "state.pt").touch()
    os.truncate(saved / "state.pt", int(saved_gb * 1e9))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=int(free_gb * 1e9)))
    run = SimpleNamespace(path=Path("run"), start=1, note=notes.append, writes=writes, resolved=Resolved())
    checkpoints = Checkpoints(run, world, RecordOptions())
    checkpoints._num_bytes, checkpoints._model_bytes = int(2.4e8), int(1e8)  # three, the best one, one being written
    checkpoints.warn_of_small_disk()
    assert [note.partition(": ")[2].partition(": ")[2] for note in notes] == [
        "run has room for 1.2 GB, but its checkpoints and RUN/model may take 1.3 GB: use a smaller --keep,"
        " --keep-every 0, or --run-dir on another disk"] * is_warned
