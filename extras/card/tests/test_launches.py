"""RUN/model/README.md: what the hub reads of it, and that what it says can be followed."""

import csv
import json
import re
import shutil
import subprocess
import sys

import huggingface_hub
import numpy as np
import pytest
import transformers

from ask.integrity import findings
from models import predict
from tests.conftest import ROOT
from tests.harness.run_directory import records, weights_sha256

SHORT = ["--max-steps", "2", "--global-batch-size", "24", "--micro-batch-size", "8", "--threads", "1", "--workers", "0",
         "--precision", "fp32", "--device", "cpu"]
TEXTS = ["--task", "text-classification", "--model", "bert-tiny", "--vocab-size", "200", "--max-length", "32"]
KINDS = {  # by name: data, words
    "images": ("photos", ["--model", "mobilenet_v3_small", "--image-size", "32", "--mean", "0.4", "0.5", "0.6"]),
    "own images": ("photos", ["--model", "small-cnn", "--image-size", "16", "--class-weights", "1,2,3",
                               "--bad-samples", "skip"]),
    "texts": ("texts", [*TEXTS, "--text-column", "text"]),
    "pairs": ("texts", [*TEXTS, "--text-column", "text,more"]),
    "masked": ("texts", ["--task", "masked-lm", *TEXTS[2:], "--text-column", "text"]),
    "numbers": ("text_tables", ["--task", "text-regression", *TEXTS[2:], "--text-column", "text", "--label-column",
                                "length"])}


@pytest.fixture(scope="module")
def runs(session_dir, run_train, request):
    """A run of each of KINDS by its name, trained when it is first asked for."""
    class Runs(dict):
        def __missing__(self, kind):
            name, words = KINDS[kind]
            self[kind] = session_dir / f"card-{kind.replace(' ', '-')}"
            result = run_train(*words, *SHORT, "--data", request.getfixturevalue(name), "--run-dir", self[kind])
            assert result.returncode == 0, result.text
            return self[kind]

    return Runs()


def card_of(run):
    return huggingface_hub.ModelCard.load(run / "model" / "README.md")


def blocks_of(run):
    """What is indented: commands and code."""
    _, _, text = (run / "model" / "README.md").read_text().partition("\n---\n")
    return [re.sub("(?m)^    ", "", block).strip() for block in re.findall(r"(?m)(?:^    .*\n)+", text)]


def pipeline_of(run):
    """What the line for transformers makes."""
    names = {"transformers": transformers, "FOLDER": str(run / "model")}
    exec(blocks_of(run)[1], names)
    return names["predict"]


def test_a_share_has_its_interval_and_the_values_that_made_it_are_named(runs):
    text = (runs["images"] / "model" / "README.md").read_text()
    [low, high] = re.search(r"\| top1 \| [\d.]+ \(([\d.]+) to ([\d.]+)\) \|", text).groups()
    assert 0 <= float(low) < float(high) <= 1 and "its figures are optimistic" in text
    resolved = json.loads((runs["images"] / "auto.json").read_text())
    assert f"| learning rate | {resolved['lr']} |" in text and "| seed | 0 |" in text and resolved["data"] in text
    pairs = (runs["pairs"] / "model" / "README.md").read_text()
    assert 'predict({"text": "a text", "text_pair": "another text"})' in pairs


@pytest.mark.rows(3)
@pytest.mark.parametrize("kind", KINDS)
def test_the_hubs_metadata_has_the_figures_of_the_best_evaluation(kind, runs):
    data = card_of(runs[kind]).data
    best = json.loads((runs[kind] / "summary.json").read_text())["best"]
    [record] = [each for each in records(runs[kind]) if (each["split"], each["step"]) == ("val", best["step"])]
    found = {each.metric_name: each.metric_value for each in data.eval_results}
    assert found and found == {name: record[name] for name in found} and found[best["metric"]] == best["value"]
    assert {each.metric_type for each in data.eval_results} == set(data.metrics)
    assert data.license == "unknown" and {each.dataset_split for each in data.eval_results} == {"val"}
    tags = {"images": "image-classification", "own images": "image-classification", "masked": "fill-mask"}
    assert data.pipeline_tag == tags.get(kind, "text-classification")
    libraries = {"images": "torchvision", "own images": "lockstep"}
    assert data.library_name == libraries.get(kind, "transformers")


@pytest.mark.rows(3)
@pytest.mark.parametrize("kind", KINDS)
def test_no_path_stands_in_the_card(kind, runs, session_dir):
    assert str(session_dir) not in (runs[kind] / "model" / "README.md").read_text()


def test_the_card_depends_on_neither_place_nor_processes(runs, run_torchrun, run_dir, photos):
    data, words = run_dir.parent / "elsewhere" / "photos", KINDS["images"][1]
    shutil.copytree(photos, data)
    result = run_torchrun(2, *words, *SHORT, "--data", data, "--run-dir", run_dir, "--strategy", "exact")
    assert result.returncode == 0, result.text
    ours, theirs = ((run / "model" / "README.md").read_text() for run in (run_dir, runs["images"]))
    assert re.sub(r" --strategy exact", "", re.sub(r"\d\.\d{4,}", "", ours)) == re.sub(r"\d\.\d{4,}", "", theirs)


@pytest.mark.rows(1)
@pytest.mark.parametrize("kind", ["images", "own images", "texts", "pairs"])
def test_the_command_for_predictions_runs(kind, runs, request):
    command = blocks_of(runs[kind])[0]
    assert command == "python -m models.predict FOLDER INPUT"
    data = request.getfixturevalue(KINDS[kind][0])
    given = data / "val.csv" if (data / "val.csv").exists() else data / "val"
    words = command.replace("python", sys.executable).replace("INPUT", str(given))
    words = words.replace("FOLDER", str(runs[kind] / "model")).split()
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 148, done.stderr


def test_the_command_of_masked_lm_trains_from_its_weights(runs, text_tables, run_dir):
    command = blocks_of(runs["masked"])[0]
    assert command == "python train.py --task text-classification --model FOLDER --data DATA"
    words = command.replace("python", sys.executable).replace("DATA", str(text_tables))
    words = [*words.replace("FOLDER", str(runs["masked"] / "model")).split(), *SHORT, "--run-dir", str(run_dir)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "weights of" in done.stdout, done.stdout + done.stderr


def test_what_decides_which_samples_are_trained_on_is_in_the_command(runs):
    assert [("--bad-samples skip" in blocks_of(runs[kind])[-1]) for kind in ("own images", "images")] == [True, False]


@pytest.mark.parametrize("kind", ["texts", "pairs"])
def test_the_line_for_transformers_gives_the_same_predictions(kind, runs, tmp_path, capsys):
    pair = {"text": "a text", "text_pair": "another one"}
    told = np.ravel(pipeline_of(runs[kind])(pair if kind == "pairs" else "a text")).tolist()
    (tmp_path / "in.txt").write_text("a text\tanother one\n" if kind == "pairs" else "a text\n")
    predict.main([str(runs[kind]), str(tmp_path / "in.txt")])
    [row] = csv.DictReader(capsys.readouterr().out.splitlines())
    assert {one["label"]: pytest.approx(one["score"], abs=1e-5) for one in told} == {
        name: float(row[name]) for name in list(row)[3:]}


def test_the_line_for_transformers_fills_masks(runs):
    unmask = pipeline_of(runs["masked"])
    assert "token_str" in unmask(f"a {unmask.tokenizer.mask_token} text")[0]


def test_transformers_is_not_named_where_it_would_say_something_else(runs):
    """It gives a regression's outputs in standard deviations, and does not know networks of models/own.py."""
    for kind in ("numbers", "images", "own images"):
        assert "transformers.pipeline" not in (runs[kind] / "model" / "README.md").read_text()


@pytest.mark.rows(1)
@pytest.mark.parametrize("kind", ["images", "own images", "texts"])
def test_the_command_that_made_it_makes_it_again(kind, runs, request, tmp_path):
    """With the data beside, under their name."""
    (tmp_path / KINDS[kind][0]).symlink_to(request.getfixturevalue(KINDS[kind][0]))
    command = blocks_of(runs[kind])[-1]
    command = command.replace("python train.py", f"{sys.executable} {ROOT / 'train.py'}")
    done = subprocess.run(f"{command} --device cpu --run-dir again", shell=True,
                          cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert weights_sha256(tmp_path / "again") == weights_sha256(runs[kind])
    assert (tmp_path / "again/model/README.md").read_bytes() == (runs[kind] / "model/README.md").read_bytes()


def test_its_owner_may_edit_the_card(runs, run_dir):
    run = shutil.copytree(runs["images"], run_dir)
    card = run / "model" / "README.md"
    card.write_text(card.read_text().replace("license: unknown", "license: mit"))
    assert findings(run) == []
    card.unlink()
    assert findings(run) == []


def test_strange_names_of_data_do_no_harm(run_dir, run_train, photos):
    data = run_dir.parent / "<script>alert(1)<script> `x`\n# not a heading: é\r# not one\r\n# not a heading"
    data.symlink_to(photos)
    result = run_train(*KINDS["own images"][1], *SHORT, "--data", data, "--run-dir", run_dir)
    assert result.returncode == 0, result.text
    text, card = (run_dir / "model" / "README.md").read_text(), card_of(run_dir)
    assert card.data.eval_results[0].dataset_name.startswith("<script>")
    outside = re.sub("(?m)^    .*\n", "", text.partition("\n---\n")[2])
    assert "<script>" not in outside and "# not" not in outside


def test_the_card_counts_the_samples_that_could_be_read(run_dir, run_train, photos):
    data = shutil.copytree(photos, run_dir.parent / "photos")
    next((data / "val").rglob("*.png")).write_bytes(b"")
    result = run_train(*KINDS["own images"][1], *SHORT, "--data", data, "--run-dir", run_dir, "--bad-samples", "skip")
    assert result.returncode == 0, result.text
    assert "\n146 validation samples:" in (run_dir / "model" / "README.md").read_text()
