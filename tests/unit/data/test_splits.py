"""data/splits.py: the share of train that is held out, where nothing is there for validation."""

import random
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data.splits import ClassNames, ValSplit, held_out, hold_out, require_classes, require_no_targets, select
from data.texts.text_set import TokenTable
from tests.harness.mapped import is_mapped
from utils.errors import Exit, UserError

LABELS = st.lists(st.integers(0, 6), max_size=200).map(lambda labels: np.array(labels, dtype=np.int32))
FRACTIONS = st.floats(0.001, 0.999)


@given(LABELS, FRACTIONS, st.integers(0, 2**32))
def test_the_same_share_is_held_out_each_time_whatever_was_drawn_before(labels, fraction, seed):
    masks = []
    for state in (0, 1):
        np.random.seed(state)
        torch.manual_seed(state)
        random.seed(state)
        masks.append(held_out(labels, fraction, seed).tolist())
    assert masks[0] == masks[1]


@given(LABELS, FRACTIONS, st.integers(0, 9))
def test_each_class_gives_at_least_one_where_it_has_two_and_never_all(labels, fraction, seed):
    held = held_out(labels, fraction, seed)
    counts = [(int((labels == label).sum()), int(held[labels == label].sum())) for label in np.unique(labels)]
    assert (held.dtype, held.shape) == (np.bool_, labels.shape)
    assert [count for count in counts if not min(1, count[0] - 1) <= count[1] <= max(0, count[0] - 1)] == []


@given(LABELS, FRACTIONS, st.integers(0, 9))
def test_the_share_of_each_class_is_the_fraction_to_the_nearest_sample(labels, fraction, seed):
    held = held_out(labels, fraction, seed)
    sizes = {label: int((labels == label).sum()) for label in np.unique(labels)}
    off = {label: held[labels == label].sum() - size * fraction for label,
           size in sizes.items() if 1 <= size * fraction <= size - 1}
    assert [label for label, difference in off.items() if abs(difference) > 0.5 + 1e-9] == []


@given(LABELS, FRACTIONS, st.randoms(use_true_random=False))
def test_the_order_of_labels_does_not_change_what_is_held_out(labels, fraction, shuffler):
    """The order of labels does not change how many of a class are held out."""
    order = list(range(len(labels)))
    shuffler.shuffle(order)
    shuffled = labels[order]
    held = [np.bincount(each[held_out(each, fraction, 0)], minlength=7).tolist() for each in (labels, shuffled)]
    assert held[0] == held[1]


@pytest.mark.parametrize("count, fraction, expected", [
    (1, 0.1, 0), (1, 0.9, 0), (2, 0.1, 1), (2, 0.9, 1), (3, 0.999, 2), (10, 0.1, 1), (100, 0.1, 10), (1000, 0.25, 250),
    (10, 0.99, 9)])
def test_so_many_of_a_class_are_held_out(count, fraction, expected):
    assert held_out(np.zeros(count, dtype=np.int64), fraction, 0).sum() == expected


def test_each_seed_holds_out_others_from_anywhere_in_the_class():
    masks = np.stack([held_out(np.zeros(20, dtype=np.int64), 0.25, seed) for seed in range(60)])
    assert len({tuple(mask) for mask in masks}) > 50 and masks.any(axis=0).all()


def test_a_label_without_samples_does_not_matter():
    labels = np.array([5, 0, 5, 5, 0, 0])
    held = held_out(labels, 0.34, 0)
    assert np.bincount(labels[held], minlength=6).tolist() == [1, 0, 0, 0, 0, 1]


# --- the splits that come of it


def table_of(labels):
    """Sample i is the token i alone."""
    places = np.arange(len(labels))
    return TokenTable(places.astype(np.uint16), np.zeros(0, np.uint8), np.stack([places, places + 1], axis=1),
                      np.array(labels), places,
                      places, np.ones(len(labels), np.int32))


def tokens(table):
    return [int(table.sample(i).ids[0]) for i in range(len(table))]


def test_val_is_taken_out_of_train_and_other_splits_stay(tmp_path):
    labels = np.array([0, 1, 0, 1, 1, 0, 0, 1, 2, 0])
    given = {"train": table_of(labels), "test": table_of([0, 1])}
    splits, _ = hold_out(given, ValSplit(0.4, 3), "reviews", tmp_path / "new")
    held = held_out(labels, 0.4, 3)
    assert (tokens(splits["train"]), tokens(splits["val"])) == (np.flatnonzero(~held).tolist(),
                                                                np.flatnonzero(held).tolist())
    assert (splits["train"].labels.tolist(), splits["val"].labels.tolist()) == (labels[~held].tolist(),
                                                                                labels[held].tolist())
    assert splits["test"] is given["test"] and set(given) == {"train", "test"} and len(given["train"]) == 10


@pytest.mark.parametrize("labels, is_refused", [
    ([str(number / 7) for number in range(40)], True), (["1e3", "-2", *map(str, range(5, 20))], True),
    (list(map(str, range(10))), False),  # few: digits, say
    (["1", "2"] * 20, False), ([f"id {number}" for number in range(40)], False),
    (["nan", *map(str, range(40))], False)])
def test_numbers_nearly_all_different_are_no_classes(labels, is_refused):
    found = ""
    try:
        require_no_targets(Counter(labels), "the column price", "give another")
    except UserError as error:
        assert error.code == Exit.BAD_DATA
        found = str(error)
    assert is_refused == ("different numbers" in found and "looks like regression" in found)


def test_what_is_held_out_is_noted(tmp_path):
    assert hold_out({"train": table_of([0] * 10 + [1] * 30)}, ValSplit(0.2, 0), "reviews", tmp_path / "new")[1] == (
        "there is no val: 8 of the 40 training samples are held out (--val-fraction 0.2)")


@pytest.mark.parametrize("labels, fraction, code, message", [
    ([0, 0, 1, 1], 0.0, Exit.USAGE,
     "--val-fraction 0.0: reviews has no val (nor valid, validation, test), so a share of train must be held"
     " out; give more than 0, or add val"),
    ([2, 0, 1], 0.5, Exit.BAD_DATA,
     "--data reviews: every class has one sample: none can be held out; add samples, or val")])
def test_where_none_can_be_held_out_the_way_out_is_named(labels, fraction, code, message, tmp_path):
    with pytest.raises(UserError) as error:
        hold_out({"train": table_of(labels)}, ValSplit(fraction, 0), "reviews", tmp_path / "new")
    assert (error.value.code, str(error.value)) == (code, message)


def test_the_pieces_of_a_text_are_held_out_together(tmp_path):
    texts = np.repeat(np.arange(20), 3)  # three of each
    splits, _ = hold_out({"train": table_of([0] * 60)}, ValSplit(0.2, 0), "corpus.txt", tmp_path / "new", texts)
    held = splits["val"].num_ordinary // 3  # the text that a sample is cut from: table_of numbers the samples there
    assert len(set(held)) == 4 and len(held) == 12 and not set(held) & set(splits["train"].num_ordinary // 3)


def test_one_text_alone_cannot_be_held_out(tmp_path):
    with pytest.raises(UserError, match="belong to one text or group: none can be held out") as error:
        hold_out({"train": table_of([0] * 9)}, ValSplit(0.2, 0), "corpus.txt", tmp_path / "new", np.zeros(9, int))
    assert error.value.code == 65


# --- labels that are no classes


@pytest.mark.parametrize("num_single, num_more, is_refused", [
    (1000, 0, False), (1001, 0, True), (901, 100, True), (909, 101, False), (900, 100, False), (90_000, 10_000, False),
    (90_001, 9_999, True)])
def test_more_than_1000_classes_nearly_all_with_one_sample_are_ids(num_single, num_more, is_refused):
    counts = np.array([1] * num_single + [2] * num_more)
    if not is_refused:
        require_classes(counts, "it", "mend it")
        return
    expected = f"^it has {num_single + num_more} classes that .*: {num_single} have .*; mend it$"
    with pytest.raises(UserError, match=expected) as error:
        require_classes(counts, "it", "mend it")
    assert error.value.code == Exit.BAD_DATA


# --- chosen samples


@pytest.mark.parametrize("chosen, expected", [
    (np.array([True, False, True, False]), [0, 2]), (np.array([3, 0, 0]), [3, 0, 0]), (np.zeros(4, dtype=bool), [])])
@pytest.mark.parametrize("cache", ["cache", "/proc/nowhere"], ids=["kept", "in memory"])
def test_chosen_samples_are_those_of_a_mask_or_of_indices_in_their_order(chosen, expected, cache, tmp_path):
    for _ in range(2):  # made, then read
        found = select(table_of([5, 6, 7, 8]), lambda: {"some": chosen, "none": np.zeros(4, bool)}, tmp_path / cache)
        assert list(found) == ["some", "none"] and tokens(found["some"]) == expected and len(found["none"]) == 0
        assert found["some"].labels.tolist() == [5 + i for i in expected]


def test_what_is_kept_is_chosen_once_and_mapped(tmp_path):
    choices = iter([{"some": np.array([2, 0])}])
    for _ in range(2):
        found = select(table_of([0, 1, 2]), lambda: next(choices), tmp_path / "new")["some"]
    assert tokens(found) == [2, 0] and is_mapped(found.spans) and is_mapped(found.labels)


@pytest.mark.parametrize("name", ["0e462097431906509019562988736854", "1e-99999999999999999999", "1_0"])
def test_a_name_that_is_almost_a_number_is_a_word(name):
    names = ClassNames()
    assert [names.name_of(each) for each in (name, "cat")] == [name, "cat"] and names.notes == []
