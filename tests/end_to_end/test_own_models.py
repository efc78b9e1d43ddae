"""The examples of models/own.py as a user runs them: trained, evaluated, predicted, carried on to other labels."""

import csv
import json
import shutil

import pytest

from models import predict
from models.trial import SOURCE
from tests.harness.run_directory import records, weights_sha256
from utils.errors import Exit

SHORT = ["--max-steps", "6", "--global-batch-size", "24", "--micro-batch-size", "4", "--threads", "1", "--workers", "0",
         "--precision", "fp32", "--device", "cpu", "--eval-batch-size", "16"]
IMAGES = ["--model", "small-cnn", "--image-size", "16"]
TEXTS = ["--task", "text-classification", "--model", "bag-of-words", "--vocab-size", "200", "--max-length", "32"]
SAME = ["--precision", "fp32", "--eval-batch-size", "16", "--threads", "1"]  # else sums round differently
FIGURES = ("loss", "top1", "auroc")


@pytest.fixture(scope="module", params=["images", "texts"])
def trained(request, session_dir, run_train, photos, texts):
    """(what its command says, its data, its run): stopped after half of its steps, and finished."""
    words, data = (IMAGES, photos) if request.param == "images" else (TEXTS, texts)
    run = session_dir / f"own-{request.param}"
    for more, code in ((["--stop-after", 3], Exit.STOPPED), ([], Exit.DONE)):
        result = run_train(*words, *SHORT, "--data", data, "--run-dir", run, *more)
        assert result.returncode == code, result.text
    return words, data, run


def launched(run_torchrun, trained, folder, *words):
    command, data, _ = trained
    result = run_torchrun(2, *command, *SHORT, "--data", data, "--run-dir", folder, *words)
    assert result.returncode == 0, result.text
    return folder


@pytest.mark.rows(1)
def test_a_stop_changes_nothing(trained, run_dir, run_train):
    words, data, run = trained
    assert run_train(*words, *SHORT, "--data", data, "--run-dir", run_dir).returncode == 0
    assert weights_sha256(run_dir) == weights_sha256(run)


@pytest.mark.slow
def test_fsdp_trains_what_ddp_trains(trained, run_dir, run_torchrun):
    losses = [records(launched(run_torchrun, trained, run_dir.parent / name, "--strategy", name, "--log-every", 1))
              for name in ("ddp", "fsdp")]
    ddp, fsdp = ([record["loss"] for record in found if record["split"] == "train"] for found in losses)
    assert fsdp == pytest.approx(ddp, rel=1e-3) and len(ddp) == 6


def test_evaluations_give_the_digits_of_the_training(trained, run_train):
    words, data, run = trained
    best = json.loads((run / "summary.json").read_text())["best"]["step"]
    [recorded] = [record for record in records(run) if (record["split"], record["step"]) == ("val", best)]
    for asked in (["--run-dir", run], [*words, "--model", run / "model", "--data", data]):
        result = run_train("--eval-only", *asked, *SAME)
        assert result.returncode == 0, result.text
        assert {name: json.loads(result.out)[name] for name in FIGURES} == {name: recorded[name] for name in FIGURES}


def test_models_predict_reads_the_model_folder(trained, tmp_path):
    _, data, run = trained
    if (data / "val.csv").exists():
        inputs, count = data / "val.csv", len(list(csv.reader((data / "val.csv").open()))) - 1
    else:
        inputs, count = data / "val", len(list((data / "val").rglob("*.png")))
    shutil.copytree(run / "model", tmp_path / "model")
    assert json.loads((run / "model" / "config.json").read_text())["own_source"] == SOURCE
    assert predict.main([str(tmp_path / "model"), str(inputs), "--output", str(tmp_path / "out.csv")]) == 0
    rows = list(csv.DictReader((tmp_path / "out.csv").open()))
    assert len(rows) == count
    assert all(abs(sum(float(value) for name, value in list(row.items())[3:]) - 1) < 1e-4 for row in rows)


def test_several_labels_go_on_from_the_weights_with_a_new_head(trained, run_dir, run_train, photo_tables, text_tables):
    words, _, run = trained
    tables = text_tables if words is TEXTS else photo_tables
    result = run_train(*words, *SHORT, "--model", run / "model", "--data", tables, "--run-dir", run_dir,
                       "--label-column", "labels", "--multi-label")
    assert result.returncode == 0, result.text
    assert "new weights in the head: head." in result.out and "with the weights of" in result.out


def test_numbers_of_several_images_are_learnt(run_dir, run_train, photo_tables):
    result = run_train("--task", "image-regression", *IMAGES, *SHORT, "--data", photo_tables, "--run-dir", run_dir,
                       "--image-column", "image,mask", "--label-column", "brightness")
    assert result.returncode == 0, result.text
    assert json.loads((run_dir / "model" / "config.json").read_text())["num_images"] == 2


def test_numbers_of_texts_are_learnt(run_dir, run_train, text_tables):
    result = run_train(*TEXTS, "--task", "text-regression", *SHORT, "--data", text_tables, "--run-dir", run_dir,
                       "--text-column", "text", "--label-column", "length")
    assert result.returncode == 0, result.text


def test_published_weights_are_refused_once_on_two_processes(run_dir, run_torchrun, photos):
    result = run_torchrun(2, *IMAGES, *SHORT, "--data", photos, "--run-dir", run_dir, "--pretrained")
    assert (result.code, result.err.count("--pretrained: --model small-cnn is of models/own.py")) == (Exit.USAGE, 1)
