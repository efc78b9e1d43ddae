"""Runs on tables: several labels, regression, two images; the same files on any number of processes; bad tables."""

import csv
import json

import numpy as np
import pytest

from models import predict
from tests.harness.run_directory import records
from utils.errors import Exit

SMALL = ["--model", "mobilenet_v3_small", "--image-size", "32", "--max-steps", "2", "--global-batch-size", "24",
         "--micro-batch-size", "8", "--threads", "1", "--workers", "0", "--log-every", "1"]
TEXT = ["--model", "bert-tiny", "--vocab-size", "200", "--max-length", "32", *SMALL[4:]]
# The tutorials' case: an image with its mask, L1, Adam with betas of its own, a cosine.
TUTORIAL = [*SMALL, "--task", "image-regression", "--image-column", "image,mask", "--label-column", "brightness",
            "--loss", "l1", "--optimizer", "adam", "--betas", "0.9", "0.95", "--schedule", "cosine",
            "--lr", "1e-3", "--warmup-steps", "0", "--max-steps", "6"]


@pytest.fixture
def predicted(capsys):
    """predicted(run, source): the lines that models.predict prints."""
    def lines(run, source):
        assert predict.main([str(run), str(source), "--device", "cpu"]) == Exit.DONE
        return capsys.readouterr().out.splitlines()
    return lines


@pytest.fixture(scope="module")
def tutorial(session_dir, run_train, run_torchrun, photo_tables):
    """The run directories on one and on two processes."""
    runs = {}
    for processes in (1, 2):
        runs[processes] = session_dir / f"tutorial-{processes}"
        start = run_train if processes == 1 else lambda *words: run_torchrun(2, *words)
        result = start(*TUTORIAL, "--strategy", "exact", "--data", photo_tables, "--run-dir", runs[processes])
        assert result.returncode == 0, result.text
    return runs


@pytest.mark.long
def test_the_tutorials_regression_all_reduces_both_losses(tutorial):
    one, two = ([(record["split"], record["step"], record.get("loss")) for record in records(tutorial[processes])]
                for processes in (1, 2))
    assert one == two and [step for split, step, _ in one if split == "val"] == [3, 6]
    last = [record for record in records(tutorial[2]) if record["split"] == "train"][-1]
    assert last["lr"] == pytest.approx(1e-3 * (1 + np.cos(np.pi * 5 / 6)) / 2)


def test_the_files_of_an_evaluation_are_the_same_on_2_processes(tutorial):
    for name in ("samples.csv", "targets.json"):
        assert (tutorial[1] / "eval" / name).read_bytes() == (tutorial[2] / "eval" / name).read_bytes()


def test_each_sample_has_its_target_as_it_is_in_the_table(tutorial, photo_tables):
    rows = list(csv.DictReader((tutorial[2] / "eval" / "samples.csv").open()))
    table = list(csv.DictReader((photo_tables / "val.csv").open()))
    assert [float(row["brightness"]) for row in rows] == pytest.approx(
        [float(row["brightness"]) for row in table], rel=1e-8)
    errors = [abs(float(row["brightness"]) - float(row["brightness_prediction"])) for row in rows]
    figures = json.loads((tutorial[2] / "eval" / "targets.json").read_text())
    assert figures["targets"]["brightness"]["mae"] == pytest.approx(np.mean(errors), rel=1e-5)


def test_predict_gives_what_the_evaluation_wrote(tutorial, photo_tables, predicted):
    evaluated = list(csv.DictReader((tutorial[2] / "eval" / "samples.csv").open()))
    of_table = list(csv.DictReader(predicted(tutorial[2], photo_tables / "val.csv")))
    of_pair = list(csv.DictReader(predicted(tutorial[2], evaluated[0]["input"])))
    for found, expected in ((of_table, evaluated), (of_pair, evaluated[:1])):
        assert [float(row["brightness"]) for row in found] == pytest.approx(
            [float(row["brightness_prediction"]) for row in expected], rel=1e-4)


def test_eval_only_repeats_the_figures(tutorial, run_train):
    result = run_train("--eval-only", "--run-dir", tutorial[2])
    assert result.returncode == 0, result.text
    best = json.loads((tutorial[2] / "summary.json").read_text())["best"]
    assert json.loads(result.out)["loss"] == best["value"]


def test_several_labels_of_texts_train_and_are_predicted(text_tables, run_dir, run_train, predicted):
    result = run_train(*TEXT, "--task", "text-classification", "--data", text_tables, "--text-column", "text",
                       "--label-column", "labels", "--multi-label", "--precision", "fp32", "--run-dir", run_dir)
    assert result.returncode == 0, result.text
    assert "map 0." in result.out and "a random order 0." in result.out
    header, *rows = predicted(run_dir, text_tables / "val.csv")
    assert header == "input,prediction,long,topic0,topic1,topic2" and len(rows) == 147
    with (run_dir / "eval" / "samples.csv").open(newline="") as file:
        evaluated = [[float(value) for value in row["probability"].split("|") if value] for row in csv.DictReader(file)]
    of_predicted = [[value for value in map(float, row.split(",")[2:]) if value >= 0.5] for row in rows]
    assert of_predicted == [pytest.approx(row, abs=1e-5) for row in evaluated] and any(of_predicted)


def test_a_bad_row_is_one_message_before_training_on_2_processes(photo_tables, run_dir, run_torchrun):
    result = run_torchrun(2, *TUTORIAL, "--data", photo_tables, "--run-dir", run_dir, "--label-column", "label")
    assert result.code == Exit.BAD_DATA, result.text
    assert result.err.count("train.csv line 2: label is tint0, which is not a finite number") == 1
    assert not run_dir.exists()
