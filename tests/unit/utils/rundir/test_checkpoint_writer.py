"""utils/rundir/checkpoint.py: the training does not wait while a save is written."""

import time
from threading import Event, Thread
from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError

from tests.unit.utils.rundir.conftest import (
    beside,
    build_state,
    contents,
    everything,
    names_in,
    names_of,
    save,
    train_step,
)
from utils.errors import Exit, UserError, explain
from utils.rundir.checkpoint import Checkpoints

LIMIT_S = 60  # for another thread

@pytest.fixture
def writer():
    """beside(weights) of a save: it sets `came` and waits for `may_go`, which the end of every test sets."""
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
def test_flush_and_close_wait_for_a_save_and_the_training_does_not(world, checkpoints_of, folder, writer, wait):
    state, (checkpoints, _) = build_state(world), checkpoints_of()
    train_step(state)
    checkpoints.save(state, beside(writer))
    is_under_way = writer.came.wait(LIMIT_S)
    seen = names_of(folder)
    waiting = Thread(target=lambda: (wait(checkpoints), seen.append("waited")))
    waiting.start()
    waiting.join(0.1)  # if it did not wait, it would have its moment
    seen.append("held")
    writer.may_go.set()
    waiting.join(LIMIT_S)
    assert (is_under_way, seen, names_in(folder)) == (True, ["held", "waited"], ["step-0000000001-g1"])


def test_close_does_not_wait_forever(world, checkpoints_of, folder, writer, monkeypatch):
    monkeypatch.setattr("utils.rundir.checkpoint.LAST_SAVE_S", 0.01)
    state, (checkpoints, _) = build_state(world), checkpoints_of()
    train_step(state)
    checkpoints.save(state, beside(writer))
    checkpoints.close()
    writer.may_go.set()
    checkpoints.flush()  # had close waited for the writer, the writer would have timed out
    assert names_in(folder) == ["step-0000000001-g1"]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_save_holds_the_state_of_its_moment(world, checkpoints_of, writer, optimizer):
    """Whatever the training does while it is written."""
    state, (checkpoints, _) = build_state(world, optimizer), checkpoints_of()
    state.scaler.scale(torch.ones(()))  # so that it has a scale to keep
    train_step(state)
    state.best = {"step": 1, "metric": "top1", "value": 0.5}
    at_that_moment = everything(state)
    checkpoints.save(state, beside(writer))
    assert writer.came.wait(LIMIT_S)
    train_step(state)
    state.scaler.update(128.0)
    state.best = {"step": 2, "metric": "top1", "value": 0.6}
    writer.may_go.set()
    checkpoints.flush()
    other = build_state(world, optimizer)
    checkpoints_of(start=2)[0].restore(other)
    assert everything(other) == at_that_moment != everything(state)


def test_what_is_written_beside_comes_before_the_checkpoint(world, checkpoints_of, folder, writer):
    """And gets the weights of the moment of the save."""
    state, (checkpoints, _) = build_state(world), checkpoints_of()
    train_step(state)
    expected = {name: weight.tolist() for name, weight in state.strategy.model_state().items()}
    checkpoints.save(state, beside(writer))
    assert writer.came.wait(LIMIT_S)
    train_step(state)
    before = names_of(folder)
    writer.may_go.set()
    checkpoints.flush()
    assert (before, {name: weight.tolist() for name, weight in writer.weights.items()}) == ([], expected)


def test_there_is_one_save_at_a_time(world, checkpoints_of, folder, writer):
    state, (checkpoints, _) = build_state(world), checkpoints_of()
    train_step(state)
    checkpoints.save(state, beside(writer))
    assert writer.came.wait(LIMIT_S)
    train_step(state)
    found = []

    def save_again():
        checkpoints.save(state, beside(lambda weights: found.extend(names_of(folder))))
        found.append("returned")

    second = Thread(target=save_again)
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
def test_an_error_beside_has_its_code_and_leaves_no_checkpoint(world, checkpoints_of, saved, folder, error, code):
    def fail(weights):
        raise error

    before = contents(folder)
    state, (checkpoints, _) = build_state(world), checkpoints_of(start=2)
    checkpoints.restore(state)
    train_step(state)
    with pytest.raises(Exception) as refused:
        save(checkpoints, state, fail)
    assert (explain(refused.value)[1], contents(folder)) == (code, before)


def test_an_error_of_the_writer_is_known_early_and_ends_the_saving(world, checkpoints_of, saved, folder, writer):
    """Before any rank waits for the save."""
    def fail(weights):
        writer(weights)
        raise UserError("the disk is full", Exit.IO)

    before = contents(folder)
    state, (checkpoints, _) = build_state(world), checkpoints_of(start=2)
    checkpoints.restore(state)
    train_step(state)
    checkpoints.save(state, beside(fail))
    known = [checkpoints.has_failed()]
    writer.may_go.set()
    deadline = time.monotonic() + LIMIT_S
    while not checkpoints.has_failed() and time.monotonic() < deadline:
        time.sleep(0.001)
    known.append(checkpoints.has_failed())
    train_step(state)
    codes, written = [], []
    for wait in (lambda: checkpoints.save(state, beside(written.append)), checkpoints.flush, checkpoints.flush):
        with pytest.raises(UserError, match="the disk is full") as refused:
            wait()
        codes.append(refused.value.code)
    checkpoints.close()  # raises nothing
    assert (known, codes, written, contents(folder)) == ([False, True], [Exit.IO] * 3, [], before)


def test_a_save_that_succeeded_is_no_error(world, checkpoints_of):
    state, (checkpoints, _) = build_state(world), checkpoints_of()
    train_step(state)
    save(checkpoints, state)
    assert (checkpoints.flush(), checkpoints.has_failed()) == (None, False)


def test_without_a_save_there_is_nothing_to_wait_for(checkpoints_of):
    checkpoints, _ = checkpoints_of()
    assert (checkpoints.flush(), checkpoints.close(), checkpoints.has_failed()) == (None, None, False)


def test_the_seconds_that_the_training_waited_are_counted(world, checkpoints_of, writer, monkeypatch):
    state, (checkpoints, _) = build_state(world), checkpoints_of()
    now = iter(range(0, 1000, 10))
    monkeypatch.setattr("utils.rundir.checkpoint.time", SimpleNamespace(monotonic=lambda: next(now)))
    train_step(state)
    checkpoints.save(state, beside())
    in_save = checkpoints.stall_s
    checkpoints.flush()
    assert (in_save > 0, checkpoints.stall_s > in_save, checkpoints.count) == (True, True, 1)
