"""models.predict --model: features by weights as they are, without a run; the same bytes on any number of processes."""

import csv
import subprocess
import sys

import numpy as np
import pytest
import torch
import transformers

from tests.conftest import ROOT
from tests.end_to_end.test_predict import BATCH, PREDICT, write_image_run, write_text_run
from utils.errors import Exit


def run(*words, code=Exit.DONE):
    result = subprocess.run([sys.executable, "-m", "models.predict", *map(str, words)], cwd=ROOT, capture_output=True,
                            text=True)
    assert result.returncode == code, result.stderr
    return result


def outputs(folder):
    return ["--embeddings", folder / "features.npy", "--output", folder / "rows.csv"]


def test_the_features_of_images_are_those_of_the_run_that_has_the_weights(photos, tmp_path):
    """By the folder of a model, and by a name with a file of weights."""
    model = write_image_run(tmp_path / "run") / "model"
    for name in ("run", "folder", "file"):
        (tmp_path / name).mkdir(exist_ok=True)
    run(tmp_path / "run", photos / "val", *BATCH, *outputs(tmp_path / "run"))
    run("--model", model, photos / "val", *BATCH, *outputs(tmp_path / "folder"))
    run("--model", "resnet18", "--weights", model / "model.safetensors", "--image-size", 32, photos / "val", *BATCH,
        *outputs(tmp_path / "file"))
    of_run, of_folder, of_file = (np.load(tmp_path / name / "features.npy") for name in ("run", "folder", "file"))
    assert of_run.shape == (147, 512) and np.array_equal(of_run, of_folder)
    assert of_file.shape == of_run.shape and not np.array_equal(of_file, of_run)  # ImageNet's colours
    with (tmp_path / "folder" / "rows.csv").open() as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["input"] and len(rows) == 148 and all(len(row) == 1 for row in rows)


@pytest.mark.parametrize("columns", ["text", "text,more"])
def test_the_features_of_texts_are_means_over_tokens(texts, tmp_path, columns):
    """Padding does not count; pairs are read as pairs; a classifier's folder has its encoder."""
    folder = write_text_run(tmp_path / "run") / "model"
    result = run("--model", folder, texts / "val.csv", "--text-column", columns, *BATCH, *outputs(tmp_path))
    assert "the mean of the last layer" in result.stderr
    found = np.load(tmp_path / "features.npy")
    tokenizer, encoder = (kind.from_pretrained(folder) for kind in (
        transformers.AutoTokenizer, transformers.AutoModel))
    with (texts / "val.csv").open() as file:
        rows = list(csv.DictReader(file))
    for row, feature in zip(rows[:5], found, strict=False):
        with torch.no_grad():
            inputs = tokenizer(*(row[name] for name in columns.split(",")), return_tensors="pt", truncation=True,
                               max_length=512)
            alone = encoder.eval()(**inputs).last_hidden_state[0].mean(dim=0)
        assert np.abs(alone.numpy() - feature).max() < 1e-5
    assert len(found) == len(rows)


def test_two_processes_write_the_same_bytes(photos, texts, tmp_path, run_torchrun):
    image, text = write_image_run(tmp_path / "images") / "model", write_text_run(tmp_path / "texts") / "model"
    for place, words in (("i", ["--model", image, photos / "val"]), ("t", ["--model", text, texts / "val.csv"])):
        for processes in (1, 2):
            (tmp_path / f"{place}{processes}").mkdir()
            result = run_torchrun(processes, *words, *BATCH, *outputs(tmp_path / f"{place}{processes}"), **PREDICT)
            assert result.returncode == 0, result.text
        for name in ("features.npy", "rows.csv"):
            assert (tmp_path / f"{place}1" / name).read_bytes() == (tmp_path / f"{place}2" / name).read_bytes()


@pytest.mark.parametrize("words, code, says", [
    (["--model", "resnet18", "x"], Exit.USAGE, "--model gives features alone: add --embeddings FILE.npy and --output"),
    (["--model", "bert-small", "x.txt", "--embeddings", "e.npy", "--output", "o.csv"], Exit.USAGE,
     "bert-small is built from scratch and has no weights"),
    (["--model", "/nowhere/model", "x.txt", "--embeddings", "e.npy", "--output", "o.csv"], Exit.NO_INPUT,
     "there is no such model folder"),
    (["--weights", "w.pth", "run", "x"], Exit.USAGE, "--weights is for --model NAME"),
    (["run"], Exit.USAGE, "the following arguments are required: INPUT")])
def test_what_cannot_be_done_is_refused_in_words(words, code, says):
    assert says in run(*words, code=code).stderr
