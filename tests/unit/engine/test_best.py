"""engine/best.py: which evaluation is the best one, also after a change of --best."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from torch.nn import functional as F

from engine.best import best_metric, update_best
from models.metrics.classes import classification_metrics
from models.metrics.labels import multi_label_metrics
from models.metrics.targets import regression_metrics
from utils.errors import Exit, UserError
from utils.rundir.resolved import Resolved
from utils.rundir.state import Progress
from utils.settings.run_options import RunOptions


def training_of(name, folder, best=None, step=8, patience=0):
    """A Training as far as it is asked; the records have an evaluation at steps 2 and 4."""
    rows = [{"split": "train", "step": 4, "loss": 9.0},
            *({"split": "val", "step": at, "loss": 1 / at, "top1": at / 10} for at in (2, 4))]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return SimpleNamespace(
        config=SimpleNamespace(record=SimpleNamespace(best=name), run=RunOptions(early_stop_patience=patience)),
        task=SimpleNamespace(best="top1", metrics=classification_metrics(3, np.arange(3), None, "auto")),
        state=SimpleNamespace(best=best or {}, progress=Progress(step=step)),
        run=SimpleNamespace(path=folder, resolved=Resolved()), world=SimpleNamespace(on_rank_zero=lambda work: work()))


@pytest.mark.parametrize("name, metric, is_high", [
    ("auto", "top1", True), ("top1", "top1", True), ("loss", "loss", False), ("macro_recall", "macro_recall", True)])
def test_any_number_of_the_evaluation_can_decide(tmp_path, name, metric, is_high):
    assert best_metric(training_of(name, tmp_path)) == (metric, is_high)


@pytest.mark.parametrize("name, is_high", [
    ("mae", False), ("rmse", False), ("r2", True), ("pearson", True), ("map", True), ("micro_f1", True)])
def test_errors_are_better_lower_and_the_other_figures_higher(tmp_path, name, is_high):
    """Of numbers and of several labels."""
    t = training_of(name, tmp_path, {"step": 4, "metric": name, "value": 0.5})
    t.task.metrics = (*multi_label_metrics(np.eye(3), F.mse_loss),
                      *regression_metrics(np.arange(3.0)[:, None], np.zeros(1), np.ones(1), F.mse_loss))
    assert best_metric(t) == (name, is_high)
    assert (update_best(t, {name: 0.6}, {}) is not None) == is_high


def test_an_unknown_metric_is_refused_with_those_there_are(tmp_path):
    with pytest.raises(UserError, match=r"macro_f2.*did you mean macro_f1\?.*choose from loss, top1,") as refused:
        best_metric(training_of("macro_f2", tmp_path))
    assert refused.value.code == Exit.USAGE


@pytest.mark.parametrize("name, before, value, is_best", [
    ("top1", 0.5, 0.6, True), ("top1", 0.5, 0.5, False), ("top1", 0.5, 0.4, False),
    ("loss", 0.5, 0.4, True), ("loss", 0.5, 0.5, False), ("loss", 0.5, 0.6, False)])
def test_a_better_value_replaces_the_best_and_an_equal_one_does_not(tmp_path, name, before, value, is_best):
    best = {"step": 4, "metric": name, "value": before}
    t = training_of(name, tmp_path, best)
    assert (update_best(t, {name: value}, {}) is not None) == is_best
    assert t.state.best == ({"step": 8, "metric": name, "value": value} if is_best else best)


def test_the_first_evaluation_is_the_best(tmp_path):
    t = training_of("auto", tmp_path)
    assert update_best(t, {"top1": 0.0}, {})
    assert t.state.best == {"step": 8, "metric": "top1", "value": 0.0}


@pytest.mark.parametrize("value, is_best", [(0.24, True), (0.26, False)])
def test_after_another_best_the_best_model_is_compared_by_the_new_metric(tmp_path, value, is_best):
    """The loss of the model that was best by top1, at step 4, was 0.25."""
    t = training_of("loss", tmp_path, {"step": 4, "metric": "top1", "value": 0.4})
    assert (update_best(t, {"loss": value}, {}) is not None) == is_best
    assert t.state.best == {"step": 8 if is_best else 4, "metric": "loss", "value": value if is_best else 0.25}


def test_a_metric_that_old_records_lack_makes_the_next_one_the_best(tmp_path):
    t = training_of("macro_recall", tmp_path, {"step": 4, "metric": "top1", "value": 0.4})
    assert update_best(t, {"macro_recall": 0.1}, {})
    assert t.state.best == {"step": 8, "metric": "macro_recall", "value": 0.1}


def test_an_evaluation_without_the_metric_is_bad_data(tmp_path):
    with pytest.raises(UserError, match="has no loss, because the samples that could be read are all") as refused:
        update_best(training_of("loss", tmp_path), {"top1": 1.0}, {})
    assert refused.value.code == Exit.BAD_DATA


@pytest.mark.parametrize("averaged, expected", [
    (0.7, {"step": 8, "metric": "top1", "value": 0.7, "weights": "ema"}),
    (0.6, {"step": 8, "metric": "top1", "value": 0.6})])
def test_the_better_of_the_weights_and_their_average_counts(tmp_path, averaged, expected):
    t = training_of("auto", tmp_path, {"step": 4, "metric": "top1", "value": 0.5})
    values, of_average = {"top1": 0.6}, {"top1": averaged}
    assert update_best(t, values, of_average) is (of_average if averaged > 0.6 else values)
    assert t.state.best == expected


def test_after_another_best_the_averages_own_record_is_compared(tmp_path):
    t = training_of("loss", tmp_path, {"step": 4, "metric": "top1", "value": 0.4, "weights": "ema"})
    (tmp_path / "metrics.jsonl").write_text('{"split": "val", "step": 4, "loss": 0.3, "ema_loss": 0.2}\n')
    assert update_best(t, {"loss": 0.25}, {}) is None
    assert t.state.best == {"step": 4, "metric": "loss", "value": 0.2, "weights": "ema"}


def test_after_another_best_early_stopping_counts_from_the_best_value(tmp_path):
    t = training_of("loss", tmp_path, {"step": 4, "metric": "top1", "value": 0.4}, patience=3)
    t.state.progress = replace(t.state.progress, gain=0.4, without_gain=1)
    update_best(t, {"loss": 0.3}, {})
    assert (t.state.progress.gain, t.state.progress.without_gain) == (0.25, 2)
