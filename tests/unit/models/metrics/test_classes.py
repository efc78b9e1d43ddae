"""models/metrics/classes.py: averages over classes, AUROC and rows by sample, held against scikit-learn."""

from types import SimpleNamespace

import numpy as np
import pytest
import sklearn.metrics
import torch

from models.metrics import classes as metrics
from models.metrics.classes import auroc_by_class
from models.metrics.metric import Totals
from models.objectives import Classes
from models.objectives import values_of as values_of_outputs
from utils.settings.run_options import ClassLossOptions

BATCH = 7  # divides no number of samples here


def objective_of(logits, labels, loss="auto"):
    names = tuple(map(str, range(logits.shape[1])))
    return Classes(ClassLossOptions(loss=loss), names, np.zeros(0, np.int32), labels.numpy())


def values_of(world, logits, labels, weight=None, loss="auto"):
    """An evaluation in batches of BATCH samples, the last one first."""
    num_samples, weight = len(labels), torch.ones(len(labels)) if weight is None else weight
    objective = objective_of(logits, labels, loss)
    totals = Totals(objective.metrics, -(-num_samples // BATCH), num_samples)
    losses = objective.losses(logits, labels, False) * weight
    for index in reversed(range(-(-num_samples // BATCH))):
        indices = tuple(range(index * BATCH, min(index * BATCH + BATCH, num_samples)))
        chosen = slice(indices[0], indices[-1] + 1)
        batch = SimpleNamespace(labels=labels[chosen], sample_weight=weight[chosen], indices=indices)
        totals.add(index, SimpleNamespace(logits=logits[chosen], loss_sum=losses[chosen].sum()), batch)
    return totals.values(world)


def a_case(seed):
    """Logits with many ties, and labels that leave classes out."""
    generator = torch.Generator().manual_seed(seed)
    num_classes = int(torch.randint(2, 9, (), generator=generator))
    num_samples = int(torch.randint(2, 60, (), generator=generator))
    logits = torch.randint(-2, 3, (num_samples, num_classes), generator=generator) / 2
    occurring = torch.randperm(num_classes, generator=generator)[:1 + seed % num_classes]
    return logits, occurring[torch.randint(len(occurring), (num_samples,), generator=generator)]


@pytest.mark.parametrize("seed", range(60))
def test_class_figures_and_averages_equal_scikit_learn(world, seed):
    logits, labels = a_case(seed)
    predicted, found = logits.argmax(1).numpy(), values_of(world, logits, labels)
    of_classes = sklearn.metrics.precision_recall_fscore_support(
        labels.numpy(), predicted, labels=range(logits.shape[1]), zero_division=0)
    assert np.allclose(found["classes"].T.numpy(), of_classes, rtol=0, atol=1e-12)
    for average in ("macro", "weighted"):
        expected = sklearn.metrics.precision_recall_fscore_support(
            labels.numpy(), predicted, average=average, zero_division=0)
        names = [f"{average}_{name}" for name in ("precision", "recall", "f1")]
        assert [found[name] for name in names] == pytest.approx(expected[:3], abs=1e-12)


@pytest.mark.parametrize("loss", ["cross-entropy", "bce"])
@pytest.mark.parametrize("seed", range(60))
def test_auroc_equals_scikit_learn_with_ties_and_absent_classes(world, seed, loss):
    """On the probabilities that models.predict gives. Of two classes it is that of the second."""
    logits, labels = a_case(seed)
    scores, is_binary = values_of_outputs({"loss": loss}, logits), logits.shape[1] == 2
    expected = [
        sklearn.metrics.roc_auc_score(labels.numpy() == place, scores[:, place])
        for label in range(logits.shape[1]) if label in labels and len(labels.unique()) > 1
        for place in [1 if is_binary else label]]
    found = values_of(world, logits, labels, loss=loss)
    if not expected:
        assert "auroc" not in found
        return
    aurocs = found["class_auroc"].numpy()
    assert aurocs[~np.isnan(aurocs)] == pytest.approx(expected, abs=1e-12)
    assert found["auroc"] == pytest.approx(np.mean(expected), abs=1e-12)
    assert set(np.flatnonzero(~np.isnan(aurocs))) == set(labels.tolist())


def test_auroc_of_two_classes_is_that_of_the_second(world):
    logits, labels = torch.tensor([[0.0, 40.0], [0.0, 41.0], [0.0, 1.0], [0.0, 2.0]]), torch.tensor([1, 1, 0, 0])
    found = values_of(world, logits, labels)
    assert (found["auroc"], found["class_auroc"].tolist()) == (1.0, [1.0, 1.0])


def test_a_tie_counts_half():
    probabilities = torch.tensor([[0.5, 0.5], [0.5, 0.5]], dtype=torch.float64)
    assert auroc_by_class(probabilities, torch.tensor([0, 1])).tolist() == [0.5, 0.5]


def test_auroc_is_left_out_above_a_number_of_scores(world, monkeypatch):
    logits, labels = torch.randn(10, 3), torch.arange(10) % 3
    monkeypatch.setattr(metrics, "MAX_SCORES", 30)
    assert "auroc" in values_of(world, logits, labels)
    monkeypatch.setattr(metrics, "MAX_SCORES", 29)
    found = values_of(world, logits, labels)
    assert "auroc" not in found
    assert found["rows"].shape == (10, 6)


@pytest.mark.parametrize("loss", ["cross-entropy", "bce"])
def test_a_row_of_a_sample_holds_label_prediction_probability_and_loss(world, loss):
    logits, labels = torch.randn(20, 4, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 4
    weight = torch.ones(20)
    weight[3] = 0
    found = values_of(world, logits, labels, weight, loss)["rows"]
    probabilities = torch.from_numpy(values_of_outputs({"loss": loss}, logits)).float()
    assert found[:, 0].tolist() == weight.tolist()
    assert found[:, 1].tolist() == labels.tolist()
    assert found[:, 2].tolist() == logits.argmax(1).tolist()
    torch.testing.assert_close(found[:, 4], probabilities.max(1).values)
    if loss == "bce":
        expected = [sklearn.metrics.log_loss([1, 0, 0, 0], [row[label], *np.delete(row, label)])
                    for row, label in zip(probabilities.numpy(), labels, strict=True)]
    else:
        expected = -probabilities[range(20), labels].log()
    torch.testing.assert_close(found[:, 5], torch.as_tensor(expected).float())


def test_an_unreadable_sample_has_no_part_in_auroc(world):
    logits, labels = torch.randn(20, 4, generator=torch.Generator().manual_seed(1)), torch.arange(20) % 4
    weight = torch.ones(20)
    weight[[0, 5]] = 0
    assert values_of(world, logits, labels, weight)["auroc"] == values_of(
        world, logits[weight > 0], labels[weight > 0])["auroc"]


def test_every_number_of_an_evaluation_can_be_named_by_best(world):
    logits, labels = torch.randn(20, 7), torch.arange(20) % 7
    numbers = {name for name, value in values_of(world, logits, labels).items() if isinstance(value, float)}
    assert {name for metric in objective_of(logits, labels).metrics for name in metric.names} == numbers
