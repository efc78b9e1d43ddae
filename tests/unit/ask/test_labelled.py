"""What ask.folds takes from the data: every sample of train once, as a line of a table that train.py reads."""

import csv
import json

import numpy as np
import pytest

from ask.labelled import read_samples
from utils.errors import Exit, UserError
from utils.settings.config import CONFIGS, with_values


def config(task, **values):
    return with_values(CONFIGS[task](), values)


def test_folders_of_classes_become_a_table_of_absolute_paths(photos):
    lines, names, labels, groups = read_samples(config("image-classification", data=str(photos)))
    rows = [json.loads(line) for line in lines]
    paths = sorted((photos / "train").rglob("*.png"))
    assert rows == [{"image": str(path), "label": path.parent.name} for path in paths]
    assert (names, groups) == (("tint0", "tint1", "tint2"), None)
    assert [names[label] for label in labels] == [row["label"] for row in rows]


def test_classes_are_in_the_order_of_a_table(own_photos):
    """Folders count as words, 10 before 9; numbers in a table as numbers."""
    for number, name in enumerate(("9", "10", "8")):
        for split in ("train", "val"):
            (own_photos / split / f"tint{number}").rename(own_photos / split / name)
    lines, names, labels, _ = read_samples(config("image-classification", data=str(own_photos)))
    assert names == ("8", "9", "10")
    assert [names[label] for label in labels] == [json.loads(line)["label"] for line in lines]


def test_images_of_a_table_and_several_of_a_sample_have_absolute_paths(photo_tables):
    found = config("image-regression", data=str(photo_tables), image_column="image,mask", label_column="brightness")
    lines, names, labels, _ = read_samples(found)
    rows = [json.loads(line) for line in lines]
    given = [*csv.DictReader((photo_tables / "train.csv").open())]
    assert [*rows[0]] == ["image", "mask", "brightness"] and names == ("brightness",)
    assert all(row["image"].startswith("/") and row["mask"].startswith("/") for row in rows)
    assert labels[:, 0].tolist() == [float(row["brightness"]) for row in given]


@pytest.mark.parametrize("text", ["a, b", 'a "b"', "a\nb", "<a>\u2028", "\U0001F600 ä"])
def test_texts_stay_as_they_are(tmp_path, text):
    with (tmp_path / "t.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(
            [["text", "label", "who"], [text, "x|y", "A"], ["two", "", "B"], ["three", "x", "A"]])
    found = config("text-classification", data=str(tmp_path / "t.csv"), multi_label=True, group_column="who")
    lines, names, labels, groups = read_samples(found)
    assert json.loads(lines[0]) == {"text": text, "label": "x|y", "who": "A"}
    assert (names, labels.tolist(), groups.tolist()) == (("x", "y"), [[1, 1], [0, 0], [1, 0]], [0, 1, 0])


def test_what_the_data_call_val_or_test_takes_no_part(tmp_path):
    rows = [["text", "label", "split"], ["a", "x", "train"], ["b", "y", "val"], ["c", "x", "test"], ["d", "y", "train"]]
    with (tmp_path / "t.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    lines, *_ = read_samples(config("text-classification", data=str(tmp_path / "t.csv")))
    assert [json.loads(line) for line in lines] == [{"text": "a", "label": "x"}, {"text": "d", "label": "y"}]


def test_a_bad_row_is_named_with_its_own_line(tmp_path):
    (tmp_path / "t.csv").write_text("text,label\nfirst,x\n,y\nthird,y\n")
    with pytest.raises(UserError, match=r"t.csv line 3: text is empty") as caught:
        read_samples(config("text-classification", data=str(tmp_path / "t.csv")))
    assert caught.value.code == Exit.BAD_DATA
    lines, _, labels, _ = read_samples(config("text-classification", data=str(tmp_path / "t.csv"), bad_samples="skip"))
    assert len(lines) == 2 and np.array_equal(labels, [0, 1])


@pytest.mark.parametrize("name", ["tint|0", "tint0/\udcff.png"])
def test_folders_that_no_table_can_hold_are_refused_before_any_run(own_photos, name):
    for folder in own_photos.glob("*/tint0"):
        (min(folder.iterdir()) if "/" in name else folder).rename(folder.parent / name)
    with pytest.raises(UserError) as error:
        read_samples(config("image-classification", data=str(own_photos)))
    assert error.value.code == Exit.BAD_DATA and "ask.folds makes a table of these folders" in str(error.value)
