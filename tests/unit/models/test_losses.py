"""models/losses.py against torch's and scikit-learn's own, on a global batch that is cut into uneven micro-batches."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from models.losses import class_weights, weight_notes
from models.objectives import Classes, values_of
from utils.errors import Exit, UserError
from utils.settings.run_options import ClassLossOptions

CLASSES = ("a", "b", "c", "d")
LABELS = np.array([0] * 9 + [1] * 4 + [2] * 2 + [3] * 5, dtype=np.int32)
INDICES = torch.from_numpy(np.random.default_rng(0).permutation(len(LABELS))[:13])
SHARES = ((0, 5), (5, 6), (6, 13))  # micro-batches
LOGITS = torch.randn(len(LABELS), len(CLASSES), generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def loss_of(**options):
    return Classes(ClassLossOptions(**options), CLASSES, LABELS, LABELS)


def step_loss(loss, is_training=True):
    """The loss of one optimizer step over INDICES, as the loop adds it up."""
    labels = torch.from_numpy(LABELS)[INDICES].long()
    total = sum(loss.losses(LOGITS[INDICES][start:end], labels[start:end], is_training).sum() for start, end in SHARES)
    return total / loss.normalizer(INDICES)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("words", "weights"), [
    ("none", None), ("1,2,0.5,4", [1, 2, 0.5, 4]), ("balanced", [20 / (4 * n) for n in (9, 4, 2, 5)])])
def test_a_step_is_torchs_weighted_mean_over_the_global_batch(words, weights, smoothing):
    weight = None if weights is None else torch.tensor(weights, dtype=torch.float64)
    expected = F.cross_entropy(LOGITS[INDICES], torch.from_numpy(LABELS)[INDICES].long(), weight,
                               label_smoothing=smoothing)
    found = step_loss(loss_of(class_weights=words, label_smoothing=smoothing))
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)  # weights are float32


def test_balanced_weights_are_scikit_learns():
    compute = pytest.importorskip("sklearn.utils.class_weight").compute_class_weight
    expected = compute("balanced", classes=np.arange(4), y=LABELS)
    np.testing.assert_allclose(class_weights("balanced", CLASSES, LABELS).numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_bce_is_the_mean_over_classes_of_one_against_the_rest(smoothing):
    labels = torch.from_numpy(LABELS)[INDICES].long()
    p = LOGITS[INDICES].sigmoid()
    target = F.one_hot(labels, 4).double() * (1 - smoothing) + smoothing / 4  # as in timm's mixup_target
    expected = -(target * p.log() + (1 - target) * (1 - p).log()).mean(dim=1)
    found = loss_of(loss="bce", label_smoothing=smoothing).losses(LOGITS[INDICES], labels, True)
    torch.testing.assert_close(found, expected)
    weight = torch.tensor([1, 2, 0.5, 4], dtype=torch.float64)[labels]
    weighted = step_loss(loss_of(loss="bce", label_smoothing=smoothing, class_weights="1,2,0.5,4"))
    assert weighted.item() == pytest.approx(((expected * weight).sum() / weight.sum()).item(), rel=1e-12)


@pytest.mark.parametrize("loss", ["cross-entropy", "bce"])
def test_evaluation_has_neither_smoothing_nor_class_weights(loss):
    labels = torch.from_numpy(LABELS).long()
    plain, all_of_it = loss_of(loss=loss), loss_of(loss=loss, label_smoothing=0.1, class_weights="1,2,3,4")
    assert torch.equal(all_of_it.losses(LOGITS, labels, False), plain.losses(LOGITS, labels, True))
    assert not torch.equal(all_of_it.losses(LOGITS, labels, True), plain.losses(LOGITS, labels, True))


@pytest.mark.parametrize(("words", "found"), [
    ("1,2", "there are 2 weights; give each of 4 classes a positive number in the order a, b, c, d, or a=1"),
    ("1,2,3,4,5", "there are 5 weights"), ("1,2,x,4", "a positive number in the order"),
    ("Balanced", "or balanced, or none"), ("1,2,0,4", "not a positive number"), ("1,2,nan,4", "not a positive number"),
    ("", "a positive number in the order"),
    ("1,-2,3,4", "not a positive number"), ("1e40,1,1,1", "not a positive number")])
def test_weights_that_do_not_suit_the_classes_are_refused(words, found):
    with pytest.raises(UserError) as error:
        class_weights(words, CLASSES, LABELS)
    assert found in str(error.value)


@pytest.mark.parametrize("words", ["1,2,3,4", "a=1,b=2,c=3,d=4", "d=4, b=2,a=1 , c =3"])
def test_weights_by_name_are_those_in_label_order(words):
    assert class_weights(words, CLASSES, LABELS).tolist() == [1, 2, 3, 4]


def test_names_with_commas_and_equals_signs_can_have_weights():
    classes = ("a,b", "c=d", "caf\u00e9", "x y")
    assert class_weights("x y=4,cafe\u0301=3,c=d=2,a,b=1", classes, LABELS).tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("words, found", [
    ("a=1,b=2,c=3", "without a weight: d"), ("a=1,b=2,c=3,d=4,e=5", "unknown: e"),
    ("a=1,a=1,b=2,c=3,d=4", "twice there: a"), ("a=1,b=2,c=3,d", "without a name or a number: d"),
    ("a=1,b=2,c=3,d=", "without a name or a number: d="), ("a=1,b=2,c=3,d=x", "positive number"),
    ("a=1,b=2,c=3,d=0", "not a positive number"), ("=1", "without a name or a number: =1")])
def test_wrong_weights_by_name_are_refused(words, found):
    with pytest.raises(UserError) as error:
        class_weights(words, CLASSES, LABELS)
    assert error.value.code == Exit.USAGE
    assert found in str(error.value) and f"--class-weights {words}: " in str(error.value)


@pytest.mark.parametrize("words, notes", [
    ("none", []), ("balanced", []),
    ("1,2.5,3,4", ["the weights of the classes: --class-weights 0=1,1=2.5,10=3,2=4"]),
    ("2=4,10=3,1=2.5,0=1", ["the weights of the classes: --class-weights 0=1,1=2.5,10=3,2=4"]),
    ("0.1234567,1e6,3,1e-9", ["the weights of the classes: --class-weights 0=0.1234567,1=1000000,10=3,2=0.000000001"])])
def test_the_weights_that_are_given_are_shown_by_name(words, notes):
    classes = ("0", "1", "10", "2")
    assert weight_notes(words, classes, class_weights(words, classes, LABELS)) == notes


def test_balanced_needs_a_sample_of_every_class():
    with pytest.raises(UserError, match="no sample of e; add some"):
        class_weights("balanced", (*CLASSES, "e"), LABELS)


def test_probabilities_are_what_the_loss_trains():
    logits = torch.tensor([[2.0, -1.0, 0.0]])
    assert values_of({}, logits).sum().item() == pytest.approx(1)
    assert values_of({"loss": "bce"}, logits)[0].tolist() == pytest.approx([0.880797, 0.268941, 0.5], rel=1e-5)
