"""models/objectives.py: classes, several labels and numbers, beside scikit-learn and torch."""

import csv
import io
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sklearn
from torch.nn import functional as F

from models.metrics.labels import average_precisions, multi_label_metrics
from models.metrics.metric import MAX_SCORES
from models.metrics.targets import figures_of
from models.objectives import Labels, Numbers, answer, build_objective, kind_of, label_columns_of, values_of
from models.output import Output
from tests.unit.models.metrics.test_metric import batch_of
from utils.errors import UserError
from utils.settings.config import ImageClassificationConfig, TextClassificationConfig, TextRegressionConfig
from utils.settings.run_options import ClassLossOptions, LabelOptions, TargetLossOptions, TargetOptions

CLOSE = {"rel": 1e-12, "abs": 1e-12}


def spearman(x, y):
    """By pandas' definition, written out."""
    ranks = [np.array([np.mean(np.nonzero(np.sort(each) == value)[0]) for value in each]) for each in (x, y)]
    return np.corrcoef(*ranks)[0, 1]


def evaluated(objective, logits, labels, weights=None):
    """The metrics of one batch with all samples."""
    encoded = objective.encode(list(labels))
    batch = batch_of(encoded, weights)
    losses = objective.losses(logits, encoded, False)
    output = Output(losses * batch.sample_weight, logits)
    values = {}
    for metric in objective.metrics:
        values |= metric.values(metric.sums(output, batch))
    return values


@settings(max_examples=60)
@given(st.integers(2, 12), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_metrics_of_labels_are_those_of_scikit_learn(num, num_labels, seed):
    """Ties, and labels that no sample has, included."""
    generator = np.random.default_rng(seed)
    labels = (generator.random((num, num_labels)) < 0.4).astype(np.uint8)
    logits = torch.from_numpy(generator.integers(-3, 4, (num, num_labels)).astype(np.float32))
    objective = Labels(ClassLossOptions(), tuple("abcd"[:num_labels]), labels, labels)
    values, predicted = evaluated(objective, logits, labels), (logits >= 0).numpy()
    for average in ("micro", "macro"):
        expected = sklearn.f1_score(labels, predicted, average=average, zero_division=0)
        if num_labels == 1:  # scikit-learn takes one column for a binary task
            expected = sklearn.f1_score(labels[:, 0], predicted[:, 0], zero_division=0)
        assert values[f"{average}_f1"] == pytest.approx(expected, **CLOSE)
    known = labels.any(axis=0)
    expected = [sklearn.average_precision_score(labels[:, i], logits[:, i]) for i in np.nonzero(known)[0]]
    assert average_precisions(logits, torch.from_numpy(labels))[torch.from_numpy(known)].tolist() == pytest.approx(
        expected, **CLOSE)
    assert values.get("map", 0.0) == pytest.approx(np.mean(expected) if expected else 0.0, **CLOSE)
    assert values["classes"].shape == (num_labels, 4)


@settings(max_examples=60)
@given(st.integers(2, 20), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_metrics_of_numbers_are_those_of_scikit_learn_and_numpy(num, num_targets, seed):
    generator = np.random.default_rng(seed)
    targets = generator.integers(0, 5, (num, num_targets)).astype(np.float64) * 1.7
    predictions = generator.integers(0, 4, (num, num_targets)) + 0.25
    found = figures_of(targets, predictions)
    for index in range(num_targets):
        y, p, row = targets[:, index], predictions[:, index], found[index]
        assert row[0] == pytest.approx(sklearn.mean_absolute_error(y, p), **CLOSE)
        assert row[1] == pytest.approx(sklearn.root_mean_squared_error(y, p), **CLOSE)
        if np.ptp(y) == 0:
            assert np.isnan(row[2:]).all()
            continue
        assert row[2] == pytest.approx(sklearn.r2_score(y, p), **CLOSE)
        expected = [0.0, 0.0] if np.ptp(p) == 0 else [np.corrcoef(y, p)[0, 1], spearman(y, p)]
        assert row[3:].tolist() == pytest.approx(expected, **CLOSE)


def test_numbers_are_learnt_normalised_and_given_in_their_units():
    train, there = np.array([[10.0, 1e6], [30.0, 3e6]]), np.array([[20.0, 2e6], [40.0, 1e6], [0.0, 3e6]])
    objective = Numbers(TargetLossOptions(), ("a", "b"), train, there)
    assert objective.encode(list(train)).tolist() == [[-1.0, -1.0], [1.0, 1.0]]
    logits = torch.tensor([[0.5, 0.0], [1.0, -1.0], [-2.0, 1.5]])
    values = evaluated(objective, logits, there)
    assert values["targets"][:, 0].tolist() == pytest.approx([(5 + 10 + 0) / 3, 0.5e6 / 3])
    assert values["mae"] == pytest.approx(values["targets"][:, 0].mean().item())
    assert objective.sample(1, values["rows"][1].tolist()) == {
        "a": "40", "a_prediction": "30", "b": "1000000", "b_prediction": "1000000", "loss": "0.500000"}
    assert values_of(objective.described(), logits)[2].tolist() == [0.0, 3.5e6]
    assert objective.baselines()["always the mean"] == pytest.approx(np.mean([0, 0, 4, 1, 4, 1]))


@pytest.mark.parametrize("loss, function", [("l1", F.l1_loss), ("l2", F.mse_loss), ("huber", F.huber_loss)])
def test_losses_of_numbers_are_those_of_torch_a_mean_over_the_targets(loss, function):
    objective = Numbers(TargetLossOptions(loss=loss), ("a", "b"), np.array([[-1.0, -1], [1, 1]]), np.zeros((3, 2)))
    logits, labels = torch.randn(3, 2), torch.randn(3, 2)
    found = objective.losses(logits, labels, True)
    assert torch.equal(found, objective.losses(logits, labels, False))
    assert found.mean() == pytest.approx(function(logits, labels).item())


@pytest.mark.parametrize("weights", ["none", "balanced", "2,3"])
def test_the_loss_of_labels_has_weights_and_smoothing_in_training_alone(weights):
    train = np.array([[1, 0], [1, 1], [0, 0], [1, 0]], np.uint8)
    config = ClassLossOptions(label_smoothing=0.2, class_weights=weights)
    objective = Labels(config, ("a", "b"), train, train)
    logits, labels = torch.randn(4, 2), torch.from_numpy(train).float()
    given = {"none": None, "balanced": torch.tensor([1 / 3, 3.0]), "2,3": torch.tensor([2.0, 3.0])}[weights]
    expected = F.binary_cross_entropy_with_logits(logits, labels * 0.8 + 0.1, pos_weight=given)
    assert objective.losses(logits, labels, True).mean() == pytest.approx(expected.item(), rel=1e-6)
    expected = F.binary_cross_entropy_with_logits(logits, labels)
    assert objective.losses(logits, labels, False).mean() == pytest.approx(expected.item(), rel=1e-6)


def test_cross_entropy_does_not_fit_several_labels():
    config = ImageClassificationConfig(
        labels=LabelOptions(multi_label=True), loss=ClassLossOptions(loss="cross-entropy"))
    with pytest.raises(UserError, match="--loss cross-entropy is for one class of each sample; with --multi-label"):
        build_objective(config, ("a",), np.ones((1, 1), np.uint8), np.ones((1, 1), np.uint8))


@pytest.mark.parametrize("train, words", [
    ([[0.1, 1.0], [0.1, 2.0], [0.1, 3.0]], "a is the same number in all training samples"),
    ([[1e300, 1.0], [-1e300, 2.0]], "the numbers are too large for a standard deviation")])
def test_targets_that_cannot_be_learnt_are_refused(train, words):
    with pytest.raises(UserError, match=words):
        Numbers(TargetLossOptions(), ("a", "b"), np.array(train), np.zeros((2, 2)))


def test_a_model_that_is_evaluated_as_it_is_keeps_what_its_outputs_mean():
    train, there = np.array([[-1.0], [1.0]]), np.array([[20.0], [40.0]])
    for model, outputs in (({"target_mean": [30.0], "target_std": [10.0]}, [[-1.0], [1.0]]),
                           ({"problem_type": "regression"}, [[20.0], [40.0]])):
        objective = build_objective(TextRegressionConfig(), ("a",), train, there, model)
        assert evaluated(objective, torch.tensor(outputs), there)["mae"] == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("names", [{"classes": ["b", "a"]}, {"id2label": {1: "a", 0: "b"}}, {"classes": ["B", "A"]}])
def test_targets_of_a_model_in_another_order_keep_their_units(names):
    train, there = np.array([[-1.0, 5], [1, 7]]), np.array([[20.0, 300], [40, 500]])
    model = {"target_mean": [400.0, 30.0], "target_std": [100.0, 10.0], "problem_type": "regression"} | names
    objective = build_objective(TextRegressionConfig(), ("a", "b"), train, there, model)
    assert evaluated(objective, torch.tensor([[-1.0, -1], [1, 1]]), there)["mae"] == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize("config, model, words", [
    (TextRegressionConfig(), {"task": "text-classification"}, "predicts one class of each sample, and"),
    (TextClassificationConfig(), {"task": "text-classification", "multi_label": True}, "predicts several labels"),
    (TextClassificationConfig(), {"task": "text-regression", "target_mean": [0.0]}, "predicts numbers")])
def test_a_model_of_another_kind_is_not_evaluated(config, model, words):
    with pytest.raises(UserError, match=words):
        build_objective(config, ("a",), np.zeros((2, 1)), np.zeros((2, 1)), model)


def test_metrics_that_an_evaluation_set_cannot_have_are_not_offered():
    labels = np.zeros((3, 2), np.uint8)
    assert Labels(ClassLossOptions(), ("a", "b"), labels, labels).best == "micro_f1"
    numbers = Numbers(TargetLossOptions(), ("a",), np.array([[1.0], [2.0]]), np.ones((3, 1)))
    assert list(numbers.metrics[1].names) == ["mae", "rmse"]


def test_very_many_labels_and_samples_have_f1_and_no_average_precision():
    labels = np.zeros((MAX_SCORES // 100 + 1, 100), np.uint8)
    assert [list(metric.names) for metric in multi_label_metrics(labels, F.mse_loss)] == [
        ["loss"], ["micro_f1", "macro_f1"]]
    assert Labels(ClassLossOptions(), tuple(map(str, range(100))), labels, labels).best == "micro_f1"


def test_samples_that_could_not_be_read_count_nowhere():
    labels = np.array([[1, 0], [1, 1], [0, 1]], np.uint8)
    logits = torch.tensor([[5.0, -5.0], [-5.0, -5.0], [-5.0, 5.0]])
    values = evaluated(Labels(ClassLossOptions(), ("a", "b"), labels, labels), logits, labels, [1, 0, 1])
    assert (values["micro_f1"], values["map"], values["loss"]) == (1.0, 1.0, pytest.approx(0.0067, abs=1e-3))
    numbers = Numbers(TargetLossOptions(), ("a",), np.array([[-1.0], [1.0]]), np.array([[1.0], [9.0], [3.0]]))
    values = evaluated(numbers, torch.tensor([[1.0], [0.0], [3.0]]), np.array([[1.0], [9.0], [3.0]]), [1, 0, 1])
    assert (values["mae"], values["r2"], values["loss"]) == (0.0, 1.0, 0.0)


def test_equal_targets_have_errors_and_no_correlation():
    there = np.array([[0.1], [0.1], [0.1]])
    with warnings.catch_warnings(action="error"):
        assert np.isnan(figures_of(there, there + 1)[0, 2:]).all()
    objective = Numbers(TargetLossOptions(), ("a",), np.array([[-1.0], [1.0]]), there)
    values = evaluated(objective, torch.tensor([[0.1], [0.1], [1.6]]), there)
    assert values["mae"] == pytest.approx(0.5) and not {"r2", "pearson", "spearman"} & set(values)


def test_a_model_that_diverged_has_nan_as_its_error():
    there = np.array([[2.0], [3.0]])
    values = evaluated(Numbers(TargetLossOptions(), ("a",), there, there), torch.tensor([[np.nan], [1.0]]), there)
    assert np.isnan(values["mae"])


@pytest.mark.parametrize("description, values, said, by_name", [
    ({"loss": "cross-entropy"}, [0.25, 0.75], {"prediction": "b", "probability": "0.750000"},
     {"a": "0.250000", "b": "0.750000"}),
    ({"loss": "bce", "multi_label": True}, [0.5, 0.75], {"prediction": "a|b"}, {"a": "0.500000", "b": "0.750000"}),
    ({"loss": "bce", "multi_label": True}, [0.1, 0.2], {"prediction": ""}, {"a": "0.100000", "b": "0.200000"}),
    ({"target_mean": [0, 0]}, [1234567.5, -1e-7], {}, {"a": "1234568", "b": "-1e-07"})])
def test_an_answer_says_what_was_predicted_and_each_value(description, values, said, by_name):
    assert answer(description, "ab", values) == (said, by_name)


def test_label_columns_are_one_of_classes_and_several_of_numbers():
    assert (label_columns_of(LabelOptions(label_column="a,b")), kind_of(LabelOptions())) == (("a,b",), "classes")
    assert label_columns_of(TargetOptions(label_column="a, b")) == ("a", "b")
    with pytest.raises(UserError, match="has a column loss of its own"):
        label_columns_of(TargetOptions(label_column="loss"))
    assert kind_of(TargetOptions()) == "numbers" and kind_of(LabelOptions(multi_label=True)) == "labels"
    with pytest.raises(UserError, match="give each column once"):
        label_columns_of(TargetOptions(label_column="a,a"))


def test_rows_of_samples_are_csv_of_what_the_data_say_and_the_model():
    labels = np.array([[1, 0], [1, 1], [0, 0]], np.uint8)
    objective = Labels(ClassLossOptions(), ("cat", "dog"), labels, labels)
    rows = evaluated(objective, torch.tensor([[2.0, 1.0], [-1.0, 3.0], [-1.0, -2.0]]), labels)["rows"]
    file = io.StringIO()
    writer = csv.DictWriter(file, ["label", "prediction", "probability", "loss"])
    writer.writerows([objective.sample(index, row) for index, row in enumerate(rows.tolist())])
    assert file.getvalue().splitlines() == [
        "cat,cat|dog,0.880797|0.731059,0.720095", "cat|dog,dog,0.952574,0.680925", ",,,0.220095"]
