import fcntl
import os
import pickle
import re
import select
import shutil
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets import ImageFolder as TorchvisionFolder

from data.images.folder import ImageFolder
from data.images.scan import build_index, images_in
from data.splits import ValSplit
from tests.conftest import ROOT
from tests.harness.mapped import is_mapped
from tests.unit.data.images.test_decode import BAD
from utils.errors import Exit, UserError
from utils.rundir.digests import UNKNOWN

torch.set_num_threads(1)


def write_images(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4)).save(root / name, "PNG")
    return root


def paths(index) -> list[str]:
    return [index.path(i) for i in range(len(index))]


@pytest.fixture
def index_of(tmp_path):
    return lambda root, fraction=0.1, seed=0: build_index(str(root), ValSplit(fraction, seed), tmp_path / "cache")


@pytest.fixture
def tree(tmp_path):
    names = ("b/x.png", "b/X.JPG", "b/deep/er/1.png", "b/deep-er/0.png", "a b/ü.png", "a b/2.gif", "C/10.png",
             "C/9.webp")
    return write_images(tmp_path / "tree", *(f"{split}/{name}" for split in ("train", "val") for name in names))


def test_classes_labels_and_order_are_those_of_torchvision(tree, index_of):
    index = index_of(tree)
    (tree / "train/C/9.webp").touch()
    for split in ("train", "val"):
        # torchvision does not know .gif
        theirs = TorchvisionFolder(str(tree / split), is_valid_file=lambda path: True)
        assert list(index.classes) == theirs.classes
        assert list(zip(paths(index.splits[split]), index.splits[split].labels.tolist(), strict=True)) == theirs.samples


def test_names_that_are_not_utf8_are_found_again(tmp_path, index_of):
    root = write_images(tmp_path / "d", "train/a/1.png", "train/b/1.png", "val/a/1.png", "val/b/1.png")
    odd = os.fsencode(root / "train/a/") + b"/\xff.png"
    os.rename(root / "train/a/1.png", odd)
    for _ in range(2):  # scanned, then cached
        assert os.fsencode(index_of(root).splits["train"].path(0)) == os.fsencode(root) + b"/train/a/\xff.png"


def test_folders_that_nobody_can_tell_apart_are_one_class(tmp_path, index_of):
    """In any split, and their images are found under the names that the folders have; an older run keeps two."""
    names = ["train/caf\u00e9/1.png", "train/cafe\u0301/2.png", "train/tea/3.png",
             "val/cafe\u0301/4.png", "val/ tea/5.png"]
    root = write_images(tmp_path / "d", *names)
    for _ in range(2):  # scanned, then cached
        index = index_of(root)
        assert index.classes == ("caf\u00e9", "tea")
        assert {split: list(zip(paths(table), table.labels.tolist(), strict=True))
                for split, table in index.splits.items()} == {
            "train": [(f"{root}/{names[1]}", 0), (f"{root}/{names[0]}", 0), (f"{root}/{names[2]}", 1)],
            "val": [(f"{root}/{names[3]}", 0), (f"{root}/{names[4]}", 1)]}
        [note] = index.notes
        assert "one class" in note and r"'caf\xe9' and 'cafe\u0301'" in note and "' tea' and 'tea'" in note


def test_folders_that_look_alike_are_noted(tmp_path, index_of):
    root = write_images(tmp_path / "d", *(f"{split}/{name}/1.png" for split in ("train", "val")
                                          for name in ("1", "01", "Cat", "cat")))
    [note] = index_of(root).notes
    assert "'01' and '1'" in note and "'Cat' and 'cat'" in note and len(index_of(root).classes) == 4


def test_index_is_pickled_whole(tree, index_of):
    index = index_of(tree).splits["train"]
    assert paths(pickle.loads(pickle.dumps(index))) == paths(index)


def test_second_start_reads_the_cache(tree, index_of, monkeypatch):
    first = index_of(tree)
    monkeypatch.setattr(os, "scandir", lambda path: pytest.fail("scanned again"))
    second = index_of(tree)
    assert (second.classes, second.fingerprint, second.notes) == (first.classes, first.fingerprint, first.notes)
    assert {name: paths(split) for name, split in second.splits.items()} == {name: paths(split) for name,
                                                                             split in first.splits.items()}


@pytest.mark.parametrize("name", ["train/b/deep/er/2.png", "val/C/new.png", "train/C/new/folder/1.png"])
def test_added_file_makes_the_cache_outdated(tree, index_of, name):
    before = index_of(tree)
    time.sleep(0.02)  # a directory's time advances in steps of up to 10 ms
    write_images(tree, name)
    after = index_of(tree)
    assert str(tree / name) in paths(after.splits[name.split("/")[0]])
    assert after.fingerprint != before.fingerprint


def damages(good: bytes, is_checked: bool):
    """Shorter and longer content; with a checksum, changed content too."""
    for position in range(0, len(good), max(1, len(good) // 7)):
        yield good[:position]
        if is_checked:
            yield good[:position] + bytes([good[position] ^ 0xFF]) + good[position + 1:]
    yield good + b"\0"


def test_damaged_cache_is_rebuilt(tmp_path, index_of):
    root = write_images(tmp_path / "d", *(f"train/{name}/{i}.png" for name in "ab" for i in range(4)))
    expected = {split: paths(table) for split, table in index_of(root).splits.items()}
    files = {file: file.read_bytes() for file in (tmp_path / "cache").rglob("*") if file.is_file()}
    assert len(files) == 1 + 4 + 5  # directories and their times; names, spans, labels; spans and labels of two splits
    for file, good in files.items():
        for bad in damages(good, is_checked=file.suffix == ".json"):
            file.write_bytes(bad)
            assert {split: paths(table) for split, table in index_of(root).splits.items()} == expected
            assert {file: file.read_bytes() for file in (tmp_path / "cache").rglob("*") if file.is_file()} == files


def test_arrays_are_mapped_with_and_without_a_val_folder(tree, tmp_path, index_of):
    flat = write_images(tmp_path / "flat", *(f"train/{name}/{i}.png" for name in "ab" for i in range(4)))
    for _ in range(2):  # scanned, then cached
        tables = [table for root in (tree, flat) for table in index_of(root).splits.values()]
        assert all(is_mapped(array) for table in tables for array in (table.names, table.spans, table.labels))


def test_nodes_with_data_of_their_own_under_one_path_do_not_overwrite(tree, tmp_path, index_of):
    other = write_images(tmp_path / "other", *(f"{split}/{name}/1.png" for split in ("train", "val") for name in "ab"))
    os.utime(other, ns=(0, 0))  # here both are made within the same tick of the clock, perhaps
    written = []
    for _ in range(2):
        for node, number in ((tree, 8), (other, 2)):
            node.rename(tmp_path / "local")
            assert len(index_of(tmp_path / "local").splits["train"]) == number
            (tmp_path / "local").rename(node)
        written.append({file: file.stat().st_mtime_ns for file in (tmp_path / "cache").rglob("*")})
    assert written[0] == written[1]


def test_copies_of_the_data_on_several_nodes_share_one_index(tree, tmp_path, index_of):
    shutil.copytree(tree, tmp_path / "copy")
    index_of(tree), index_of(tmp_path / "copy")
    assert len([entry for entry in (tmp_path / "cache").iterdir() if entry.is_dir()]) == 1
    assert paths(index_of(tmp_path / "copy").splits["val"])[0].startswith(f"{tmp_path}/copy/")


@pytest.mark.long
def test_one_process_scans_while_another_waits_and_finds_the_index(tree, tmp_path, index_of):
    index_of(tree)
    (file,) = (tmp_path / "cache").glob("*.json")
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").mkdir()
    program = ("import os, sys\nfrom pathlib import Path\nfrom data.images.scan import build_index\nfrom data.splits"
               " import ValSplit\n"
               "os.scandir = lambda path: sys.exit('scanned too')\n"
               "print(len(build_index(sys.argv[1], ValSplit(0.1, 0), Path(sys.argv[2])).splits['train']))")
    with file.with_name(f".{file.name}.lock").open("w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        other = subprocess.Popen([sys.executable, "-c", program, tree, tmp_path / "cache"], cwd=ROOT, text=True,
                                 stdout=subprocess.PIPE)
        while not re.search(rf"->.* {other.pid} ", Path("/proc/locks").read_text()):  # blocked
            assert not select.select([other.stdout], [], [], 0.005)[0], "it did not wait"
        index_of(tree)
    assert other.communicate()[0] == "8\n"


def test_cache_that_cannot_be_written_does_not_matter(tree):
    assert len(build_index(str(tree), ValSplit(0.1, 0), Path("/proc/nowhere")).splits["train"]) == 8


@pytest.mark.parametrize(("others", "val", "test"), [
    (("valid", "test"), "valid", "test"), (("test",), "test", None), (("val", "validation"), "val", None),
    (("validation",), "validation", None), (("eval", "dev", "test"), "test", None)])
def test_val_is_the_first_folder_that_exists(tmp_path, index_of, others, val, test):
    root = write_images(tmp_path / "d",
                        *(f"{split}/{name}/{split}.png" for split in ("train", *others) for name in "ab"))
    index = index_of(root)
    assert {split: Path(index.splits[split].path(0)).stem for split in index.splits} == {
        "train": "train", "val": val, **({"test": test} if test else {})}
    assert any(val in note for note in index.notes) == (val != "val")


def test_test_split_may_lack_classes_and_keeps_the_labels_of_train(tmp_path, index_of):
    root = write_images(tmp_path / "d", "train/a/1.png", "train/b/1.png", "val/a/1.png", "val/b/1.png", "test/b/1.png")
    assert index_of(root).splits["test"].labels.tolist() == [1]


def test_test_folder_without_classes_is_left_out_with_a_note(tmp_path, index_of):
    root = write_images(tmp_path / "d", "train/a/1.png", "train/b/1.png", "val/a/1.png", "val/b/1.png", "test/1.png")
    index = index_of(root)
    assert set(index.splits) == {"train", "val"} and any("test/" in note for note in index.notes)


def test_held_out_share_is_stratified_disjoint_and_seeded(tmp_path, index_of):
    counts = {"one": 1, "two": 2, "ten": 10, "many": 40}
    root = write_images(tmp_path / "d",
                        *(f"train/{name}/{i}.png" for name, count in counts.items() for i in range(count)))
    index, again, other = index_of(root, 0.2), index_of(root, 0.2), index_of(root, 0.2, seed=1)
    train, val = index.splits["train"], index.splits["val"]
    held = dict(zip(index.classes, np.bincount(val.labels, minlength=4).tolist(), strict=True))
    assert held == {"one": 0, "two": 1, "ten": 2, "many": 8}
    assert sorted(paths(train) + paths(val)) == sorted(str(file) for file in root.glob("train/*/*"))
    assert all(f"/{index.classes[label]}/" in train.path(i) for i, label in enumerate(train.labels))
    assert paths(again.splits["val"]) == paths(val) != paths(other.splits["val"])
    assert index.fingerprint == other.fingerprint
    assert np.bincount(index_of(root, 0.999).splits["train"].labels).min() == 1


def test_classes_directly_in_the_root_are_taken_with_a_note(tmp_path, index_of):
    root = write_images(tmp_path / "d", *(f"{name}/{i}.png" for name in "ab" for i in range(3)))
    index = index_of(root)
    assert index.classes == ("a", "b") and any("no train/" in note for note in index.notes)


def test_stray_files_are_passed_over_with_one_note(tree, index_of):
    expected = paths(index_of(tree).splits["train"])
    write_images(tree, "train/README", "train/loose.png", "train/b/notes.txt", "train/b/Thumbs.db", "train/b/.DS_Store")
    index = index_of(tree)
    assert paths(index.splits["train"]) == expected
    (note,) = index.notes
    assert "3" in note and "train/README" in note


@pytest.mark.parametrize(("folder", "only", "words"), [
    ("val/", "val", "val/"), ("validation/", "val", "validation/"), ("test/", "val", "test/"),
    ("test/", "test", "test/"),
    ("", "val", "none is held out"), ("", "test", "none is held out"), ("", "train", "none is held out")])
def test_what_alone_is_evaluated_needs_no_other_split(tmp_path, folder, only, words):
    """All of its images, also of a single class; its labels count the classes of the weights, if these have them."""
    root = write_images(tmp_path / "d", *(f"{folder}{name}/{i}.png" for name in "ca" for i in range(3)))
    for _ in range(2):  # scanned, then cached
        found = build_index(str(root), ValSplit(0.5, 0, only), tmp_path / "cache").labelled(["d", "c", "b", "a"])
        assert paths(found.splits[only]) == [str(root / folder / name / f"{i}.png") for name in "ac" for i in range(3)]
        assert found.splits[only].labels.tolist() == found.splits["train"].labels.tolist() == [3, 3, 3, 1, 1, 1]
    assert any(words in note for note in found.notes)
    shutil.rmtree(root / folder / "c")
    assert build_index(str(root), ValSplit(0.5, 0, only), tmp_path / "cache").classes == ("a",)


def test_a_split_that_is_asked_for_and_not_there_is_named(tmp_path):
    root = write_images(tmp_path / "d", "val/a/1.png", "val/b/1.png")
    with pytest.raises(UserError, match=r"--split test: .* has no such split; it has val") as refused:
        build_index(str(root), ValSplit(0.5, 0, "test"), tmp_path / "cache")
    assert refused.value.code == Exit.NO_INPUT


@pytest.mark.parametrize("split", ["train/", ""])
def test_what_systems_keep_beside_images_is_skipped_and_counted(tmp_path, index_of, split):
    """Whichever file server, system or program it is, at the top, among the classes and inside of them."""
    root = write_images(tmp_path / "d", *(f"{split}{name}/{i}.png" for name in ("a", "@home") for i in range(4)))
    before = index_of(root)
    time.sleep(0.02)  # a directory's time advances in steps of up to 10 ms
    kept = ("@eaDir/0.png", "#recycle", "$Recycle.Bin", "System Volume Information", "lost+found", "__MACOSX",
            ".ipynb_checkpoints", ".Trash-1000", ".AppleDouble", "@Recently-Snapshot/b/deep")
    places = {"", split, f"{split}a/"}
    write_images(root, *(f"{place}{name}/1.png" for place in places for name in kept),
                 f"{split}a/._0.png", f"{split}a/Thumbs.db", f"{split}a/desktop.ini")
    (root / split / "lost+found/1.png").unlink()
    index = index_of(root)
    assert (index.classes, index.fingerprint) == (("@home", "a"), before.fingerprint)
    assert {name: paths(table) for name, table in index.splits.items()} == {
        name: paths(table) for name, table in before.splits.items()}
    (note,) = set(index.notes) - set(before.notes)
    assert f"skipped {len(kept) * len(places) + 1} folders and files of a system or program, such as #recycle" in note


def test_symlinks_are_followed_and_loops_are_not(tree, index_of, tmp_path):
    write_images(tmp_path / "elsewhere", "s.png")
    (tree / "train/b/linked").symlink_to(tmp_path / "elsewhere")
    (tree / "train/b/deep/loop").symlink_to(tree / "train/b")
    (tree / "train/C/0.png").symlink_to(tree / "train/C/10.png")
    found = paths(index_of(tree).splits["train"])
    assert len(found) == 10 and str(tree / "train/b/linked/s.png") in found


@pytest.mark.parametrize(("names", "words"), [
    ((), "it is empty"),
    (("1.png", "2.png"), "only 1.png, 2.png"),
    (("train.csv", "val.csv"), "if these are texts, give --task text-classification or masked-lm"),
    (("train/a.jsonl",), "if these are texts, give --task text-classification or masked-lm"),
    (("train/1.png", "val/a/1.png"), "train/ holds no class folders"),
    (("train/a/1.png",), "only one class, a"),
    (("train/a/1.png", "train/b/readme.txt"), r"train/b holds no images .*, but readme.txt; convert them"),
    (("train/a/1.png", "train/b/1.HEIC"), r"train/b holds no images .*, but 1.HEIC; convert them"),
    (("val/a/1.png", "val/b/1.png"), "no train/"),
    (("Train/a/1.png", "Val/a/1.png"), "no train/; name the training folder so"),
    (("train/a/1.png", "train/b/1.png", "val/a/x.txt", "val/b/x.txt"), "val/ holds no class folders with images;"),
    (("train/a/1.png", "train/b/1.png", "val/a/1.png", "val/b/1.png", "val/c/1.png"), "val/ has c, which train/ lacks"),
    (("train/a/1.png", "train/b/1.png", "val/a/1.png", "val/B/1.png"), "only in case"),
    (("train/a/1.png", "train/b/1.png", "val/a/1.png", "val/b/1.png", "test/c/1.png"), "test/ has c"),
    (("train/a/1.png", "train/b/1.png"), "every class has one sample"),
])
def test_unusable_folder_is_bad_data_and_says_why(tmp_path, index_of, names, words):
    root = tmp_path / "d"
    root.mkdir()
    with pytest.raises(UserError, match=words) as error:
        index_of(write_images(root, *names))
    assert error.value.code == Exit.BAD_DATA and str(root) in str(error.value)


def test_jpegs_by_another_name_are_read_and_other_pictures_are_counted(tmp_path, index_of):
    root = write_images(tmp_path / "d", *(f"{name}/{i}{ending}" for name in "ab" for i in range(4)
                                          for ending in (".png", ".jfif", ".heic", ".txt")))
    index = index_of(root)
    assert sum(map(len, index.splits.values())) == 16
    [note] = [text for text in index.notes if "skipped" in text]
    assert "(8 .heic, 8 .txt); pictures of such kinds are not read: convert them" in note


@pytest.mark.parametrize("split", ["", "train/", "val/"])
@pytest.mark.parametrize("place", ["runs/first/", "run/"])
def test_a_run_directory_among_the_classes_is_no_class(tmp_path, index_of, place, split):
    """One that is started in the folder of its data, say. It changes, and the index is still the kept one."""
    splits, place = ("train/", "val/") if split else ("",), split + place
    root = write_images(tmp_path / "d", *(f"{each}{name}/{i}.png" for each in splits for name in "ab"
                                          for i in range(4)))
    before = index_of(root)
    (root / place / "checkpoints").mkdir(parents=True)
    for name in (".lock", "config.yaml", "picture.png"):
        (root / place / name).touch()
    index = index_of(root)
    assert (index.classes, index.fingerprint) == (before.classes, before.fingerprint)
    [note] = set(index.notes) - set(before.notes)
    top = split + place.removeprefix(split).partition("/")[0]
    assert note.startswith(f"{top}/ holds runs of this program, and is no class")
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").glob("*.json")}
    (root / place / "metrics.jsonl").touch()
    assert index_of(root).notes == index.notes
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").glob("*.json")} == kept


def test_data_in_a_run_directory_are_data(tmp_path, index_of):
    """An earlier version let a run be written beside train/."""
    root = write_images(tmp_path / "d", *(f"train/{name}/{i}.png" for name in "ab" for i in range(4)))
    for name in (".lock", "config.yaml"):
        (root / name).touch()
    assert index_of(root).classes == ("a", "b") and len(images_in(str(root))) == 8


@pytest.mark.parametrize("is_empty", [True, False])
@pytest.mark.parametrize("split", ["val", "test"])
def test_a_class_of_train_may_be_missing_elsewhere(tmp_path, index_of, split, is_empty):
    root = write_images(tmp_path / "d", *(f"{each}/{name}/1.png" for each in ("train", "val", "test")
                                          for name in "abc" if (each, name) != (split, "b")))
    if is_empty:
        (root / split / "b").mkdir()
    for _ in range(2):  # scanned, then cached
        index = index_of(root)
        assert index.classes == ("a", "b", "c") and index.notes == ()
        assert {name: table.labels.tolist() for name, table in index.splits.items()} == {
            "train": [0, 1, 2], "val": [0, 1, 2], "test": [0, 1, 2], split: [0, 2]}


def test_a_folder_for_each_image_is_refused_before_training(tmp_path, index_of):
    for number in range(1001):
        (tmp_path / "d/train" / str(number)).mkdir(parents=True)
        (tmp_path / "d/train" / str(number) / "1.png").touch()
    with pytest.raises(UserError) as error:
        index_of(tmp_path / "d")
    assert (error.value.code, str(error.value)) == (
        Exit.BAD_DATA, f"--data {tmp_path}/d: train/ has 1001 classes that look like ids: 1001 have a single training"
        " sample, and of more than 1000 classes at most 90% may have a single one; put all images of a class"
        " into one folder")


def test_missing_folder_a_file_and_no_share_to_hold_out_have_their_codes(tmp_path, index_of):
    write_images(tmp_path, "d/train/a/1.png", "d/train/b/1.png", "file.png")
    for root, fraction, code in (("missing", 0.1, Exit.NO_INPUT), ("file.png", 0.1, Exit.BAD_DATA),
                                 ("d", 0.0, Exit.USAGE)):
        with pytest.raises(UserError) as error:
            index_of(tmp_path / root, fraction)
        assert error.value.code == code


class Whole:
    """The decoded image, as a transform."""

    size = 5

    def __call__(self, image):
        return image.pixels()


@pytest.mark.parametrize("name", [*BAD, "missing.jpg", "folder.jpg"])
def test_unreadable_image_is_a_grey_sample_with_path_and_reason(tmp_path, index_of, name, capfd):
    root = write_images(tmp_path / "d", f"train/a/{name}", "train/b/1.png", "val/a/1.png", "val/b/1.png")
    index = index_of(root).splits["train"]
    (root / "train/a" / name).unlink()
    if name in BAD:
        (root / "train/a" / name).write_bytes(BAD[name])
    elif name == "folder.jpg":
        (root / "train/a" / name).mkdir()
    image, label, bad, digest = ImageFolder(index, Whole(), seed=0)[0, 0]
    assert image.shape == (5, 5, 3) and (image == 128).all() and (label, digest) == (0, UNKNOWN)
    assert bad.startswith(f"{root}/train/a/{name}: ") and len(bad) > len(f"{root}/train/a/{name}: ") + 5
    assert "0x" not in bad and bad.count(name) == 1


class Noise:
    size = 3

    def __call__(self, image):
        return torch.randint(0, 256, (3, 3, 3), dtype=torch.uint8)


def test_augmentation_is_a_function_of_seed_epoch_and_index(tree, index_of):
    index = index_of(write_images(tree, "train/C/9.webp")).splits["train"]
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first, other_epoch, other_index = (ImageFolder(index, Noise(), seed=7)[item].image
                                       for item in ((3, 1), (4, 1), (3, 2)))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(ImageFolder(index, Noise(), seed=7)[3, 1].image, first)
    other_seed = ImageFolder(index, Noise(), 8)[3, 1].image
    assert len({tuple(image.flatten().tolist()) for image in (first, other_epoch, other_index, other_seed)}) == 4


def test_index_of_many_files_is_fast_and_small(tmp_path, index_of):
    root = tmp_path / "d"
    for name in "abcd":
        (root / "train" / name).mkdir(parents=True)
        for i in range(1000):
            (root / "train" / name / f"{i}.jpg").touch()
    with warnings.catch_warnings(action="error"):
        index = index_of(root, 0.25)
    assert {name: len(split) for name, split in index.splits.items()} == {"train": 3000, "val": 1000}
    assert len(pickle.dumps(index.splits["train"])) < 3000 * 42  # 20 for spans and labels, 15 for each of 4000 names
