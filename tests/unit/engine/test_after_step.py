"""Which model is best, and when a run stops early; a checkpoint keeps both."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from engine import after_step
from engine.best import update_best
from engine.due import Due, has_stopped_early, is_finished, what_is_due
from models.metrics.classes import classification_metrics
from tests.unit.utils.rundir.conftest import build_state, checkpoints_of, folder, save, train_step  # noqa: F401
from utils.numerics.averages import Averages
from utils.rundir.resolved import Resolved
from utils.rundir.state import Progress
from utils.settings.run_options import OptimOptions, RecordOptions, RunOptions

METRICS = classification_metrics(3, np.arange(3), None, "auto")
HIGH, LOW = (SimpleNamespace(best=name, metrics=METRICS) for name in ("top1", "loss"))


def training(task=HIGH, patience=2, progress=Progress(), total_steps=100):  # noqa: B008
    run = RunOptions(early_stop_patience=patience)
    return SimpleNamespace(
        config=SimpleNamespace(run=run, record=RecordOptions(eval_every=10)), task=task, total_steps=total_steps,
        last_step=total_steps, flags=SimpleNamespace(stop=False, error=False, save=False),
        checkpoints=SimpleNamespace(is_due=lambda step: False), run=SimpleNamespace(resolved=Resolved()),
        state=SimpleNamespace(progress=progress, best={}),
        world=SimpleNamespace(on_rank_zero=lambda work: work()))


def evaluations_until_stop(values, **options):
    t = training(**options)
    for number, value in enumerate(values, 1):
        update_best(t, {t.task.best: value}, {})
        if has_stopped_early(t):
            return number
    return None


@pytest.mark.parametrize("values, options, stop", [
    ([0.1, 0.2, 0.2, 0.1, 0.3], {}, 4),                                  # an equal value is no gain
    ([0.1, 0.2, 0.2, 0.3, 0.3, 0.3], {}, 6),                             # a gain starts the count again
    ([3.0, 2.0, 2.5, 2.0], {"task": LOW}, 4),
    ([0.3, 0.2], {"patience": 1}, 2),
    ([0.3, 0.2, 0.1, 0.0], {"patience": 0}, None)])
def test_a_run_stops_after_so_many_evaluations_without_a_gain(values, options, stop):
    assert evaluations_until_stop(values, **options) == stop


@pytest.mark.parametrize("head_init, stop", [("features", 8), ("random", 4)])
def test_patience_with_a_fitted_head_counts_from_the_end_of_the_warm_up(head_init, stop):
    """5 % of 100 steps; the head was evaluated at step 0, and each step loses."""
    t = training(patience=2, progress=Progress(evaluated_step=-1))
    t.config.optim = OptimOptions()
    t.run.resolved = Resolved(head_init=head_init)
    for step in range(0, 20, 2):
        t.state.progress = replace(t.state.progress, step=step)
        update_best(t, {t.task.best: 0.5 - step / 100}, {})
        if has_stopped_early(t):
            break
    assert step == stop


def test_a_save_by_the_clock_is_made_where_each_step_ends_an_epoch(monkeypatch):
    """The exchange that an epoch's end waits for is the only one that tells of it."""
    t, saved = training(progress=Progress(step=3, epoch=3)), []
    monkeypatch.setattr(after_step, "end_if_wrong", lambda t, waits: setattr(t.flags, "save", True))
    monkeypatch.setattr(after_step, "save", saved.append)
    for name in ("close_epoch", "note_coverage"):
        monkeypatch.setattr(after_step, name, lambda t, **given: None)
    assert (after_step.after_step(t), saved) == (False, [t])


NOTHING = Due(evaluate=False, save=False, stop=False)


@pytest.mark.parametrize("progress, due", [
    (Progress(step=15, sample_offset=5), NOTHING),
    (Progress(step=20, sample_offset=5), NOTHING._replace(evaluate=True)),
    (Progress(step=20, sample_offset=5, evaluated_step=20), NOTHING),
    (Progress(step=100), Due(evaluate=True, save=False, stop=True)),
    (Progress(step=100, evaluated_step=100), NOTHING._replace(stop=True))])
def test_what_is_due_follows_from_the_position(progress, due):
    assert what_is_due(training(progress=progress)) == due


@pytest.mark.parametrize("flag", ["save", "stop"])
def test_what_a_rank_wants_is_due_once_all_know_it(flag):
    t = training(progress=Progress(step=15, sample_offset=5))
    setattr(t.flags, flag, True)
    assert what_is_due(t) == NOTHING._replace(**{flag: True})


@pytest.mark.parametrize("step, evaluates", [(20, False), (100, True)])
def test_a_stop_leaves_an_evaluation_to_the_next_start_but_the_last_one(step, evaluates, monkeypatch):
    t, done = training(progress=Progress(step=step, sample_offset=5)), []
    monkeypatch.setattr(after_step, "end_if_wrong", lambda t, waits: setattr(t.flags, "stop", True))
    monkeypatch.setattr(after_step, "evaluate_and_save", done.append)
    assert (after_step.after_step(t), done) == (True, [t] * evaluates)


def test_a_step_after_which_nothing_is_due_waits_for_nothing(monkeypatch):
    monkeypatch.setattr(after_step, "end_if_wrong", None)
    assert after_step.after_step(training(progress=Progress(step=15, sample_offset=5))) is False


def test_a_run_that_stopped_early_is_finished_and_awaits_no_evaluation():
    t = training(progress=Progress(step=30, evaluated_step=30, sample_offset=5, gain=0.5, without_gain=2))
    assert (what_is_due(t), is_finished(t)) == (NOTHING._replace(stop=True), True)
    t = training(progress=Progress(step=30, evaluated_step=30, sample_offset=5, gain=0.5, without_gain=1))
    assert (what_is_due(t), is_finished(t)) == (NOTHING, False)


@pytest.mark.parametrize("evaluated, finished", [(90, False), (100, True)])
def test_a_run_is_finished_once_its_last_step_is_evaluated(evaluated, finished):
    t = training(patience=0, progress=Progress(step=100, evaluated_step=evaluated))
    assert (what_is_due(t).stop, is_finished(t)) == (True, finished)


def test_a_run_without_early_stopping_has_no_word_of_it_in_its_checkpoints(world, checkpoints_of, folder):  # noqa: F811
    state = build_state(world)
    train_step(state)
    save(checkpoints_of()[0], state)
    [saved] = folder.glob("step-*")
    progress = json.loads((saved / "trainer.json").read_text())["progress"]
    assert set(progress) == {"epoch", "sample_offset", "step", "evaluated_step", "skipped"}
    assert set(torch.load(saved / "state.pt", weights_only=True)) == {"coverage", "optimizer", "scaler"}


@pytest.mark.parametrize("is_average", [True, False])
def test_the_model_is_the_average_where_that_was_better(world, checkpoints_of, folder, is_average):  # noqa: F811
    """What is exported, what --eval-only loads, and what the training continues from."""
    state, exported = build_state(world), {}
    state.averages = Averages(state.strategy.model_state(), 0.9)
    train_step(state)
    state.averages.update(0, torch.tensor(True))
    state.best = {"step": 1, "metric": "top1", "value": 0.5} | ({"weights": "ema"} if is_average else {})
    save(checkpoints_of()[0], state, exported.update)
    weights = state.strategy.model_state()
    expected = weights | state.averages.values if is_average else weights
    assert all(torch.equal(exported[name], tensor) for name, tensor in expected.items())

    evaluated = build_state(world)
    assert checkpoints_of()[0].load_best(evaluated.strategy)[1] == is_average
    assert all(torch.equal(evaluated.strategy.model_state()[name], tensor) for name, tensor in expected.items())

    resumed = build_state(world)
    resumed.averages = Averages(resumed.strategy.model_state(), 0.9)
    checkpoints_of()[0].restore(resumed)
    assert all(torch.equal(resumed.strategy.model_state()[name], tensor) for name, tensor in weights.items())
    assert all(torch.equal(resumed.averages.values[name], value) for name, value in state.averages.values.items())
    assert all(torch.equal(load_file(next(folder.glob("step-*")) / "model.safetensors")[name], tensor)
               for name, tensor in weights.items())
