"""models/metrics/classes.py: sums whose digits do not depend on who added them."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from models.metrics.classes import classification_metrics
from models.metrics.metric import Metric, Totals
from utils.errors import Exit, UserError


def batch_of(labels, weight=None, indices=None):
    return SimpleNamespace(labels=torch.tensor(labels), indices=range(len(labels)) if indices is None else indices,
                           sample_weight=torch.tensor(weight if weight is not None else [1.0] * len(labels)))


def output_of(predictions, num_classes, loss_sum=0.0):
    return SimpleNamespace(logits=torch.eye(num_classes)[predictions], loss_sum=torch.tensor(loss_sum))


def metrics_of(num_classes):
    """The metrics of classification; each sample's own loss is 0."""
    def losses(logits, labels, is_training):
        return torch.zeros(len(logits))

    return classification_metrics(num_classes, np.arange(num_classes), losses, "auto")


def values_of(world, num_classes, *batches):
    """batches: (number, output, batch)."""
    num_samples = 1 + max(batch.indices[-1] for _, _, batch in batches)
    totals = Totals(metrics_of(num_classes), 1 + max(number for number, _, _ in batches), num_samples)
    for each in batches:
        totals.add(*each)
    return totals.values(world)


ONE_SAMPLE = SimpleNamespace(sample_weight=torch.ones(1))
FLOATS = Metric(lambda output, batch: torch.tensor([output], dtype=torch.float64), lambda sums: {"sum": float(sums[0])},
                is_count=False)


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]])
def test_float_sums_are_added_in_batch_order(world, order):
    """Float sums are added in batch order whatever the order of computing."""
    values = [1e16, 1.0, -1e16, 1.0]  # another order gives another sum
    totals = Totals([FLOATS], num_batches=4)
    for number in order:
        totals.add(number, values[number], ONE_SAMPLE)
    assert totals.values(world) == {"sum": ((values[0] + values[1]) + values[2]) + values[3]}


def test_float_sums_are_those_of_python_to_the_last_digit(world):
    values = torch.rand(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).tolist()
    totals = Totals([FLOATS], num_batches=1000)
    for number, value in enumerate(values):
        totals.add(number, value, ONE_SAMPLE)
    expected = 0.0
    for value in values:
        expected += value
    assert totals.values(world) == {"sum": expected}  # torch.sum adds in another order


def test_a_surplus_batch_adds_nothing(world):
    metrics = metrics_of(3)
    plain, padded = Totals(metrics, 1, 2), Totals(metrics, 1, 2)
    for totals in (plain, padded):
        totals.add(0, output_of([0, 1], 3, 5.0), batch_of([0, 2]))
    padded.add(1, output_of([0, 1], 3, 0.0), batch_of([0, 2], [0.0, 0.0], indices=()))
    assert str(padded.values(world)) == str(plain.values(world))


def test_samples_of_weight_zero_leave_all_sums(world):
    torch.manual_seed(0)
    logits, labels = torch.randn(8, 7), torch.randint(7, (8,))
    counts = torch.tensor([1.0, 1, 0, 1, 0, 0, 1, 1])
    kept = counts > 0

    def values(chosen):
        output = SimpleNamespace(logits=logits[chosen], loss_sum=torch.tensor(3.0))
        found = values_of(world, 7, (0, output, batch_of(labels[chosen].tolist(), counts[chosen].tolist())))
        return {name: value for name, value in found.items() if name != "rows"}

    assert str(values(slice(None))) == str(values(kept))


def test_the_loss_is_the_mean_over_the_weight(world):
    batches = [(0, output_of([0, 0], 2, 3.0), batch_of([0, 0])),
               (1, output_of([0, 0], 2, 0.5), batch_of([0, 0], [1.0, 0.0]))]
    assert values_of(world, 2, *batches)["loss"] == 3.5 / 3


def test_top1_is_the_share_of_right_predictions(world):
    assert values_of(world, 3, (0, output_of([0, 1, 2, 2], 3), batch_of([0, 1, 1, 2])))["top1"] == 3 / 4


def test_macro_f1_is_the_mean_over_classes_as_by_hand(world):
    true, predicted = [0, 0, 0, 1, 1, 2], [0, 0, 1, 1, 2, 2]
    # class 0: precision 2/2, recall 2/3, F1 4/5; class 1: 1/2, 1/2, F1 1/2; class 2: 1/2, 1/1, F1 2/3
    macro_f1 = values_of(world, 3, (0, output_of(predicted, 3), batch_of(true)))["macro_f1"]
    # one rounding of each of a few float64 operations
    assert macro_f1 == pytest.approx((4 / 5 + 1 / 2 + 2 / 3) / 3, abs=1e-15)


def test_an_absent_class_does_not_lower_macro_f1(world):
    """A class that neither occurs nor is predicted does not lower macro f1."""
    assert values_of(world, 9, (0, output_of([0, 1], 9), batch_of([0, 1])))["macro_f1"] == 1.0


def test_a_class_that_is_only_predicted_lowers_macro_f1(world):
    macro_f1 = values_of(world, 9, (0, output_of([0, 1, 2], 9), batch_of([0, 1, 1])))["macro_f1"]
    assert macro_f1 == pytest.approx((1 + 2 / 3 + 0) / 3, abs=1e-15)  # as above


def test_top5_counts_a_label_among_the_five_highest(world):
    logits = torch.tensor([[7.0, 6, 5, 4, 3, 2, 1]] * 7)
    output, labels = SimpleNamespace(logits=logits, loss_sum=torch.tensor(0.0)), list(range(7))
    assert values_of(world, 7, (0, output, batch_of(labels)))["top5"] == 5 / 7


@pytest.mark.parametrize("num_classes, expected", [(5, False), (6, True)])
def test_there_is_a_top5_above_five_classes(world, num_classes, expected):
    assert ("top5" in values_of(world, num_classes, (0, output_of([0], num_classes), batch_of([0])))) == expected


def test_very_many_classes_have_their_figures(world):
    values = values_of(world, 100_000, (0, output_of_few([0, 2, 2], 100_000), batch_of([0, 2, 1])))
    assert (values["top1"], values["macro_f1"]) == (2 / 3, pytest.approx((1 + 0 + 2 / 3) / 3, abs=1e-15))


def output_of_few(predictions, num_classes):
    """As output_of, without the num_classes x num_classes identity."""
    logits = torch.zeros(len(predictions), num_classes)
    logits[range(len(predictions)), predictions] = 1.0
    return SimpleNamespace(logits=logits, loss_sum=torch.tensor(0.0))


def test_nothing_but_weight_zero_is_bad_data(world):
    with pytest.raises(UserError, match="no sample of the evaluation set could be read") as refused:
        values_of(world, 6, (0, output_of([0], 6), batch_of([0], [0.0])))
    assert refused.value.code == Exit.BAD_DATA


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_divergence(world, loss):
    with pytest.raises(UserError, match=f"loss is {loss}: the model diverged") as refused:
        values_of(world, 6, (0, output_of([0], 6, loss), batch_of([0])))
    assert refused.value.code == Exit.DIVERGED
