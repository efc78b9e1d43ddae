"""data/labels.py: what a label may be, and how labels are encoded."""

import unicodedata

import numpy as np
import pytest

from data.labels import CLASSES, LABELS, NUMBERS, LabelReader, label_at, lacking, outputs_for, require_labels
from utils.errors import Exit, UserError


def encoded(kind, columns, **splits):
    reader = LabelReader(kind, columns)
    for split, rows in splits.items():
        for cells in rows:
            assert reader.problem(cells, split == "train") == ""
            reader.add(split, cells)
    return reader.encoded()


def test_classes_are_numbered_in_their_order_and_not_that_of_the_rows():
    names, arrays = encoded(CLASSES, ["y"], train=[("10",), ("9",), ("10",), ("b",)][:3], val=[("9",)])
    assert names == ("9", "10")
    assert {split: (array.tolist(), array.dtype) for split, array in arrays.items()} == {
        "train": ([1, 0, 1], np.int32), "val": ([0], np.int32)}


def test_several_labels_are_yes_or_no_each():
    names, arrays = encoded(LABELS, ["y"], train=[("b | a",), ("",), ("c|c",), ("a",)], val=[("c|b",), ("",)])
    assert names == ("a", "b", "c")
    assert arrays["train"].tolist() == [[1, 1, 0], [0, 0, 0], [0, 0, 1], [1, 0, 0]]
    assert arrays["val"].tolist() == [[0, 1, 1], [0, 0, 0]]
    assert arrays["val"].dtype == np.uint8


def test_numbers_keep_all_their_digits():
    names, arrays = encoded(NUMBERS, ["weight", "age"], train=[("1e3", "-0.1"), ("7", "123456789.123456789")])
    assert names == ("weight", "age")
    assert arrays["train"].tolist() == [[1000.0, -0.1], [7.0, 123456789.123456789]]


@pytest.mark.parametrize("kind, cells, problem", [
    (CLASSES, ("",), "y is empty"), (CLASSES, ("c",), "the label c does not occur in train, which has a, b"),
    (LABELS, ("a|c",), "the label c does not occur in train, which has a, b"),
    (NUMBERS, ("tall",), "y is tall, which is not a finite number"),
    (NUMBERS, ("",), "y is empty, which is not a finite number"),
    (NUMBERS, ("nan",), "y is nan, which is not a finite number"),
    (NUMBERS, ("1_0",), "y is 1_0, which is not a finite number"),
    (NUMBERS, ("-inf",), "y is -inf, which is not a finite number")])
def test_what_cannot_be_a_label_is_named(kind, cells, problem):
    assert LabelReader(kind, ["y"], known=["b", "a"]).problem(cells, is_train=False) == problem


@pytest.mark.parametrize("kind, rows, words", [
    (CLASSES, [("a|b",), ("c",)], "holds a|b: | separates the labels"),
    (CLASSES, [(f"{number}.5",) for number in range(50)], "this looks like regression"),
    (LABELS, [(f"id{number}|x",) for number in range(2000)], "look like ids")])
def test_labels_of_another_kind_are_refused(kind, rows, words):
    with pytest.raises(UserError) as error:
        require_labels(kind, rows, "the column y")
    assert words in str(error.value) and error.value.code == Exit.BAD_DATA


def test_classes_without_a_sample_in_a_split_are_noted():
    """Of regression there is nothing to say."""
    names = ("a", "b", "c")
    for labels, what in (
            (np.array([2, 0, 2], np.int32), "class"), (np.array([[1, 0, 0], [0, 0, 1]], np.uint8), "label")):
        [note] = lacking(names, labels, "test")
        assert "test has no sample of b," in note and note.endswith(f" 1 {what}")
    assert lacking(names, np.array([2, 0, 1], np.int32), "val") == []
    assert lacking(names, np.zeros((4, 3)), "val") == []


def test_a_label_is_a_class_or_a_row():
    assert label_at(np.array([3, 4], np.int32), 1) == 4
    assert label_at(np.array([[1.5, 2.5], [3.5, 4.5]]), 1).tolist() == [3.5, 4.5]


SAME = ["café", "cafe\u0301", " café ", "café\u200b", "\ufeffcafé", "caf\u2060é", "café\u200d"]  # and nobody can see it


def test_names_that_nobody_can_tell_apart_are_one_class():
    rows = [(name,) for name in (*SAME, "tea")]
    reader = LabelReader(CLASSES, ["y"])
    for split in ("train", "val"):
        for cells in rows:
            assert reader.problem(cells, split == "train") == ""
            reader.add(split, cells)
    names, arrays = reader.encoded()
    assert names == ("café", "tea") and arrays["val"].tolist() == [0] * len(SAME) + [1]
    [note] = reader.names.notes
    assert "one class" in note and r"'cafe\u0301'" in note and r"'caf\xe9\u200b'" in note


def test_several_labels_are_told_apart_in_the_same_way():
    names, arrays = encoded(LABELS, ["y"], train=[("cafe\u0301|tea",), ("caf\u00e9\u200b| tea",), ("\u200b",)])
    assert names == ("café", "tea") and arrays["train"].tolist() == [[1, 1], [1, 1], [0, 0]]


@pytest.mark.parametrize("pair", [
    ("0", "0.0"), ("1", "01"), ("Pos", "pos"), ("a b", "a  b"), ("a b", "a\xa0b"), ("ﬁn", "fin"),
    ("\u0645\u200c\u0646", "\u0645\u0646"), ("1e3", "1000"), ("straße", "STRASSE")])
def test_names_that_look_alike_stay_classes_and_are_named(pair):
    reader = LabelReader(CLASSES, ["y"])
    for name in (*pair, "other", "7"):
        reader.add("train", (name,))
    assert set(reader.encoded()[0]) == {*pair, "other", "7"}
    [note] = reader.names.notes
    assert " and ".join(sorted(map(repr, pair))) in note and "other" not in note


@pytest.mark.parametrize("names", [["1", "10", "1_0"], ["cat", "cats"], ["-1", "1"], ["1.5", "15"], ["a", "ä"], []])
def test_names_that_differ_visibly_get_no_note(names):
    reader = LabelReader(CLASSES, ["y"])
    for name in names:
        reader.add("train", (name,))
    assert reader.names.notes == []


def test_an_unknown_label_that_looks_like_a_known_one_is_named_with_it():
    problem = LabelReader(CLASSES, ["y"], known=["pos", "neg"]).problem(("Pos",), is_train=False)
    assert "does not occur in train" in problem and "'Pos' and 'pos' differ only in case" in problem


def test_rows_with_unknown_labels_do_not_compare_the_classes_anew(monkeypatch):
    """Else to skip 10,000 such rows took more than a minute with 1,000 classes."""
    calls, normalize = [], unicodedata.normalize
    monkeypatch.setattr(unicodedata, "normalize", lambda form, name: calls.append(form) or normalize(form, name))
    reader = LabelReader(CLASSES, ["y"], [f"class of many {number}" for number in range(100)])
    for number in range(100):
        assert reader.problem((f"of none {number}",), is_train=False)
    assert len(calls) <= 300


def test_a_label_of_nothing_visible_is_empty():
    assert LabelReader(CLASSES, ["y"]).problem(("\u200b",), is_train=True) == "y is empty"


@pytest.mark.parametrize("labels, classes, outputs", [
    (["b", "a"], ["a", "b"], [1, 0]), (["10", "9"], ["9", "10"], [1, 0]), (["a", "b"], ["a", "b"], [0, 1]),
    (["B", "a"], ["A", "b"], [1, 0]), (["b", "B"], ["B", "b"], [1, 0]), (["cafe\u0301", "a"], ["a", "caf\xe9"], [1, 0]),
    (["b", "B"], ["b", "c"], None), (["a", "b"], ["a"], None), (["a", "a"], ["a", "a"], None),
    (["a", "b"], ["a", "c"], None), ([], [], [])])
def test_outputs_of_a_model_are_found_by_name(labels, classes, outputs):
    """In any order, and in any case and Unicode form if they still differ."""
    assert outputs_for(labels, classes) == outputs
