"""data/labels.py: what a label may be, and how labels are encoded."""

import numpy as np
import pytest

from data.labels import CLASSES, LABELS, NUMBERS, LabelReader, label_at, require_labels
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
    (LABELS, [(f"id{number}|x",) for number in range(2000)], "they look like ids")])
def test_labels_of_another_kind_are_refused(kind, rows, words):
    with pytest.raises(UserError) as error:
        require_labels(kind, rows, "the column y")
    assert words in str(error.value) and error.value.code == Exit.BAD_DATA


def test_a_label_is_a_class_or_a_row():
    assert label_at(np.array([3, 4], np.int32), 1) == 4
    assert label_at(np.array([[1.5, 2.5], [3.5, 4.5]]), 1).tolist() == [3.5, 4.5]
