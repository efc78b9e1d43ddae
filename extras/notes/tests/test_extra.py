"""extra.py: each note when it applies, once, and not when it does not; the same after a resume."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from extras.notes.extra import EXTRA, Notes, imbalance, notes_of
from models.losses import class_weights
from models.metrics.classes import classification_metrics
from models.objectives import Classes, Labels
from utils.rundir.resolved import Resolved
from utils.settings.command_line import parse_command_line
from utils.settings.config import ImageClassificationConfig, TextClassificationConfig, settings, with_values
from utils.settings.run_options import ClassLossOptions

pytestmark = pytest.mark.unit

ABOUT = {"total_steps": 100, "majority": 0.5, "workers": 1, "cores": 8, "is_even": True}


def train(loss=1.0, wait=0.05, step=1):
    return {"split": "train", "step": step, "epoch": step / 10, "loss": loss, "data_wait": wait}


def val(step, loss=1.0, top1=0.8, never=0):
    return {"split": "val", "step": step, "epoch": step / 10, "loss": loss, "top1": top1, "never_predicted": never}


def said(*records, about=ABOUT):
    """What is said, in its order."""
    notes = Notes(**about)
    return [text for record in records for text in notes.add(record)]


@pytest.mark.parametrize("records, applies", [
    ([val(100, never=2), val(200, never=1)], True), ([val(100, never=2), val(200)], False),
    ([val(100), val(200, never=1)], False), ([val(100, never=1)], False), ([val(900, never=1)], True),
    ([val(98, never=1), val(99, never=1)], False), ([val(98, never=1), val(99, never=1), val(100, never=1)], False)])
def test_a_class_that_is_never_predicted_is_named_after_two_evaluations(records, applies):
    """Not before step 100, when BatchNorm's statistics do not follow the weights yet."""
    assert any("never predicted" in text for text in said(*records, about=ABOUT | {"total_steps": 900})) == applies


@pytest.mark.parametrize("step, top1, applies", [
    (100, 0.5, True), (100, 0.4, True), (100, 0.501, False), (99, 0.5, False)])
def test_accuracy_of_the_majority_is_noted_after_an_epoch(step, top1, applies):
    """And not before step 100, or the end of a shorter run."""
    assert any("has learnt nothing yet" in text for text in said(val(step, top1=top1))) == applies
    assert not any("has learnt nothing yet" in text for text in said({**val(100, top1=0.4), "epoch": 0.5}))


@pytest.mark.parametrize("loss, top1, applies", [(1.06, 0.9, True), (1.04, 0.9, False), (1.2, 0.8, False),
                                                 (0.9, 0.9, False)])
def test_a_loss_that_rises_with_the_accuracy_is_explained(loss, top1, applies):
    found = said(val(10, loss=1.2, top1=0.7), val(20), val(30, loss=loss, top1=top1))
    assert any("becomes too sure of its mistakes" in text for text in found) == applies


@pytest.mark.parametrize("fall, loss, top1, applies", [
    (0.5, 1.0, 0.8, True), (0.9, 1.0, 0.8, False), (0.5, 0.9, 0.8, False), (0.5, 1.0, 0.9, False)])
def test_a_training_loss_that_falls_alone_is_noted(fall, loss, top1, applies):
    records = [record for number in range(4) for record in (
        train(loss=2 - 2 * (1 - fall) * number / 3), val(10 * number + 10, loss=loss if number == 3 else 1.0,
                                                     top1=top1 if number == 3 else 0.8))]
    assert any("memorises" in text for text in said(*records)) == applies


@pytest.mark.parametrize("wait, applies", [(0.21, True), (0.19, False)])
def test_waiting_for_data_is_noted_with_the_workers_that_end_it(wait, applies):
    found = said(*[train(wait=wait, step=step) for step in range(5)])
    assert found == (["21 % of the training time is spent waiting for data: --workers 2 would end it"] * applies)


def test_four_records_are_too_few_to_speak_of_waiting():
    assert said(*[train(wait=0.9)] * 4) == []


@pytest.mark.parametrize("cores, words", [
    (64, "--workers 10 would end it"), (4, "--workers 3 would shorten it, and 10, on as many more cores, would end it"),
    (2, "no core is free for more --workers")])
def test_the_workers_are_capped_by_the_cores(cores, words):
    about = ABOUT | {"majority": None, "cores": cores}
    [found] = said(*[train(wait=0.9)] * 5, about=about)
    assert words in found


def slow(rank=3, by=1.3):
    return train() | {"step_s": 0.2, "slowest_step_s": 0.2 * by, "slowest_rank": rank}


@pytest.mark.parametrize("records, is_even, applies", [
    ([slow()] * 5, True, True), ([slow(0)] * 5, True, True), ([slow()] * 4, True, False),
    ([slow(by=1.2)] * 5, True, False), ([*[slow()] * 4, slow(2)], True, False),
    ([slow()] * 5, False, False),  # with unequal shares the largest takes longest
    ([train()] * 5, True, False)])
def test_a_rank_that_is_slow_again_and_again_is_named(records, is_even, applies):
    found = said(*records, about=ABOUT | {"is_even": is_even})
    rank = records[0].get("slowest_rank")
    assert [text.partition(":")[0] for text in found] == [f"rank {rank} is slow, and the others wait for it"] * applies


def test_a_note_is_said_once_and_not_again_after_a_resume():
    records = [val(100, never=1), val(200, never=1), val(300, never=1), val(400, top1=0.1, never=1)]
    about = ABOUT | {"total_steps": 900}
    whole = said(*records, about=about)
    notes = Notes(**about)
    for record in records[:2]:
        notes.add(record)
    assert [text for record in records[2:] for text in notes.add(record)] == whole[1:]
    assert len(whole) == 2


def test_nothing_is_said_of_a_language_model_that_learns():
    evaluations = [{"split": "val", "step": step, "epoch": step / 10, "loss": 5 - step / 20, "perplexity": 9.0}
                   for step in range(10, 60, 10)]
    assert said(*evaluations, about=ABOUT | {"majority": None}) == []


@pytest.mark.parametrize("counts, applies", [([10, 100], True), ([11, 100], False), ([0, 10], True), ([5, 5], False)])
def test_imbalanced_classes_are_noted_with_their_ratio(counts, applies):
    found = imbalance(counts, ["rare", "frequent"], {})
    assert (f"frequent has {counts[1]} training samples, rare has {counts[0]}" in found) == applies
    assert ("(10 to 1)" in found) == (applies and counts[0] > 0)
    assert "--class-weights" not in found


@pytest.mark.parametrize("config, counts, applies", [
    (ImageClassificationConfig(), [1, 100], True), (TextClassificationConfig(), [1, 100], True),
    (ImageClassificationConfig(), [0, 100], False),  # for which there is no weight
    (ImageClassificationConfig(loss=ClassLossOptions(class_weights="balanced")), [1, 100], False),
    (TextClassificationConfig(loss=ClassLossOptions(class_weights="9,1")), [1, 100], False)])
def test_class_weights_are_advised_where_the_setting_is_off(config, counts, applies):
    advice = "--class-weights balanced would let every class count as much as any other"
    assert (advice in imbalance(counts, ["rare", "frequent"], settings(config))) == applies


def test_what_balanced_weights_are_said_to_do_is_true():
    labels = np.repeat([0, 1, 2], [2, 30, 400])
    weights = class_weights("balanced", ("a", "b", "c"), labels)
    totals = np.bincount(labels, weights=weights[labels])
    assert totals == pytest.approx([144, 144, 144])


@pytest.mark.parametrize("chosen, advised", [
    ({}, ["--label-smoothing", "--best loss"]), ({"label_smoothing": 0.1}, ["--best loss"]),
    ({"best": "loss"}, ["--label-smoothing"]), ({"label_smoothing": 0.1, "best": "loss"}, [])])
def test_what_is_on_already_is_not_advised(chosen, advised):
    [found] = said(val(10, loss=1.0, top1=0.7), val(20, loss=1.2), about=ABOUT | {"chosen": chosen})
    assert [flag for flag in ("--label-smoothing", "--best loss") if flag in found] == advised


def test_where_all_validation_samples_are_of_one_class_it_is_no_bar():
    assert said(val(10, top1=1.0), about=ABOUT | {"majority": 1.0}) == []


def start_of(world):
    """A start of a run whose classes are imbalanced."""
    objective = object.__new__(Classes)
    objective.class_counts = objective.eval_counts = np.array([1, 100])
    task = SimpleNamespace(objective=objective, classes=("rare", "frequent"), train_set=range(101))
    return SimpleNamespace(config=ImageClassificationConfig(), task=task, world=world)


@pytest.mark.parametrize("records", [[], [train()]])
def test_the_data_are_spoken_of_at_the_start_of_a_run_alone(world, records):
    assert len(notes_of(start_of(world), 100, True, records)[1]) == (not records)


@pytest.mark.parametrize("metric, num_train, num_val, group, found", [
    ("top1", 40, 153, None, ["how sure", "other samples"]), ("top1", 2000, 153, None, ["how sure"]),
    ("top1", 2000, 2000, None, []), ("macro_f1", 40, 153, None, ["other samples"]),
    ("top1", 40, 153, "patient", ["other samples"])])
def test_a_run_on_few_samples_says_how_sure_it_is(metric, num_train, num_val, group, found):
    """Groups are left to the report, which draws whole ones."""
    config = parse_command_line(["--data", "photos", "--model", "resnet50", "--pretrained", "--seed", "3"], {})
    config = with_values(config, {"group_column": group})
    task = SimpleNamespace(train_set=range(num_train), eval_set=range(num_val), objective=object(),
                           metrics=classification_metrics(2, np.arange(2), None, "auto"))
    t = SimpleNamespace(config=config, task=task, state=SimpleNamespace(best={"metric": metric, "value": 0.5}),
                        run=SimpleNamespace(resolved=Resolved(yardstick=0.5)))
    closing_lines = EXTRA().finished(t)
    assert [*closing_lines] == found
    if "how sure" in closing_lines:
        assert closing_lines["how sure"] == "42.17 % to 57.83 % (95 %, by 153 validation samples)"
    if "other samples" in closing_lines:
        assert closing_lines["other samples"].endswith(
            f"-m ask.folds --folds 5 --seeds 3 -- --task image-classification --data {Path('photos').absolute()}"
            f"{' --group-column patient' * bool(group)} --model resnet50 --pretrained")


def test_a_run_that_ends_below_its_yardstick_says_what_does_better(world):
    config = parse_command_line(["--task", "text-classification", "--data", "x", "--model", "FOLDER A"], {})
    task = SimpleNamespace(train_set=range(5000), eval_set=range(5000), objective=object(),
                           metrics=classification_metrics(2, np.arange(2), None, "auto"))
    t = SimpleNamespace(config=config, task=task, state=SimpleNamespace(best={"metric": "top1", "value": 0.5}),
                        run=SimpleNamespace(resolved=Resolved(yardstick=0.51)))
    [better] = EXTRA().finished(t).values()
    assert better.startswith("a linear model on frozen features: 51.00 % by 5 folds of train;")
    assert "-m models.predict --model 'FOLDER A' TABLE --embeddings" in better


@pytest.mark.parametrize("num_eval, is_said", [(10**4, False), (10**4 + 1, True)])
def test_a_best_metric_that_is_too_large_is_named_with_what_replaces_it(world, num_eval, is_said):
    objective = object.__new__(Labels)
    objective.names, objective.best = tuple(map(str, range(1000))), "micro_f1"
    task = SimpleNamespace(objective=objective, train_set=range(10**4), eval_set=range(num_eval))
    _, found = notes_of(SimpleNamespace(config=ImageClassificationConfig(), task=task, world=world), 100, True, [])
    assert [("1000 labels" in text, "--best auto is micro_f1" in text) for text in found] == [(True, True)] * is_said


@pytest.mark.parametrize("num_before", [1, 4, 5, 9])
def test_a_slow_rank_is_named_by_the_records_of_this_start_alone(world, num_before):
    """The starts before had uneven shares, say, where the largest takes longest. Waiting for data is said once."""
    notes, _ = notes_of(start_of(world), 100, True, [slow() | {"data_wait": 0.9}] * num_before)
    said_after = [notes.add(slow() | {"data_wait": 0.9}) for _ in range(6)]
    named = [any("rank 3 is slow" in text for text in texts) for texts in said_after]
    waits = [any("waiting for data" in text for text in texts) for texts in said_after]
    assert (named, sum(waits)) == ([False] * 4 + [True, False], num_before < 5)
