"""The intervals of a report hold the truth as often as they say; the calibration is that of its definition."""

import numpy as np
import pytest
import torch

from extras.report import certainty
from extras.report.certainty import calibration, intervals
from models.metrics.classes import class_values
from models.metrics.metric import share_interval

pytestmark = pytest.mark.unit


def test_many_samples_and_targets_get_fewer_resamples():
    assert [certainty.num_resamples(count, cost) for count, cost in ((2_500, 4), (10_000, 20), (100_000, 12))] == [
        1000, 50, 30]


def coverage(draw, truth, sets=1000):
    """The share of simulated sets whose interval holds the truth. draw(rng): the interval of one set."""
    rng = np.random.default_rng(1)
    found = [draw(rng) for _ in range(sets)]
    return np.mean([low <= truth <= high for low, high in found])


@pytest.mark.long
def test_intervals_of_a_loss_cover_the_truth(monkeypatch):
    monkeypatch.setattr(certainty, "MOST", 200)

    def draw(rng):
        losses = rng.gamma(2, 0.3, size=300)
        return intervals(300, lambda times: {"loss": float(times @ losses) / 300})["loss"]

    assert 0.93 <= coverage(draw, truth=0.6) <= 0.97


@pytest.mark.long
def test_intervals_of_macro_f1_cover_the_truth(monkeypatch):
    """Of three classes, one of which is rare; the truth is macro_f1 of the distribution itself."""
    monkeypatch.setattr(certainty, "MOST", 200)
    chances = np.array([[0.40, 0.05, 0.05], [0.06, 0.22, 0.02], [0.04, 0.03, 0.13]])  # true class, predicted class

    def macro_f1(counts):
        counts = counts.reshape(3, 3)
        sums = torch.from_numpy(np.stack([counts.diagonal(), counts.sum(1), counts.sum(0)]))
        return class_values(sums)["macro_f1"]

    def draw(rng):
        cells = rng.choice(9, size=300, p=chances.ravel())
        return intervals(300, lambda times: {"macro_f1": macro_f1(np.bincount(cells, times, 9))})["macro_f1"]

    assert 0.93 <= coverage(draw, macro_f1(chances * 300), sets=200) <= 0.97


@pytest.mark.long
def test_intervals_of_groups_cover_the_truth_where_those_of_samples_do_not(monkeypatch):
    """40 patients of 10 photos each: what one is like decides all of its photos."""
    monkeypatch.setattr(certainty, "MOST", 200)
    groups = np.repeat(np.arange(40), 10)

    def draw(rng, groups_drawn):
        right = rng.random(400) < rng.beta(4, 2, size=40)[groups]
        return intervals(400, lambda times: {"top1": float(times @ right) / times.sum()}, groups=groups_drawn)["top1"]

    assert coverage(lambda rng: draw(rng, groups), truth=2 / 3, sets=300) >= 0.91
    assert coverage(lambda rng: draw(rng, None), truth=2 / 3, sets=300) <= 0.85


def test_few_resamples_of_very_many_samples_cover_the_truth(monkeypatch):
    monkeypatch.setattr(certainty, "MOST", certainty.FEWEST)

    def draw(rng):
        losses = rng.gamma(2, 0.3, size=1000)
        return intervals(1000, lambda times: {"loss": float(times @ losses) / 1000})["loss"]

    assert 0.93 <= coverage(draw, truth=0.6) <= 0.97


@pytest.mark.parametrize("truth", [0.6, 0.9, 0.98])
def test_intervals_of_a_share_cover_the_truth(truth):
    assert 0.93 <= coverage(lambda rng: share_interval(rng.binomial(500, truth) / 500, 500), truth) <= 0.97


def test_a_share_of_all_has_an_interval_below_it():
    low, high = share_interval(1.0, 100)
    assert 0.96 < low < 0.97 and high == pytest.approx(1)


@pytest.mark.parametrize("count", [50, 1000])
def test_right_probabilities_have_the_error_that_is_shown_beside_it(count):
    rng, found = np.random.default_rng(3), []
    for _ in range(40):
        chances = rng.uniform(0.5, 1, count)
        found.append(calibration(chances, rng.random(count) < chances))
    errors, shown = np.array([(each["error"], each["perfect"]) for each in found]).T
    assert errors.mean() == pytest.approx(shown.mean(), rel=0.1)
    assert shown.mean() > 0.09 if count == 50 else 0.015 < shown.mean() < 0.03


def test_the_calibration_error_is_that_of_its_definition():
    probabilities = np.array([0.95] * 50 + [0.65] * 50)
    found = calibration(probabilities, np.arange(100) % 50 < 40)  # four of five are right in both bins
    assert found["error"] == pytest.approx((0.15 + 0.15) / 2)
    assert [[pytest.approx(each) for each in point] for point in ([0.65, 0.8], [0.95, 0.8])] == found["points"]
