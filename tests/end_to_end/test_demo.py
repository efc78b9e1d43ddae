"""The built-in data sets on two processes. The digits to their end, on one: test_readme.py."""

import csv
import json
import re
import subprocess
from collections import Counter

import pytest

from tests.conftest import ROOT
from tests.harness.run_directory import records

TRAIN, VAL = 1442, 355  # images


def test_a_run_says_what_it_is_compared_with_and_what_to_do_next(demo_run):
    run, result = demo_run
    assert result.out.count(": trained on ") == 1 and "epoch 2: trained on 1442 of 1442 samples" in result.out
    for part in ("always the most frequent class 10.", f"the run         {run}",
                 f"tensorboard --logdir {run}", f"python -m models.predict {run}", "train.py --data DIR"):
        assert result.out.count(part) == 1, result.text


@pytest.mark.slow
def test_two_processes_reach_97_percent(run_torchrun, session_dir):
    result = run_torchrun(2, "--run-dir", session_dir / "demo-to-its-end")
    assert result.returncode == 0, result.text
    assert json.loads((session_dir / "demo-to-its-end" / "summary.json").read_text())["top1"] >= 0.97


@pytest.mark.slow
def test_the_printed_command_can_be_pasted(own_photos, run_dir, run_train):
    """Though folders have spaces, brackets and quotes in their names."""
    data, run = own_photos.rename(run_dir.parent / "my \"photos\""), run_dir.parent / "it's a run"
    for split in ("train", "val"):
        (data / split / "tint0").rename(data / split / "Golden Retriever (dog)")
    result = run_train("--data", data, "--run-dir", run, "--image-size", "16", "--workers", "0", "--max-steps", "1")
    assert result.returncode == 0, result.text
    command = re.search("^predict +(.*)$", result.out, re.M)[1]
    found = subprocess.run(["bash", "-c", f"{command} --device cpu"], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    header, row = csv.reader(found.stdout.splitlines())
    assert header[3] == "Golden Retriever (dog)" and row[0] == f"{data}/val/Golden Retriever (dog)/000.png"


@pytest.mark.slow
def test_docstrings_are_told_apart_far_better_than_by_the_largest_class(run_torchrun, session_dir):
    words = ["--task", "text-classification", "--run-dir", session_dir / "demo-docstrings", "--workers", "0",
             "--epochs", "4"]
    result = run_torchrun(2, *words)
    assert result.returncode == 0, result.text
    assert json.loads((session_dir / "demo-docstrings" / "summary.json").read_text())["top1"] >= 0.75
    for part in ("always the most frequent class 17.",
                 "printf 'a text\\n' | "):
        assert part in result.out, result.text


@pytest.mark.slow
def test_masked_words_are_guessed_better_than_by_their_frequency(run_torchrun, session_dir):
    result = run_torchrun(2, "--task", "masked-lm", "--run-dir", session_dir / "demo-topics", "--workers", "0",
                          "--epochs", "3")
    assert result.returncode == 0, result.text
    losses = [record["loss"] for record in records(session_dir / "demo-topics") if record["split"] == "val"]
    [frequency] = re.findall(r"guessing by the tokens' frequency (\d\.\d+)", result.out)
    assert losses[-1] < losses[0] and losses[-1] < float(frequency)


def test_every_sample_is_read_once_per_epoch_and_once_per_evaluation(demo_run):
    run, _ = demo_run
    by_rank = [json.loads(run.with_name(f"{run.name}-rank-{rank}.json").read_text()) for rank in (0, 1)]
    read = Counter((size, epoch, index) for rank in by_rank for size, epoch, index in rank)
    epochs = max(epoch for size, epoch, _ in read if size == TRAIN) + 1
    evaluations = sum(record["split"] == "val" for record in records(run))
    assert epochs == evaluations == records(run)[-1]["epoch"] > 1
    expected = {(TRAIN, epoch, index): 1 for epoch in range(epochs) for index in range(TRAIN)}
    assert read == expected | {(VAL, 0, index): evaluations for index in range(VAL)}
    assert all(len({index for size, epoch, index in rank if (size, epoch) == (TRAIN, 0)}) > 600 for rank in by_rank), (
        "ranks share the work")
