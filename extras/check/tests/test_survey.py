"""What is the same, what looks alike: on data where it is known."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from data.images.scan import build_index
from data.splits import ValSplit
from extras.check.images import survey_images
from extras.check.survey import Survey, first_with, key_of, shared_out

pytestmark = pytest.mark.unit


def survey_of(same, num_train, looks=None, labels=None, seen=None) -> Survey:
    same = np.array(same)
    seen = np.arange(len(same)) if seen is None else np.array(seen)
    looks = np.zeros((0, 1), np.int8) if looks is None else np.array(looks, np.int8)
    labels = np.zeros(len(same), np.int32) if labels is None else np.array(labels)
    return Survey(num_train, labels, same, same, seen, looks, {}, {}, str, str)


def pairs_of(survey) -> dict[str, list[list[int]]]:
    return {kind: pairs.tolist() for kind, pairs in survey.pairs() if len(pairs)}


def test_a_copy_is_told_from_a_leak():
    #                   train      val
    survey = survey_of([1, 2, 1, 3, 2, 4, 4, 1, 1], num_train=4)
    assert pairs_of(survey) == {"leak": [[4, 1], [7, 0], [8, 0]], "copy": [[2, 0], [6, 5], [8, 7]]}


@pytest.mark.parametrize("labels, expected", [
    ([0, 1, 0, 1], {}), ([0, 1, 1, 1], {"conflict": [[2, 0]]}), ([0.0, 1.0, 2.0, 3.0], {}),
    ([[1, 0], [0, 1], [1, 1], [0, 1]], {"conflict": [[2, 0]]})])
def test_only_classes_and_labels_can_conflict(labels, expected):
    assert pairs_of(survey_of([7, 8, 7, 8], 4, labels=labels)) == {"copy": [[2, 0], [3, 1]]} | expected


def test_candidates_are_the_most_alike_before_that_are_not_the_same():
    generator = np.random.default_rng(0)
    first, other = generator.integers(-127, 128, (2, 256))
    near, nearer = first.copy(), first.copy()
    near[-5:], nearer[:3] = 0, 0
    looks = [first, near, other, nearer, first, np.zeros(256), np.zeros(256)]
    survey = survey_of([1, 2, 3, 4, 1, 5, 6], 3, looks)  # three of train; 4 is the same as 0
    assert pairs_of(survey) == {"leak": [[4, 0]], "near leak": [[3, 0], [4, 1]], "near copy": [[1, 0], [4, 3]]}


def test_a_mirrored_image_is_a_candidate():
    looks = np.random.default_rng(0).integers(-127, 128, (10, 64))
    looks[7] = looks[2].reshape(8, 8)[:, ::-1].flatten()
    assert pairs_of(survey_of(range(10), 5, looks)) == {"near leak": [[7, 2]]}


def test_where_most_images_look_alike_the_hash_does_not_fit_and_says_so():
    """As radiographs and digits do."""
    looks = np.tile(np.random.default_rng(0).integers(-127, 128, 64), (30, 1))
    looks[np.arange(30), np.arange(30)] = 0
    found = pairs_of(survey_of([*range(29), 28], 15, looks))
    assert len({index for index, _ in found.pop("framing")}) > 20 and found.pop("copy") == [[29, 28]]
    assert sum(map(len, found.values())) < 6  # like few others


def test_candidates_among_many_need_bounded_memory_and_no_hash_is_none():
    looks = np.random.default_rng(0).integers(-127, 128, (300, 256))
    looks[250] = looks[7]
    survey = survey_of(range(1000), 500, looks, seen=range(0, 900, 3))
    assert pairs_of(survey) == {"near leak": [[750, 21]]}


def test_what_is_like_a_left_out_sample_is_named_if_it_is_of_train():
    looks = np.random.default_rng(0).integers(-127, 128, (8, 64))
    looks[[1, 6]] = looks[3]
    looks[6, 0] = 0
    survey = replace(survey_of([1, 2, 3, 4, 3, 3, 6, 7], 5, looks), left_out=frozenset({2, 3}))
    assert survey.beside_left_out().tolist() == [[4, 2], [1, 3]]
    assert replace(survey, left_out=frozenset()).beside_left_out().tolist() == []


def test_what_is_true_of_the_others_is_said_though_the_first_is_left_out():
    survey = replace(survey_of([7, 7, 7, 7, 8], 3, labels=[0, 0, 1, 0, 0]), left_out=frozenset({0}))
    assert pairs_of(survey.of_the_others()) == {"conflict": [[2, 1]], "leak": [[3, 1]], "copy": [[2, 1]]}


def test_keys_differ_where_contents_do():
    assert len({key_of(content) for content in (b"", b"a", b"b", b"ab")}) == 4
    assert first_with(np.array([5, 3, 5, 3, 1])).tolist() == [0, 1, 0, 1, 4]


def test_work_is_shared_out_in_order(world):
    assert shared_out(world, lambda index: [index, -index], range(200)) == [[i, -i] for i in range(200)]
    assert shared_out(world, str, []) == []


def test_of_many_images_some_are_seen_and_the_bytes_of_all_compared(tmp_path, world, monkeypatch):
    generator = np.random.default_rng(0)
    for split, count in (("train", 40), ("val", 20)):
        for label in "ab":
            (tmp_path / "data" / split / label).mkdir(parents=True)
            for number in range(count):
                pixels = generator.integers(0, 256, (8, 8, 3), np.uint8)
                Image.fromarray(pixels).save(tmp_path / "data" / split / label / f"{number:02}.bmp")  # of one size
    for number in range(20):
        shutil.copy(tmp_path / f"data/train/b/{number:02}.bmp", tmp_path / "data/val/a")
    index = build_index(str(tmp_path / "data"), ValSplit(0.1, 0), tmp_path / "cache")
    monkeypatch.setattr("extras.check.images.MOST", 50)
    survey = survey_images(index.splits["train"], index.splits["val"], 65535, world)
    found = pairs_of(survey)
    assert found["leak"] == found["conflict"] == [[80 + number, 40 + number] for number in range(20)]
    assert (len(survey.seen), len(survey.looks), set(found)) == (50, 50, {"leak", "conflict"})
