"""--check: all that was planted is found, on any number of processes, and nothing on the disk is touched."""

import csv
import json
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.harness.run_directory import trained_steps, written
from utils.errors import Exit
from utils.rundir.lock import is_locked

SMALL = ["--check", "--model", "mobilenet_v3_small", "--image-size", 32, "--global-batch-size", 24, "--threads", 1]
TEXT = ["--check", "--model", "bert-tiny", "--vocab-size", 200, "--max-length", 8, "--threads", 1]
NEAR = {"near leak", "near copy"}


@pytest.fixture(scope="module")
def pictures(session_dir) -> Path:
    """Soft shapes of three tints, 96 x 72 px: 20 of each tint to train on and 10 to evaluate; no two are alike."""
    root, generator = session_dir / "pictures", np.random.default_rng(0)
    for split, count in (("train", 20), ("val", 10)):
        for tint in range(3):
            folder = root / split / f"tint{tint}"
            folder.mkdir(parents=True)
            for number in range(count):
                small = generator.integers(0, 160, (6, 8, 3)).astype(np.uint8)
                small[..., tint] += 95
                Image.fromarray(small).resize((96, 72), Image.Resampling.BICUBIC).save(
                    folder / f"{number:02}.jpg", quality=92)
    return root


@pytest.fixture
def own_pictures(pictures, run_dir) -> Path:
    """A copy that the test may spoil."""
    return Path(shutil.copytree(pictures, run_dir.parent / "pictures"))


@pytest.fixture
def checked(run_dir, run_train, run_torchrun):
    """checked(*words, processes=None): (what --output holds, the Result)."""
    def check(*words, processes=None):
        words = [*words, "--run-dir", run_dir, "--output", run_dir.parent / "check.json"]
        result = run_torchrun(processes, *words) if processes else run_train(*words)
        assert not run_dir.exists() and not [*run_dir.parent.glob("lockstep-*")], result.text
        return json.loads((run_dir.parent / "check.json").read_text()), result
    return check


def plant(root: Path) -> dict[str, set[str]]:
    """Spoil the pictures; returns what must be found, by kind: the names of the samples."""
    train, val = (sorted(root.glob(f"{split}/*/*.jpg")) for split in ("train", "val"))
    made = {"leak": set(), "near leak": set(), "conflict": set(), "unreadable": set(), "one colour": set()}
    for number, path in enumerate(train[:30]):  # ten of each: the same bytes, encoded again, resized
        place, image = root / "val" / path.parent.name, Image.open(path)
        if number % 3 == 0:
            copy = place / f"exact{number}.jpg"
            shutil.copy(path, copy)
        elif number % 3 == 1:
            copy = place / f"again{number}.jpg"
            image.save(copy, quality=60)
        else:
            copy = place / f"resized{number}.png"
            image.resize((64, 48)).save(copy)
        made["near leak" if number % 3 else "leak"].add(copy)
    for path in train[30:32]:  # the same pixels in another file
        Image.open(path).save(copy := root / "val" / path.parent.name / f"{path.stem}-pixels.png")
        made["leak"].add(copy)
    for path in train[40:43]:
        copy = root / "train" / ("tint0" if path.parent.name != "tint0" else "tint2") / f"other-{path.name}"
        shutil.copy(path, copy)
        made["conflict"].add(max(path, copy))
    for path in val[:5]:
        path.write_bytes(path.read_bytes()[:-200])
        made["unreadable"].add(path)
    Image.new("RGB", (96, 72), "red").save(blank := root / "train/tint0/blank.png")
    made["one colour"].add(blank)
    return {kind: {str(path.relative_to(root)) for path in paths} for kind, paths in made.items()}


def samples(found, kind) -> set[str]:
    """The names of the samples of a kind, without their labels and what they are compared with."""
    return {each.partition(" (")[0].partition(": ")[0] for each in found["findings"][kind]["samples"]}


def test_all_that_was_planted_is_found_and_nothing_else(own_pictures, checked):
    planted = plant(own_pictures)
    found, result = checked(*SMALL, "--data", own_pictures)
    unreadable = {str(Path(name).relative_to(own_pictures)) for name in samples(found, "unreadable")}
    assert {kind: samples(found, kind) for kind in found["findings"]} | {"unreadable": unreadable} == planted | {
        "copy": planted["conflict"]}, result.text
    assert found["findings"]["leak"]["exact"] == 10
    assert "in val, and in train, too: 12 samples, 10 of them byte for byte;" in result.out

    # as a training would end, and in its words
    assert result.returncode == Exit.BAD_DATA, result.text
    assert "cannot read " in result.err and "(and 4 more); repair or restore the file" in result.err, result.text


@pytest.mark.long
def test_images_that_are_left_out_are_no_finding_but_what_is_like_them_is(own_pictures, run_dir, checked):
    planted, names = plant(own_pictures), run_dir.parent / "names"
    for name in planted["unreadable"]:
        (own_pictures / name).unlink()
    bad = sorted(own_pictures.glob("train/*/*.jpg"))[-1]
    bad.write_text("no image")
    names.write_text("\n".join([*planted["conflict"], str(bad.relative_to(own_pictures))]))
    found, result = checked(*SMALL, "--data", own_pictures, "--without", names)
    assert result.returncode == 0 and not {"unreadable", "conflict"} & found["findings"].keys(), result.text
    assert len(samples(found, "left out")) == len(planted["conflict"])


@pytest.mark.long
@pytest.mark.parametrize("processes", [2, 3])
def test_the_data_are_the_same_on_any_number_of_processes(own_pictures, checked, processes):
    plant(own_pictures)
    words = [*SMALL, "--data", own_pictures, "--bad-samples", "skip"]
    (one, first), (many, second) = checked(*words), checked(*words, processes=processes)
    assert (first.returncode, second.returncode) == (0, 0), first.text + second.text
    measured = one.pop("machine"), many.pop("machine")
    assert all(each["loaded_per_s"] > 0 and each["computed_per_s"] > 0 and each["run_s"] > 0 for each in measured)
    assert measured[0]["sum_s"] == 0 < measured[1]["sum_s"]
    one.pop("notes"), many.pop("notes")  # they name the number of processes
    assert one == many and one["samples"] == {"train": 64, "val": 62}
    assert one["classes"] == {"train": {"tint0": 24, "tint1": 20, "tint2": 20},
                              "val": {"tint0": 30, "tint1": 22, "tint2": 10}}


@pytest.mark.long
def test_untouched_data_have_at_most_candidates(pictures, checked):
    found, result = checked(*SMALL, "--data", pictures)
    assert (set(found["findings"]) <= NEAR, result.returncode) == (True, 0), result.text
    found, result = checked("--check")
    assert (set(found["findings"]) <= NEAR, result.returncode) == (True, 0), result.text
    assert found["samples"] == {"train": 1442, "val": 355} and "notes that a training would print:" in result.out
    assert len(result.out.splitlines()) <= 40, result.out


@pytest.mark.long
def test_a_training_beside_it_and_a_finished_run_stay_as_they_are(run_dir, run_train, start_torchrun):
    words = ["--run-dir", run_dir, "--epochs", 400]
    training = start_torchrun(None, *words)
    training.wait_for(lambda: trained_steps(run_dir) > 3, "some steps")
    result = run_train("--check", *words)
    assert result.returncode == 0 and is_locked(run_dir), result.text
    training.process.send_signal(signal.SIGINT)
    assert training.wait().returncode == Exit.STOPPED
    before = written(run_dir)
    result = run_train("--check", *words, "--fresh")
    assert result.returncode == 0 and "this machine:" in result.out, result.text
    assert written(run_dir) == before


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_check_that_is_stopped_leaves_nothing(pictures, run_dir, start_torchrun, number):
    live = start_torchrun(None, *SMALL, "--data", pictures, "--run-dir", run_dir / "sub" / "run", real=True)
    live.wait_for(lambda: any(run_dir.parent.glob("lockstep-*/run/starts.jsonl")), "the measuring")
    live.process.send_signal(number)
    result = live.wait()
    assert result.returncode == (Exit.STOPPED if number == signal.SIGINT else -9), result.text
    deadline = time.monotonic() + 20
    while [*run_dir.parent.glob("lockstep-*")]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not run_dir.exists()


@pytest.mark.parametrize("words", [["--eval-only"], ["--output", "check.csv"], ["--split", "test"]])
def test_what_does_not_go_together_is_refused(run_dir, run_train, words):
    result = run_train("--check", *words, "--run-dir", run_dir)
    code = Exit.NO_INPUT if words == ["--eval-only"] else Exit.USAGE  # the folder has no run
    assert result.returncode == code and words[0] in result.err and not run_dir.exists(), result.text


# --- tables


def write_table(path: Path, rows: list[list[str]]) -> Path:
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)
    return path


@pytest.fixture
def sentences(run_dir) -> dict[str, list[list[str]]]:
    """Rows of text and label: 60 of train and 30 of val; no two are the same."""
    generator, made = np.random.default_rng(0), {}
    for split, count in (("train", 60), ("val", 30)):
        made[split] = [[" ".join(generator.choice([*"abcdefghij"], 8)) + f" {split} {number}", f"topic{number % 3}"]
                       for number in range(count)]
    return made


def tables(folder: Path, sentences, header=("text", "label")) -> Path:
    for split, rows in sentences.items():
        write_table(folder / f"{split}.csv", [[*header], *rows])
    return folder


@pytest.mark.rows(1)
@pytest.mark.parametrize("task", ["text-classification", "masked-lm"])
def test_texts_that_differ_in_case_and_spaces_alone_are_the_same(run_dir, sentences, checked, task):
    train, val = sentences["train"], sentences["val"]
    val += [list(row) for row in train[:10]]
    val += [[row[0].upper().replace(" ", "  ") + "\u00a0", row[1]] for row in train[10:20]]
    train += [[row[0], "topic9"] for row in val[:3]] + [["- --", "topic1"]]
    data = tables(run_dir.parent / "tables", sentences)
    found, result = checked(*TEXT, "--task", task, "--data", data)
    count = {kind: len(each["samples"]) for kind, each in found["findings"].items()}
    conflicts = {"conflict": 3} if task == "text-classification" else {}
    assert (count, result.returncode) == ({"leak": 23, "one character": 1} | conflicts, 0), result.text
    assert found["findings"]["leak"]["exact"] == 13 and ": 23 samples, 13 of them byte for byte;" in result.out
    assert ("texts have more than --max-length 8 tokens" in result.out) and "no problem found" not in result.out


def test_texts_like_one_that_is_left_out_are_listed_and_no_conflict(run_dir, sentences, checked):
    train, names = sentences["train"], run_dir.parent / "names"
    train.insert(0, [train[9][0].upper(), "topic1"])  # before the other one, which has the label topic0
    names.write_text("0\n")
    data = tables(run_dir.parent / "tables", sentences)
    found, result = checked(*TEXT, "--task", "text-classification", "--data", data, "--without", names)
    assert [*found["findings"]] == ["left out"], result.text
    assert "similar to one that --without leaves out: 1 sample; look at them" in result.out


def test_two_measurements_of_one_text_are_no_conflict(run_dir, sentences, checked):
    for rows in sentences.values():
        rows[:] = [[text, str(number)] for number, (text, _) in enumerate(rows)]
    sentences["train"].append([sentences["train"][0][0], "99"])
    data = tables(run_dir.parent / "tables", sentences, ("text", "label"))
    found, result = checked(*TEXT, "--task", "text-regression", "--data", data)
    assert (set(found["findings"]), found["classes"]["train"]) == ({"copy"}, {}), result.text


def test_a_group_in_both_splits_is_named_and_a_class_of_val_alone_refused(run_dir, sentences, checked, run_train):
    for split, rows in sentences.items():
        rows[:] = [[*row, f"{split}{number % 5}"] for number, row in enumerate(rows)]
    sentences["val"][0][2] = "train3"
    folder, words = run_dir.parent / "tables", [*TEXT, "--task", "text-classification", "--group-column", "patient"]
    data = tables(folder, sentences, ("text", "label", "patient"))
    _, result = checked(*words, "--data", data)
    assert "1 of the 5 groups of train (patient) occur in another split, too, for example train3" in result.out

    # as a training does it, in the same words
    sentences["val"][0][1] = "unheard"
    data = tables(folder, sentences, ("text", "label", "patient"))
    refused = [run_train(*kind, *words[1:], "--data", data, "--run-dir", run_dir) for kind in ([], ["--check"])]
    assert [each.returncode for each in refused] == [Exit.BAD_DATA] * 2
    assert refused[0].err == refused[1].err and "unheard does not occur in train" in refused[0].err
    assert not run_dir.exists()


def test_several_labels_are_counted_each(photo_tables, checked):
    found, result = checked(*SMALL, "--data", photo_tables, "--multi-label", "--label-column", "labels")
    assert result.returncode == 0 and found["classes"]["train"] == {"odd": 28, "tint0": 17, "tint1": 19, "tint2": 21}


def test_names_that_no_terminal_shows_are_escaped(own_pictures, checked):
    shutil.copy(own_pictures / "train/tint0/00.jpg", own_pictures / "val/tint0/a\nb\udcff.jpg")
    found, result = checked(*SMALL, "--data", own_pictures)
    assert result.returncode == 0 and r"'val/tint0/a\nb\udcff.jpg (tint0) ~ train" in result.out, result.text
    assert found["findings"]["leak"]["samples"] == [
        "val/tint0/a\nb\udcff.jpg (tint0) ~ train/tint0/00.jpg (tint0)"]
