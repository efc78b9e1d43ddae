"""A run that begins with a fitted head: the same bits on any number of processes, through kills; step 0 is a position.

It fine-tunes the model of another run, whose classes have other names.
"""

import json
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import ROOT
from tests.harness.run_directory import newest_checkpoint, outcome, records, status, trained_steps
from utils.errors import Exit
from utils.rundir.chain import read_lines
from utils.rundir.checkpoint_folder import CheckpointFolder, step_of

WORDS = {  # BatchNorm; length buckets and dropout
    "image-classification": ["--model", "small-cnn", "--image-size", "32"],
    "text-classification": [
        "--max-length", "32", "--text-column", "text", "--model", "bert-tiny", "--vocab-size", "200"]}
LENGTH = ["--global-batch-size", "24", "--epochs", "2", "--threads", "1", "--workers", "0", "--log-every", "1"]
STEPS = 6
EXACT = ["--strategy", "exact", "--micro-batch-size", "4"]
SAYS = "frozen features, linear head: top1"


@pytest.fixture(scope="module")
def given(session_dir, data_of, run_train):
    """given(task): the words of a fine-tuning on data whose classes have other names."""
    made = {}

    def make(task):
        if task in made:
            return made[task]
        folder = session_dir / f"fitted-{task}"
        base, data = folder / "base", folder / "data"
        words = ["--task", task, *WORDS[task]]
        result = run_train(*words, "--data", data_of[task], "--run-dir", base, *LENGTH)
        assert result.returncode == 0, result.text
        if task == "image-classification":
            for source in data_of[task].glob("*/*"):
                shutil.copytree(source, data / source.parent.name / source.name.replace("tint", "hue"))
        else:
            data.mkdir()
            for file in data_of[task].iterdir():
                (data / file.name).write_text(file.read_text().replace("topic", "field"))
        own = ["--image-size", "32"] if task == "image-classification" else WORDS[task][:4]
        made[task] = ["--task", task, "--model", base / "model", "--data", data, *own, *LENGTH]
        return made[task]

    return make


@pytest.fixture(scope="module")
def straight(given, session_dir, run_train):
    """straight(task): an uninterrupted run on one process by exact."""
    runs = {}

    def make(task):
        if task not in runs:
            runs[task] = session_dir / f"fitted-{task}" / "straight"
            result = run_train(*given(task), *EXACT, "--run-dir", runs[task], "--keep", 9)
            assert result.returncode == 0 and SAYS in result.out, result.text
        return runs[task]

    return make


def evaluations(run):
    return [record for record in records(run) if record["split"] == "val"]


def facts(run):
    summary = json.loads((run / "summary.json").read_text())
    return outcome(run) | {"best": summary["best"], "model": (run / "model" / "model.safetensors").read_bytes()}


@pytest.mark.parametrize("task", WORDS)
def test_step_0_is_evaluated_recorded_and_has_one_link(straight, task):
    run = straight(task)
    assert [record["step"] for record in evaluations(run)] == [0, 3, 6]
    assert [line["step"] for line in read_lines(run)] == [0, 3, 6]
    first = read_lines(run)[0]
    assert "model.safetensors" in first["model"] and first["metrics"]["bytes"] > 0
    resolved = json.loads((run / "auto.json").read_text())
    assert (resolved["head_init"], resolved["head_lr_factor"]) == ("features", 1)


def test_the_best_model_is_never_worse_than_the_head(straight, given, run_train, run_dir):
    """A rate that destroys the fit leaves RUN/model at step 0."""
    result = run_train(*given("image-classification"), "--lr", "0.5", "--run-dir", run_dir)
    assert result.returncode == 0, result.text
    best = json.loads((run_dir / "summary.json").read_text())["best"]
    values = [record["top1"] for record in evaluations(run_dir)]
    assert min(values) < values[0]
    assert best["value"] == max(values) and best["step"] == [0, 3, 6][values.index(max(values))]


@pytest.mark.long
@pytest.mark.parametrize("processes", [2, 3, 4])
@pytest.mark.parametrize("task", WORDS)
def test_a_fitted_head_has_the_same_bits_on_1_to_4_processes(given, straight, run_torchrun, run_dir, task, processes):
    result = run_torchrun(processes, *given(task), *EXACT, "--run-dir", run_dir)
    assert result.returncode == 0 and SAYS in result.out, result.text
    assert facts(run_dir) == facts(straight(task))


KILLED = {"after the fit": lambda launch, run: SAYS in (launch.folder / "out").read_text(),
          "before step 0 is evaluated": lambda launch, run: any(run.glob("checkpoints/step-*")),
          "after step 0": lambda launch, run: any(line["step"] == 0 for line in read_lines(run))}


@pytest.mark.parametrize("moment", KILLED)
def test_a_run_that_is_killed_around_step_0_ends_with_the_same_bits(
        given, straight, start_torchrun, run_torchrun, run_dir, moment):
    task = "image-classification"
    killed = start_torchrun(2, *given(task), *EXACT, "--run-dir", run_dir)
    killed.wait_for(lambda: KILLED[moment](killed, run_dir), moment)
    killed.kill_all()
    result = run_torchrun(3, *given(task), *EXACT, "--run-dir", run_dir)
    assert result.returncode == 0, result.text
    assert moment != "after step 0" or SAYS not in result.out, result.text
    assert facts(run_dir) == facts(straight(task))
    assert [line["step"] for line in read_lines(run_dir)] == [0, 3, 6]


def test_a_run_that_stops_after_step_0_keeps_its_directory(given, straight, start_torchrun, run_torchrun, run_dir):
    task = "image-classification"
    launch = start_torchrun(None, *given(task), *EXACT, "--run-dir", run_dir)
    launch.wait_for(lambda: any(line["step"] == 0 for line in read_lines(run_dir)), "step 0")
    launch.process.send_signal(signal.SIGTERM)
    assert launch.wait().returncode == Exit.STOPPED
    assert status(run_dir)["state"] == "stopped" and (run_dir / "model" / "config.json").exists()
    result = run_torchrun(2, *given(task), *EXACT, "--run-dir", run_dir)
    assert result.returncode == 0 and "resumed at step" in result.out, result.text
    assert facts(run_dir) == facts(straight(task))


@pytest.mark.parametrize("words", [
    ["--strategy", "fsdp"], ["--strategy", "ddp", "--precision", "bf16", "--ema-decay", "0.9"],
    pytest.param(["--strategy", "ddp", "--freeze", "backbone"], marks=pytest.mark.long)])
def test_each_strategy_begins_with_the_same_head(given, straight, run_torchrun, run_dir, words):
    """Features of two processes in another precision give nearly the same head, and rank 0's is on both."""
    result = run_torchrun(2, *given("image-classification"), *words, "--run-dir", run_dir)
    assert result.returncode == 0 and SAYS in result.out, result.text
    assert trained_steps(run_dir) == STEPS
    found, expected = evaluations(run_dir)[0], evaluations(straight("image-classification"))[0]
    assert found["step"] == 0 and abs(found["loss"] - expected["loss"]) < 0.1
    if "--ema-decay" in words:
        assert found["ema_loss"] == found["loss"]


def test_random_evaluates_no_step_0(given, run_train, run_dir):
    result = run_train(*given("image-classification"), "--head-init", "random", "--run-dir", run_dir)
    assert result.returncode == 0 and SAYS not in result.out, result.text
    assert [record["step"] for record in evaluations(run_dir)] == [3, 6]


def test_a_run_of_before_goes_on_without_a_fitted_head(given, run_train, run_dir):
    """Its auto.json lacks the key, and its config.yaml the setting; it is stopped before its first checkpoint."""
    words = [*given("image-classification"), "--run-dir", run_dir]
    result = run_train(*words, "--head-init", "random", "--stop-after", 1)
    assert result.returncode == Exit.STOPPED, result.text
    for name in ("auto.json", "config.yaml"):
        file = run_dir / name
        file.write_text("\n".join(line for line in file.read_text().splitlines() if "head_init" not in line))
    result = run_train(*words)
    assert result.returncode == 0 and SAYS not in result.out, result.text
    assert [record["step"] for record in evaluations(run_dir)] == [3, 6]


def test_features_are_refused_where_there_is_no_new_head(data_of, run_train, run_dir):
    result = run_train("--task", "image-classification", *WORDS["image-classification"], "--data",
                       data_of["image-classification"], "--head-init", "features", "--run-dir", run_dir)
    assert result.code == Exit.USAGE, result.text
    assert "there is no new head on pretrained weights; leave it out" in result.err and not run_dir.exists()


def test_the_weights_of_step_0_hold_the_fitted_head(straight):
    """All but the head is as it was in the weights that the run began with."""
    run = straight("text-classification")
    names = [name for name in CheckpointFolder(run / "checkpoints", 1, print).names() if step_of(name) == 0]
    base = load_file(run.parent / "base" / "model" / "model.safetensors")
    for name in names:
        step_0 = load_file(run / "checkpoints" / name / "model.safetensors")
        changed = {param for param in base if not torch.equal(base[param], step_0[param])}
        assert changed == {"classifier.weight", "classifier.bias"}
    assert names


def test_folds_are_evaluated_at_their_end_alone(given, run_train, run_dir):
    """An --eval-every longer than the run: no evaluation may choose the model. The run begins with the fitted head."""
    result = run_train(*given("image-classification"), "--eval-every", 10**9, "--run-dir", run_dir)
    assert result.returncode == 0 and SAYS in result.out, result.text
    assert [record["step"] for record in evaluations(run_dir)] == [6]
    assert [line["step"] for line in read_lines(run_dir)] == [0, 6]


@pytest.mark.parametrize("words", [["--multi-label", "--label-column", "labels"], ["--bad-samples", "skip"]])
def test_other_labels_and_unreadable_samples_are_fitted(given, photo_tables, own_photos, run_train, run_dir, words):
    base = given("image-classification")[:4]
    if "--multi-label" in words:
        data = photo_tables
    else:
        data = own_photos
        for folder in own_photos.glob("*/tint*"):
            folder.rename(folder.with_name(folder.name.replace("tint", "shade")))
        next(iter(sorted((own_photos / "train").glob("*/*.png")))).write_bytes(b"no image")
    result = run_train(*base, "--data", data, *words, *LENGTH, "--image-size", "32", "--run-dir", run_dir)
    assert result.returncode == 0 and "frozen features, linear head" in result.out, result.text
    assert ("56 samples" in result.out) == ("skip" in words)
    assert [record["step"] for record in evaluations(run_dir)][:1] == [0]


@pytest.mark.parametrize("name", ["bad_samples.txt"])
def test_a_directory_of_a_start_that_was_killed_in_the_fit_is_taken(given, run_train, run_dir, name):
    """It has no auto.json yet."""
    run_dir.mkdir(parents=True)
    (run_dir / name).write_text("a.png: damaged\n")
    result = run_train(*given("image-classification"), "--run-dir", run_dir)
    assert result.returncode == 0, result.text


def test_a_run_of_before_is_verified_from_its_beginning(given, run_train, run_dir):
    """Its settings know no fitted head."""
    words = [*given("image-classification"), "--strategy", "exact", "--run-dir", run_dir]
    result = run_train(*words, "--head-init", "random")
    assert result.returncode == 0, result.text
    for file in (run_dir / "auto.json", run_dir / "config.yaml"):
        lines = [line for line in file.read_text().splitlines() if "head_init" not in line]
        file.write_text("\n".join(lines) + "\n")
    file = run_dir / "starts.jsonl"
    line = json.loads(file.read_text())
    for part in ("settings", "resolved"):
        line[part].pop("head_init")
    file.write_text(json.dumps(line) + "\n")
    done = subprocess.run([sys.executable, "-m", "ask.replay", run_dir, "--step", "1:3"], cwd=ROOT,
                          capture_output=True, text=True)
    assert done.returncode == 0 and "the same bits as recorded" in done.stdout + done.stderr, done.stdout + done.stderr


def test_batch_norm_keeps_the_statistics_of_the_weights_and_learns(straight):
    """The head was fitted to what they give."""
    run = straight("image-classification")
    base = load_file(run.parent / "base" / "model" / "model.safetensors")
    trained = load_file(newest_checkpoint(run) / "model.safetensors")
    changed = {name for name in base if not torch.equal(base[name], trained[name])}
    statistics = {name for name in base if "running_" in name or name.endswith("num_batches_tracked")}
    assert statistics and changed == base.keys() - statistics
