"""ask.folds: every sample is predicted once by a run that has not seen it; a stop or a kill changes no figure."""

import csv
import json
import os
import signal

import pytest

from tests.harness.launches import HeldImage, assert_no_process, image_of
from tests.harness.run_directory import records, status
from utils.errors import Exit

FAST = ["--global-batch-size", "12", "--threads", "1", "--workers", "0", "--precision", "fp32", "--log-every", "1"]
IMAGES = [*FAST, "--model", "small-cnn", "--image-size", "16", "--epochs", "2"]
TEXTS = [*FAST, "--task", "text-classification", "--model", "bert-tiny", "--vocab-size", "200", "--max-length", "32",
         "--max-steps", "3"]
FOLDS = {"script": "ask/folds.py"}


def rows_of(file):
    with file.open(newline="") as opened:
        return [*csv.DictReader(opened)]


def lines_of(folder, split):
    return [json.loads(line) for line in (folder / f"{split}.jsonl").read_text().splitlines()]


@pytest.fixture
def folder_of(tmp_path):
    """folder_of(result): the only folder with results."""
    def found(result, number=1):
        assert result.returncode == 0, result.text
        folders = sorted(tmp_path.glob("folds-*"))
        assert len(folders) == number, folders
        return folders[0] if number == 1 else folders
    return found


@pytest.fixture(scope="module")
def done(session_dir, run_train, photos):
    """(words, the folder with the results of two folds of the photos)."""
    words = ["--folds", "2", "--output", session_dir / "folds-done", "--", *IMAGES, "--data", photos]
    result = run_train(*words, **FOLDS)
    assert result.returncode == 0, result.text
    [folder] = (session_dir / "folds-done").iterdir()
    return words, folder


def test_each_sample_is_predicted_once_by_a_run_that_has_not_seen_it(done, photos):
    _, folder = done
    rows = rows_of(folder / "predictions.csv")
    paths = [str(path) for path in sorted((photos / "train").rglob("*.png"))]
    assert sorted(int(row["sample"]) for row in rows) == [*range(len(paths))]
    for row in rows:
        seen = {line["image"] for line in lines_of(folder / f"seed0-fold{row['fold']}-data", "train")}
        assert row["input"] == paths[int(row["sample"])] and row["input"] not in seen
    assert [len(lines_of(folder / f"seed0-fold{number}-data", "val")) for number in (1, 2)] == [29, 28]


def test_the_last_epoch_counts_and_no_other_was_evaluated(done):
    _, folder = done
    for number in (1, 2):
        evaluated = [record for record in records(folder / f"seed0-fold{number}") if record["split"] == "val"]
        assert [record["epoch"] for record in evaluated] == [2]
        rows = [row for row in rows_of(folder / "predictions.csv") if row["fold"] == str(number)]
        right = sum(row["prediction"] == row["label"] for row in rows)
        assert right / len(rows) == pytest.approx(evaluated[0]["top1"])
    runs, [top1] = rows_of(folder / "runs.csv"), [
        row for row in rows_of(folder / "figures.csv") if row["figure"] == "top1"]
    assert float(top1["mean"]) == pytest.approx(sum(float(run["top1"]) for run in runs) / 2)
    assert [*top1] == ["figure", "mean", "std"]


def test_a_second_start_trains_nothing_and_says_the_same(done, run_train):
    words, folder = done
    before = {path.name: path.read_bytes() for path in folder.glob("*.csv")}
    starts = [len((folder / f"seed0-fold{number}" / "starts.jsonl").read_text().splitlines()) for number in (1, 2)]
    result = run_train(*words, **FOLDS)
    assert result.returncode == 0 and str(folder / "figures.csv") in result.out, result.text
    assert "2 runs are too few for an interval; 5 are enough" in result.out
    assert {path.name: path.read_bytes() for path in folder.glob("*.csv")} == before
    assert starts == [len((folder / f"seed0-fold{number}" / "starts.jsonl").read_text().splitlines())
                      for number in (1, 2)]


@pytest.mark.slow
def test_ctrl_c_stops_the_run_and_the_same_command_continues(done, start_torchrun, own_photos, tmp_path, folder_of):
    held = HeldImage(image_of(own_photos, "train", 0))
    words = ["--folds", "2", "--output", tmp_path, "--", *IMAGES, "--data", own_photos]
    live = start_torchrun(None, *words, **FOLDS, real=True)
    live.wait_for(held.is_wanted, "the first run reads an image")
    live.process.send_signal(signal.SIGINT)
    held.give()
    result = live.wait()
    assert (result.returncode, result.code) == (Exit.STOPPED, Exit.STOPPED), result.text
    assert "with exit code 75; the same command continues" in result.err
    [run] = tmp_path.glob("folds-*/seed0-fold1")
    assert (status(run)["state"], status(run)["message"]) == ("stopped", "SIGINT")
    folder = folder_of(start_torchrun(None, *words, **FOLDS).wait())
    assert (folder / "figures.csv").read_text() == (done[1] / "figures.csv").read_text()


@pytest.mark.slow
def test_a_run_does_not_outlive_the_command(start_torchrun, own_photos, tmp_path):
    held = HeldImage(image_of(own_photos, "train", 0))
    live = start_torchrun(None, "--folds", "2", "--output", tmp_path, "--", *IMAGES, "--data", own_photos, **FOLDS,
                          real=True)
    live.wait_for(held.is_wanted, "the first run reads an image")
    live.process.kill()
    held.give()
    live.process.wait()
    assert_no_process(live, within_s=20)
    [run] = tmp_path.glob("folds-*/seed0-fold1")
    assert status(run)["state"] == "stopped"


@pytest.mark.slow
def test_an_inner_fold_chooses_the_epoch_the_outer_one_is_evaluated_once(run_train, photo_tables, tmp_path,
                                                                             folder_of):
    folder = folder_of(run_train(
        "--folds", "3", "--inner", "--output", tmp_path, "--", *IMAGES, "--task", "image-regression", "--data",
        photo_tables, "--label-column", "brightness", "--early-stop-patience", "1", **FOLDS))
    parts = [{split: {os.path.normpath(line["image"]) for line in lines_of(folder / f"seed0-fold{number}-data", split)}
              for split in ("train", "val", "test")} for number in (1, 2, 3)]
    for number, part in enumerate(parts):
        assert len(part["train"] | part["val"] | part["test"]) == sum(map(len, part.values())) == 57
        assert part["val"] == parts[(number + 1) % 3]["test"]
        rows = [row for row in rows_of(folder / "predictions.csv") if row["fold"] == str(number + 1)]
        assert {row["input"] for row in rows} == part["test"]
        error = sum(abs(float(row["brightness"]) - float(row["brightness_prediction"])) for row in rows) / len(rows)
        assert float(rows_of(folder / "runs.csv")[number]["mae"]) == pytest.approx(error, rel=1e-4)


@pytest.mark.slow
def test_shares_add_up_and_settings_are_compared_on_the_same_folds(run_train, texts, tmp_path, folder_of):
    words = ["--output", tmp_path, "--folds", "2", "--", *TEXTS, "--data", texts, "--lr", "1e-3", "--against", "--lr",
             "1e-5"]
    for part in (1, 2):
        result = run_train("--part", part, 2, *words, **FOLDS)
        assert result.returncode == 0 and "figures" not in result.out, result.text
    folders = folder_of(run_train(*words, **FOLDS), 2)
    one, two = sorted(folders, key=lambda folder: (folder / "differences.csv").exists())
    for number in (1, 2):
        name = f"seed0-fold{number}-data"
        assert lines_of(one / name, "val") == lines_of(two / name, "val")
    for row in rows_of(two / "differences.csv"):
        first, second = ([float(run[row["figure"]]) for run in rows_of(folder / "runs.csv")] for folder in (one, two))
        assert float(row["mean"]) == pytest.approx(sum(second) / 2 - sum(first) / 2, abs=1e-9)
        assert 0 <= float(row["p"]) <= 1


ONE_OF_C = "text,label\n" + "".join(f"text {i},{'ab'[i % 2]}\n" for i in range(20)) + "last,c\n"


@pytest.mark.parametrize("words, code, said", [
    (["--folds", "1"], Exit.USAGE, "give at least 2 --folds"),
    (["--folds", "2", "--inner"], Exit.USAGE, "give at least 3 --folds"),
    (["--part", "3", "2"], Exit.USAGE, "--part K N with K from 1 to N"),
    (["--lr", "1"], Exit.USAGE, "[-- SETTINGS [--against SETTINGS]]"),
    (["--", "--learning-rate", "1"], Exit.USAGE, "train.py: --learning-rate: use --lr"),
    (["--", "--task", "masked-lm"], Exit.USAGE, "folds are for the tasks with labels"),
    (["--", "--run-dir", "x"], Exit.USAGE, "each run has a directory of its own"),
    (["--", "--ema-decay", "0.9"], Exit.USAGE, "with --inner another fold chooses it"),
    (["--folds", "30", "--", *TEXTS, "--data", "TABLE"], Exit.USAGE, "there are fewer samples or groups"),
    (["--", *TEXTS, "--data", "TABLE"], Exit.BAD_DATA, "has no sample of c"),
    (["--", *TEXTS, "--data", "TABLE", "--against", "--seed", "1"], Exit.BAD_DATA, "has no sample of c"),
    (["--", "--data", "nowhere"], Exit.NO_INPUT, "there is no such folder")])
def test_what_cannot_be_folded_is_said_before_anything_starts(run_train, tmp_path, words, code, said):
    (tmp_path / "t.csv").write_text(ONE_OF_C)
    words = [tmp_path / "t.csv" if word == "TABLE" else word for word in words]
    result = run_train("--output", tmp_path / "runs", *words, **FOLDS)
    assert (result.returncode, (tmp_path / "runs").exists()) == (code, False), result.text
    assert said in result.err and "Traceback" not in result.err, result.text


def test_other_folds_cannot_be_compared(run_train, photos, tmp_path):
    result = run_train("--output", tmp_path / "runs", "--", "--data", photos, "--against", "--seed", "1", **FOLDS)
    assert result.returncode == Exit.USAGE and "the folds cannot be compared" in result.err, result.text


@pytest.mark.parametrize("against", [[], ["--workers", "1"]])
def test_settings_that_change_no_run_are_not_compared(run_train, photos, tmp_path, against):
    result = run_train("--output", tmp_path / "runs", "--", "--data", photos, "--against", *against, **FOLDS)
    assert (result.returncode, (tmp_path / "runs").exists()) == (Exit.USAGE, False), result.text
    assert "the settings after it change no run" in result.err, result.text


def test_it_is_started_without_torchrun(run_train, tmp_path):
    result = run_train("--output", tmp_path / "runs", env={"LOCAL_RANK": "0"}, **FOLDS)
    assert result.returncode == Exit.USAGE and "without torchrun" in result.err, result.text
