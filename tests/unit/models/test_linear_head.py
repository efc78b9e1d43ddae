"""The linear head: scikit-learn's minimum, the same bits again, folds that keep groups whole."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression, Ridge
from torch.nn import functional as F

from models import linear_head
from models.linear_head import FOLDS, LEAST, PENALTIES, fit_head, folds_of, is_too_much, share_right

pytestmark = pytest.mark.unit


def entropies(outputs, labels):
    return F.cross_entropy(outputs, labels, reduction="none")


def distances(outputs, labels):
    return F.mse_loss(outputs, labels, reduction="none").mean(dim=1)


def made(num_samples, num_features=12, num_classes=3, noise=1.0):
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(num_samples) % num_classes
    centres = torch.randn(num_classes, num_features, generator=generator)
    return centres[labels] + noise * torch.randn(num_samples, num_features, generator=generator) + 5, labels


@pytest.mark.parametrize("num_samples, num_features", [(90, 12), (30, 200)])
def test_the_minimum_is_that_of_scikit_learn(monkeypatch, num_samples, num_features):
    """Of logistic regression: its C is 1 / (N x L2) where features are centred and of mean square 1."""
    penalty = 1e-2
    monkeypatch.setattr(linear_head, "PENALTIES", (penalty,))
    features, labels = made(num_samples, num_features)
    head = fit_head(features, labels, 3, entropies)
    centred = features.double() - features.double().mean(dim=0)
    scale = centred.square().sum(dim=1).mean().sqrt()
    oracle = LogisticRegression(C=1 / (num_samples * penalty), tol=1e-10, max_iter=10000)
    oracle.fit((centred / scale).numpy(), labels.numpy())
    found = (features.double() @ head.weight.T + head.bias).softmax(dim=1)
    assert np.abs(found.numpy() - oracle.predict_proba((centred / scale).numpy())).max() < 1e-4


def test_numbers_are_fitted_by_ridge_regression(monkeypatch):
    monkeypatch.setattr(linear_head, "PENALTIES", (1e-2,))
    features, _ = made(60)
    targets = (features[:, :2] - 5).float()
    head = fit_head(features, targets, 2, distances)
    centred = features.double() - features.double().mean(dim=0)
    scaled = centred / centred.square().sum(dim=1).mean().sqrt()
    oracle = Ridge(alpha=60 * 1e-2).fit(scaled.numpy(), targets.double().numpy())  # the mean of two squares, halved L2
    found = features.double() @ head.weight.T + head.bias
    assert np.abs(found.numpy() - oracle.predict(scaled.numpy())).max() < 1e-4


def test_the_penalty_is_the_best_on_held_out_samples():
    """Noise needs the strongest, clear classes do not."""
    noise, labels = made(60, noise=100.0)
    clear, _ = made(60, noise=0.01)
    of_noise, of_clear = (fit_head(features, labels, 3, entropies) for features in (noise, clear))
    assert of_noise.weight.norm() < 0.1 * of_clear.weight.norm()
    assert share_right(of_clear.held_out, labels) == 1


def test_held_out_outputs_do_not_know_their_sample():
    """A label that contradicts its features is not learnt by the fold that leaves it out."""
    features, labels = made(60, noise=0.01)
    wrong = labels.clone()
    wrong[7] = (labels[7] + 1) % 3
    held_out = fit_head(features, wrong, 3, entropies).held_out
    assert int(held_out[7].argmax()) == int(labels[7])


def test_the_bits_are_the_same_again_and_with_more_threads():
    features, labels = made(80, 40)
    before = torch.get_num_threads()
    heads = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        heads.append(fit_head(features, labels, 3, entropies))
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)
    assert all(torch.equal(one, other) for one, other in zip(*heads, strict=True))


@pytest.mark.parametrize("num_samples", [1, 2, LEAST - 1])
def test_few_samples_have_no_folds_and_a_finite_head(num_samples):
    features, labels = made(num_samples)
    head = fit_head(features, labels, 3, entropies)
    assert head.held_out is None and head.weight.isfinite().all() and head.bias.isfinite().all()


def test_a_class_with_one_sample_and_equal_features_are_fitted():
    features, labels = made(20)
    labels[labels == 2] = 0
    labels[5] = 2
    assert fit_head(features, labels, 3, entropies).weight.isfinite().all()
    same = fit_head(torch.ones(20, 4), labels, 3, entropies)
    assert same.weight.isfinite().all() and same.bias.argmax() == labels.bincount().argmax()


def test_folds_spread_classes_evenly():
    labels = torch.tensor([0] * 50 + [1] * 10)
    folds = folds_of(labels)
    assert [sorted(folds[labels == label].bincount().tolist()) for label in (0, 1)] == [[10] * FOLDS, [2] * FOLDS]


def test_folds_keep_groups_whole():
    groups = np.array(["ann", "bob", "cem", "dan", "eva", "fay"]).repeat(7)
    folds = folds_of(torch.zeros(42, dtype=torch.int64), groups)
    assert all(len(folds[torch.from_numpy(groups == name)].unique()) == 1 for name in set(groups.tolist()))
    assert len(folds.unique()) == FOLDS


def test_one_group_alone_is_fitted():
    features, labels = made(30)
    head = fit_head(features, labels, 3, entropies, np.zeros(30))
    assert head.held_out is None and head.weight.isfinite().all()


@pytest.mark.parametrize("num_samples, num_features, num_outputs, expected", [
    (200, 384, 2, False), (6920, 384, 2, False), (2000, 1280, 100, True), (100, 10**9, 2, False), (2400, 4096, 2, True),
    (2000, 1280, 2, False)])
def test_arithmetic_decides_what_takes_too_long(num_samples, num_features, num_outputs, expected):
    assert is_too_much(num_samples, num_features, num_outputs) == expected


def test_penalties_fall():
    """Each fit goes on from that of a stronger one."""
    assert list(PENALTIES) == sorted(PENALTIES, reverse=True)
