"""Techniques of training under --strategy exact: one outcome on 1 to 4 processes, and through a kill.

The runs are those of test_exactness.py. With EMA the run stops early: few evaluations in a row are each the best.
"""

import json

import pytest

from tests.contracts.test_exactness import COMMON, STEPS, WORDS
from tests.harness.run_directory import outcome, records, status, trained_steps
from utils.errors import Exit

TECHNIQUES = {
    "ema-early-stop": ("image-classification", [
        "--ema-decay", "0.9", "--eval-every", "1", "--early-stop-patience", "1"]),
    "freeze-decay-images": ("image-classification", [
        "--freeze", "3", "--layer-decay", "0.7", "--schedule", "step",
        "--checkpoint-activations", "--dropout", "0.5"]),
    "freeze-decay-texts": ("text-classification", [
        "--freeze", "1", "--layer-decay", "0.7", "--checkpoint-activations", "--dropout", "0.3", "--ema-decay", "0.9",
        "--cpu-kernels", "off"]),
    "own-images": ("image-classification", ["--model", "small-cnn", "--freeze", "1", "--layer-decay", "0.7",
                                            "--checkpoint-activations"]),
    "own-texts": ("text-classification", ["--model", "bag-of-words", "--freeze", "1"]),
    "several-labels": ("tables", [
        "--class-weights", "balanced", "--label-smoothing", "0.1", "--mixup", "0.4"])}
TASKS = {task: ["--task", task, *words] for task, words in WORDS.items()} | {"tables": [
    "--task", "image-classification", *WORDS["image-classification"], "--label-column", "labels", "--multi-label"]}
EARLY = "ema-early-stop"


@pytest.fixture(scope="module")
def launch_of(run_train, run_torchrun, data_of):
    """launch(technique, processes, run, words): its result."""

    def launch(technique, processes, run, *words):
        start = run_train if processes == 1 else lambda *all_words: run_torchrun(processes, *all_words)
        return start(*words_of(technique, data_of), "--run-dir", run, *words)

    return launch


def words_of(technique, data):
    task, words = TECHNIQUES[technique]
    return [*TASKS[task], "--strategy", "exact", "--data", data[task], *COMMON, "--workers", "0",
            *words]


@pytest.fixture(scope="module")
def straight(launch_of, session_dir):
    """straight(technique): the run directory of an uninterrupted run on one process."""
    runs = {}

    def make(technique):
        if technique not in runs:
            runs[technique] = session_dir / "techniques" / technique
            result = launch_of(technique, 1, runs[technique])
            assert result.returncode == 0, result.text
        return runs[technique]

    return make


def facts(run):
    """What a run ended with, beside its outcome: the best model, and that it is finished."""
    summary = json.loads((run / "summary.json").read_text())
    return outcome(run) | {"best": summary["best"], "model": (run / "model" / "model.safetensors").read_bytes(),
                           "state": status(run)["state"], "optimizer": outcome(run)["state"]}


@pytest.mark.long
def test_a_run_that_stops_early_is_finished_and_its_average_on_record(launch_of, straight, run_train):
    run = straight(EARLY)
    steps = trained_steps(run)
    assert (1 < steps < STEPS, status(run)["state"], status(run)["exit_code"]) == (True, "finished", Exit.DONE)
    again = launch_of(EARLY, 1, run)
    assert again.returncode == 0 and f"is finished: step {steps}" in again.out, again.text

    # the better of the weights and their average is best, and is what --eval-only evaluates
    evaluations = [record for record in records(run) if record["split"] == "val"]
    assert [record["step"] for record in evaluations] == [*range(1, steps + 1)]
    figures = [max(record["top1"], record["ema_top1"]) for record in evaluations]
    assert figures[:-1] == sorted(set(figures[:-1])) and figures[-1] <= figures[-2]  # the last one alone is no gain
    assert all(record["ema_loss"] != record["loss"] for record in evaluations)
    best = json.loads((run / "summary.json").read_text())["best"]
    prefix = "ema_" if best.get("weights") == "ema" else ""
    assert best["value"] == max(figures)
    result = run_train("--eval-only", "--run-dir", run)
    evaluated = json.loads(result.out)
    assert ("the average of the weights in the best checkpoint" in result.err) == bool(prefix), result.err
    [record] = [record for record in evaluations if record["step"] == best["step"]]
    assert (evaluated["top1"], evaluated["loss"]) == (record[f"{prefix}top1"], record[f"{prefix}loss"])


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 3, 4])
@pytest.mark.parametrize("technique", TECHNIQUES)
def test_a_technique_computes_the_same_bits_on_1_to_4_processes(launch_of, straight, run_dir, technique, processes):
    result = launch_of(technique, processes, run_dir)
    assert result.returncode == 0, result.text
    assert trained_steps(run_dir) == (trained_steps(straight(EARLY)) if technique == EARLY else STEPS)
    assert facts(run_dir) == facts(straight(technique))


@pytest.mark.slow
@pytest.mark.parametrize("technique", TECHNIQUES)
def test_a_technique_survives_a_kill_on_2_and_goes_on_on_3(
        launch_of, straight, run_dir, start_torchrun, data_of, technique):
    killed = start_torchrun(2, *words_of(technique, data_of), "--run-dir", run_dir, "--save-every", 1)
    least = 1 if technique == EARLY else 3  # the second step is its last
    killed.wait_for(lambda: trained_steps(run_dir) >= least and any(run_dir.glob("checkpoints/step-*")),
                    f"step {least} and a checkpoint")
    killed.kill_all()
    assert status(run_dir)["state"] == "running"
    finished = launch_of(technique, 3, run_dir)
    assert finished.returncode == 0 and "resumed at step" in finished.out, finished.text
    assert facts(run_dir) == facts(straight(technique))
