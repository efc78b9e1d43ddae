"""data/images/table.py: images that a table lists, their labels, splits and groups."""

import json
import os

import numpy as np
import pytest
from PIL import Image

from data.images.augment import CentreCrop, PhotoTrain
from data.images.folder import ImageFolder
from data.images.table import build_table_index, is_table
from data.labels import CLASSES, LABELS, NUMBERS
from data.splits import ValSplit
from data.tables.source import TableSource
from data.tables.table import IMAGES
from utils.errors import Exit, UserError

VAL = ValSplit(0.25, 0)


@pytest.fixture
def table(tmp_path):
    """table(text, ...): writes data/t.csv, beside 12 images in data/img."""
    root = tmp_path / "data"
    (root / "img").mkdir(parents=True)
    for number in range(12):
        Image.new("RGB", (8, 8), (20 * number, 0, 0)).save(root / "img" / f"{number}.png")

    def table(*lines, name="t.csv"):
        (root / name).write_text("\n".join(lines) + "\n")
        return root / name

    return table


def source_of(path, kind=CLASSES, labels=("label",), **options):
    return TableSource(str(path), IMAGES, options.pop("column", "auto"), labels, kind, **options)


def index_of(path, *args, **options):
    return build_table_index(source_of(path, *args, **options), VAL, path.parent / "cache")


def refusal(path, *args, **options):
    with pytest.raises(UserError) as error:
        index_of(path, *args, **options)
    return error.value.code, str(error.value)


def lines_of(numbers, label="ab"):
    return [f"img/{number}.png,{label[number % len(label)]}" for number in numbers]


def test_a_caption_beside_an_image_is_no_table(table):
    path = table("image,label", *lines_of(range(12)), name="train.csv")
    (path.parent / "img").rename(path.parent / "train")
    path.write_text(path.read_text().replace("img/", "train/"))
    (path.parent / "train" / "0.txt").write_text("a red square\n")
    found = build_table_index(source_of(path.parent), VAL, path.parent / "cache")
    assert sum(map(len, found.splits.values())) == 12 and set(found.splits) == {"train", "val"}


def test_paths_are_relative_to_the_table_and_kept_in_the_cache(table):
    path = table("image,label", *lines_of(range(12)))
    for _ in range(2):  # made, then from the cache
        found = index_of(path)
        train, val = found.splits["train"], found.splits["val"]
        names = sorted(index.path(i) for index in (train, val) for i in range(len(index)))
        assert names == sorted(str(path.parent / "img" / f"{number}.png") for number in range(12))
        assert (found.classes, len(train), len(val)) == (("a", "b"), 8, 4)
        for index in (train, val):
            assert [index.labels[i] for i in range(len(index))] == [
                int(os.path.basename(index.path(i))[:-4]) % 2 for i in range(len(index))]


@pytest.mark.parametrize("kind", ["tsv", "jsonl"])
def test_other_kinds_of_tables_hold_the_samples_of_a_csv(table, kind):
    rows = [("image", "label"), *(line.split(",") for line in lines_of(range(12)))]
    lines = {"tsv": ["\t".join(row) for row in rows],
             "jsonl": [json.dumps(dict(zip(rows[0], row, strict=True))) for row in rows[1:]]}
    csv, other = (index_of(table(*lines, name=name)).splits for name, lines in (
        ("t.csv", map(",".join, rows)), (f"t.{kind}", lines[kind])))
    for split in ("train", "val"):
        assert [(other[split].path(i), other[split].labels[i]) for i in range(len(other[split]))] == [
            (csv[split].path(i), csv[split].labels[i]) for i in range(len(csv[split]))]
    assert len(other["train"]) == 8


def test_the_fingerprint_follows_names_and_labels_and_not_the_place(table, tmp_path):
    path = table("image,label", *lines_of(range(12)))
    first = index_of(path).fingerprint
    path.parent.rename(tmp_path / "moved")
    assert index_of(tmp_path / "moved" / "t.csv").fingerprint == first
    path.parent.mkdir()
    (tmp_path / "moved").rename(path.parent / "again")
    changed = path.parent / "again" / "t.csv"
    changed.write_text(changed.read_text().replace("img/3.png,b", "img/3.png,a"))
    assert index_of(changed).fingerprint != first


def test_a_column_named_split_says_of_which_split_a_row_is(table):
    splits = ["train", "Training", "valid", "test", "train", "valid"]
    path = table("image,label,split", *(f"{line},{split}" for line, split in zip(
        lines_of(range(6)), splits, strict=True)))
    found = index_of(path, split="test")
    assert {name: [os.path.basename(index.path(i)) for i in range(len(index))]
            for name, index in found.splits.items()} == {
        "train": ["0.png", "1.png", "4.png"], "val": ["2.png", "5.png"], "test": ["3.png"]}
    assert found.notes == ("no row has split val, so those of valid are used for validation",)


@pytest.mark.parametrize("splits, words", [
    (["train", "held"], "line 3: split is held; it must be one of train, training, dev, eval, val, valid, validation"),
    (["val", "test"], "split is test, val, and never train")])
def test_a_split_that_is_none_is_refused(table, splits, words):
    path = table("image,label,split", *(f"{line},{split}" for line, split in zip(
        lines_of(range(2)), splits, strict=True)))
    code, message = refusal(path)
    assert code == Exit.BAD_DATA and words in message


def test_whole_groups_are_held_out(table):
    path = table("image,label,patient", *(f"{line},p{number // 3}" for number, line in enumerate(lines_of(range(12)))))
    found = index_of(path, group_column="patient")
    groups = {name: {int(os.path.basename(index.path(i))[:-4]) // 3 for i in range(len(index))}
              for name, index in found.splits.items()}
    assert len(groups["train"]) == 3 and len(groups["val"]) == 1 and groups["train"].isdisjoint(groups["val"])


def test_one_group_alone_cannot_be_held_out_and_an_empty_one_is_named(table):
    path = table("image,label,patient", *(f"{line},p" for line in lines_of(range(12))))
    assert "all samples of train belong to one text or group" in refusal(path, group_column="patient")[1]
    path = table("image,label,patient", "img/0.png,a,p", "img/1.png,b,")
    assert refusal(path, group_column="patient") == (Exit.BAD_DATA, (
        f"{path} line 3: patient is empty, so the row belongs to no group; correct or remove the row, or pass"
        " --bad-samples skip"))


def test_groups_that_train_and_val_share_are_noted(table):
    path = table("image,label,patient,split", *(f"{line},p{number % 5},{'val' if number > 8 else 'train'}"
                                                for number, line in enumerate(lines_of(range(12)))))
    [note] = index_of(path, group_column="patient").notes
    assert note.startswith("3 of the 5 groups of train (patient) occur in another split, too, for example p0")


@pytest.mark.parametrize("line, kind, problem", [
    ("img/77.png,a", CLASSES, "there is no file {root}/img/77.png (paths are relative to the folder of the table)"),
    ("none/7.png,a", CLASSES, "there is no file {root}/none/7.png (paths are relative to the folder of the table)"),
    ("img\\1.png,a", CLASSES, "there is no file {root}/img\\1.png: it is there with slashes; replace each backslash by"
                             " / (the table was written on Windows)"),
    ("img/1.PNG,a", CLASSES, "there is no file {root}/img/1.PNG; '1.PNG' and '1.png' differ only in case, spaces or"
                          " how a number or a character is written"),
    ("so long a text,a", CLASSES, "there is no file {root}/so long a text; if the column holds texts, give --task"
                                  " text-classification"),
    ("img,a", CLASSES, "there is no file {root}/img: it is a folder"),
    (",a", CLASSES, "image is empty"), ("img/7.png,", CLASSES, "label is empty"),
    ("img/7.png,tall", NUMBERS, "label is tall, which is not a finite number")])
def test_a_row_that_cannot_be_a_sample_is_named_or_left_out(table, line, kind, problem):
    label = "ab" if kind == CLASSES else "12"
    path = table("image,label", *lines_of(range(6), label), line)
    problem = problem.format(root=path.parent)
    assert refusal(path, kind) == (Exit.BAD_DATA, (
        f"{path} line 8: {problem}; correct or remove the row, or pass --bad-samples skip"))
    found = index_of(path, kind, skip_bad=True)
    assert sum(map(len, found.splits.values())) == 6
    assert f"left out 1 sample, for example {path} line 8: {problem}" in found.notes


def test_two_images_are_stacked_and_have_the_same_crop(table):
    path = table("photo,mask,label", *(f"img/{number}.png,img/{number + 1}.png,{number}" for number in range(8)))
    found = index_of(path, NUMBERS, column="photo,mask")
    train = found.splits["train"]
    assert [os.path.basename(each) for each in train.paths(0)] == [
        f"{int(train.labels[0, 0]) + more}.png" for more in (0, 1)]
    one, two = (ImageFolder(index_of(path, NUMBERS, column=column).splits["train"], CentreCrop(8, "bilinear", 8), 0)
                for column in ("photo", "photo,mask"))
    assert two[0, 3].image.shape == (8, 8, 6)
    assert np.array_equal(two[0, 3].image[..., :3], one[0, 3].image)
    (path.parent / "img" / f"{int(train.labels[2, 0]) + 1}.png").write_bytes(b"no image")
    assert two[0, 2].bad.startswith(train.paths(2)[1]) and two[0, 2].image.shape == (8, 8, 6)


def test_a_mask_of_another_size_gets_the_same_random_crop(table):
    root = table("photo,mask,label", "img/a.png,img/b.png,1", "img/0.png,img/1.png,2").parent
    small = np.zeros((30, 40, 3), np.uint8)
    small[12:, 20:] = 255
    Image.fromarray(small.repeat(4, axis=0).repeat(4, axis=1)).save(root / "img" / "a.png")
    Image.fromarray(small).save(root / "img" / "b.png")
    index = index_of(root / "t.csv", NUMBERS, column="photo,mask").splits
    [both] = [ImageFolder(each, PhotoTrain(16), 0) for each in index.values() if each.labels[0] == 1]
    for epoch in range(9):
        photo, mask = both[epoch, 0].image.split(3, dim=2)
        assert (photo.int() - mask.int()).abs().float().mean() < 4  # edges differ by the resizing


def test_an_image_that_appears_later_is_found_and_one_that_goes_is_missed(table):
    path = table("image,label", *lines_of(range(12)), "img/late.png,a")
    assert "left out 1 sample" in "".join(index_of(path, skip_bad=True).notes)
    Image.new("RGB", (8, 8)).save(path.parent / "img" / "late.png")
    found = index_of(path, skip_bad=True)
    assert "left out" not in "".join(found.notes)
    assert sorted(each.path(i) for each in found.splits.values() for i in range(len(each))) == sorted(
        map(str, (path.parent / "img").iterdir()))  # also where the held-out samples of the old index are kept
    (path.parent / "img" / "3.png").unlink()
    assert "3.png" in refusal(path)[1]


def test_groups_are_part_of_the_fingerprint(table):
    prints = set()
    for size in (3, 4):
        path = table("image,label,patient", *(f"{line},p{number // size}" for number, line in enumerate(
            lines_of(range(12)))), name=f"{size}.csv")
        prints.add(index_of(path, group_column="patient").fingerprint)
    assert len(prints) == 2


def test_a_text_file_as_val_is_refused(table):
    table("image,label", *lines_of(range(4)), name="train.csv")
    root = table("img/5.png", name="val.txt").parent
    assert "val.txt: a .txt file has no labels" in refusal(root)[1]


def test_several_labels_and_targets_are_rows(table):
    path = table("image,labels,a,b", *(f"img/{number}.png,{'x|y' if number % 2 else 'y'},{number},{number / 2}"
                                       for number in range(12)))
    found = index_of(path, LABELS, labels=("labels",))
    assert found.classes == ("x", "y") and found.splits["train"].labels[:, 1].all()
    found = index_of(path, NUMBERS, labels=("a", "b"))
    train = found.splits["train"].labels
    assert found.classes == ("a", "b") and np.array_equal(train[:, 1], train[:, 0] / 2)


def test_tables_are_told_from_folders_of_classes(table, tmp_path):
    path = table("image,label", name="train.csv")
    assert is_table(str(path)) and is_table(str(path.parent)) and not is_table(str(tmp_path))
    assert not is_table(str(path.parent / "img" / "0.png"))


def test_a_comma_in_the_path_of_one_of_several_images_is_refused(table):
    """models.predict, samples.csv and the report name such a sample by its paths, with commas between them."""
    path = table("photo,mask,label", '"img/a,b.png",img/1.png,1', "img/0.png,img/1.png,2")
    (path.parent / "img" / "2.png").rename(path.parent / "img" / "a,b.png")
    code, message = refusal(path, NUMBERS, column="photo,mask")
    assert code == Exit.BAD_DATA and "a,b.png has a comma" in message
    assert len(index_of(path, NUMBERS, column="photo").splits["train"]) > 0
