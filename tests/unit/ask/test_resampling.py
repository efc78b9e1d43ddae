"""The arithmetic of cross-validation beside scikit-learn and scipy: folds, intervals, labels that are doubted."""

import math
from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold

from ask.resampling import estimate, mislabelled, partition, within


def sizes_of(folds, labels, num_folds):
    """[folds, classes]."""
    table = np.zeros((num_folds, labels.max() + 1), int)
    np.add.at(table, (folds, labels), 1)
    return table.tolist()


@given(st.lists(st.integers(0, 6), min_size=40, max_size=200), st.integers(2, 9), st.integers(0, 5))
def test_folds_have_the_sizes_of_scikit_learn(labels, num_folds, seed):
    labels = np.unique(labels, return_inverse=True)[1]
    if np.bincount(labels).max() < num_folds:
        return  # which scikit-learn refuses
    theirs = np.zeros(len(labels), int)
    with pytest.warns(UserWarning) if np.bincount(labels).min() < num_folds else nullcontext():
        for number, (_, held) in enumerate(StratifiedKFold(num_folds).split(labels, labels)):
            theirs[held] = number
    found = partition(labels, num_folds, seed)
    assert sizes_of(found, labels, num_folds) == sizes_of(theirs, labels, num_folds)


def test_folds_follow_from_the_seed_alone():
    labels = np.arange(60) % 3
    first, again, other = (partition(labels, 4, seed).tolist() for seed in (0, 0, 1))
    assert first == again != other


def test_groups_are_whole_and_folds_differ_by_a_group_at_most():
    generator = np.random.default_rng(0)
    groups = np.unique(generator.zipf(1.6, 600) % 80, return_inverse=True)[1]  # of very different sizes
    labels = groups % 3
    folds = partition(labels, 5, 0, groups)
    assert all(len(set(folds[groups == group])) == 1 for group in range(groups.max() + 1))
    table = np.array(sizes_of(folds, labels, 5))
    for label in range(3):
        assert np.ptp(table[:, label]) <= np.bincount(groups[labels == label]).max()


def imbalance(folds, labels, num_folds):
    """The standard deviation over the folds of each class's share, averaged over the classes."""
    return (np.array(sizes_of(folds, labels, num_folds)) / np.bincount(labels)).std(axis=0).mean()


@pytest.mark.parametrize("is_mixed", [False, True], ids=["one class a group", "several classes a group"])
def test_groups_are_balanced_as_by_scikit_learn(is_mixed):
    ours, theirs = [], []
    for seed in range(30):
        generator = np.random.default_rng(seed)
        sizes = generator.lognormal(1.5, 1, 60)
        groups = np.unique(generator.choice(60, 600, p=sizes / sizes.sum()), return_inverse=True)[1]
        labels = np.unique((groups + is_mixed * generator.integers(0, 2, 600)) % 3, return_inverse=True)[1]
        folds = np.zeros(600, int)
        splits = StratifiedGroupKFold(5, shuffle=True, random_state=seed).split(labels, labels, groups)
        for number, (_, held) in enumerate(splits):
            folds[held] = number
        ours.append(imbalance(partition(labels, 5, seed, groups), labels, 5))
        theirs.append(imbalance(folds, labels, 5))
    assert np.mean(ours) < 1.1 * np.mean(theirs)


def test_seeds_give_other_folds_where_all_groups_differ_in_size():
    groups = np.repeat(np.arange(40), np.arange(20, 60))
    labels = groups % 2
    found = [partition(labels, 5, seed, groups) for seed in range(3)]
    together = {tuple(map(tuple, np.equal.outer(folds, folds)[::7, ::7])) for folds in found}
    assert len(together) == 3
    for folds in found:
        assert np.ptp(np.bincount(folds)) <= 60


def test_numbers_and_sets_of_labels_are_spread_evenly():
    generator = np.random.default_rng(0)
    numbers = generator.lognormal(0, 2, (500, 2))
    folds = partition(numbers, 5, 0)
    means = [np.log(numbers[folds == number, 0]).mean() for number in range(5)]
    assert np.bincount(folds).tolist() == [100] * 5 and np.ptp(means) < 0.15  # by chance it would be about 0.5
    rare = np.zeros((100, 4), np.uint8)
    rare[:10, 3] = 1
    assert [int(rare[partition(rare, 5, 0) == number, 3].sum()) for number in range(5)] == [2] * 5
    assert sorted(partition(generator.random((3, 1)), 3, 0)) == [0, 1, 2]  # fewer than tenths


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 9, 14, 29, 150])
def test_students_t_is_that_of_scipy(freedom):
    for t in (0.0, 0.1, 1.0, 2.5, 12.0):
        assert within(t, freedom) == pytest.approx(1 - 2 * stats.t.sf(t, freedom), abs=1e-12)


@pytest.mark.parametrize("num_folds, seeds", [(2, 1), (5, 3), (10, 10)])
def test_an_interval_is_that_of_the_corrected_resampled_t_test(num_folds, seeds):
    figures = np.random.default_rng(num_folds).normal(0.8, 0.02, num_folds * seeds)
    error = figures.std(ddof=1) * math.sqrt(1 / len(figures) + 1 / (num_folds - 1))
    found = estimate(figures.tolist(), 1 / (num_folds - 1))
    low, high = stats.t.interval(0.95, len(figures) - 1, figures.mean(), error)
    assert [*found.values()][:4] == pytest.approx([figures.mean(), figures.std(ddof=1), low, high], rel=1e-4)
    moved = figures - figures.mean() + error
    assert estimate(moved.tolist(), 1 / (num_folds - 1))["p"] == pytest.approx(2 * stats.t.sf(1, len(figures) - 1))


def test_figures_that_are_all_equal_have_an_interval_of_their_own_value():
    assert [*estimate([0.5] * 4, 0.25).values()] == [0.5, 0, 0.5, 0.5, 0]
    assert estimate([0.0] * 4, 0.25)["p"] == 1


def rows_of(labels, probabilities, seed=0):
    """Rows as of RUN/eval/samples.csv. probabilities: [N, C]."""
    return [{"sample": index, "seed": seed, "input": f"{index}.png", "label": f"c{label}",
             "prediction": f"c{row.argmax()}", "probability": f"{row.max():.6f}", "loss": f"{-np.log(row[label]):.6f}"}
            for index, (label, row) in enumerate(zip(labels, probabilities, strict=True))]


def predicted(truth, noise, generator):
    """[N, 3] probabilities of a model that sees the truth through noise."""
    logits = 2.5 * np.eye(3)[truth] + generator.normal(0, noise, (len(truth), 3))
    return np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)


def test_flipped_labels_come_first():
    """5 % of 4,000 are flipped, and the model errs on a tenth of the others."""
    generator = np.random.default_rng(0)
    truth = generator.integers(0, 3, 4000)
    flipped = set(generator.choice(4000, 200, replace=False).tolist())
    labels = np.array([(label + 1) % 3 if index in flipped else label for index, label in enumerate(truth)])
    probabilities = predicted(truth, 1.2, generator)
    assert 0.05 < (probabilities.argmax(axis=1) != truth).mean() < 0.2
    found = mislabelled(rows_of(labels, probabilities))
    assert len(flipped & {row["sample"] for row in found[:100]}) >= 80
    assert [row["confidence"] for row in found] == sorted(row["confidence"] for row in found)
    assert all(row["label"] != row["prediction"] for row in found)


def test_a_label_is_doubted_at_the_threshold_of_another_class():
    """The mean probability of c1 over the samples labelled so is 0.7."""
    labels = [0, 0, 0, 1, 1]
    probabilities = np.array([[0.9, 0.1], [0.35, 0.65], [0.25, 0.75], [0.2, 0.8], [0.4, 0.6]])
    assert [row["sample"] for row in mislabelled(rows_of(labels, probabilities))] == [2]


def test_with_several_seeds_most_must_doubt_a_label():
    right, wrong = np.array([[0.9, 0.1], [0.1, 0.9]]), np.array([[0.05, 0.95], [0.1, 0.9]])
    def found(*seeds):
        rows = [row for seed, each in enumerate(seeds) for row in rows_of([0, 1], each, seed)]
        return [row["sample"] for row in mislabelled(rows)]
    assert (found(wrong, wrong, right), found(wrong, right, right), found(wrong, right)) == ([0], [], [])


def test_what_could_not_be_read_is_not_doubted():
    rows = rows_of([0, 1], np.array([[0.1, 0.9], [0.2, 0.8]]))
    rows.append(rows[0] | {"sample": 2, "prediction": "", "probability": "", "loss": ""})
    assert [row["sample"] for row in mislabelled(rows)] == [0]
    assert mislabelled([]) == []
