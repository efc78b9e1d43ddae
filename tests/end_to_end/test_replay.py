"""ask.replay: a step of a run is computed again, with the bits of its record, and names the samples behind a spike.

Nothing in the run changes. Under exact the answer has the same bytes on any number of processes.
"""

import csv
import math
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from data import demo
from data.plan import BatchPlan
from data.sampler import WINDOW, ElasticDistributedSampler, Lengths
from tests.harness.launches import WORDS as PHOTOS
from tests.harness.launches import assert_no_process, image_of, sample_of
from tests.harness.run_directory import newest_checkpoint, records, rows_of, trained_steps, written
from utils.errors import Exit
from utils.rundir.starts import read_starts

REPLAY = {"script": "ask/replay.py"}
SPIKE, BATCH, STEPS = 30, 32, 36
SPIKED = ["--epochs", 1, "--max-steps", STEPS, "--global-batch-size", BATCH, "--micro-batch-size", 8, "--threads", 1,
          "--precision", "fp32", "--log-every", 1, "--save-every", 12, "--keep", 9, "--workers", 0, "--lr", "3e-3"]


def order_of(num_samples, lengths=None):
    """The samples of the step with the spike."""
    plan = BatchPlan(num_samples, BATCH, BATCH // 8)
    return ElasticDistributedSampler(plan, 0, 1, 0, lengths).indices(0, (SPIKE - 1) * BATCH).tolist()


def write_planted(root, header, splits, planted):
    """Tables; in train the samples of the step with the spike have the label of another class."""
    labels = sorted({label for _, label in splits["train"]})
    for index in planted:
        name, label = splits["train"][index]
        splits["train"][index] = name, labels[(labels.index(label) + len(labels) // 2) % len(labels)]
    root.mkdir()
    for split, rows in splits.items():
        with (root / f"{split}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([header, *rows])
    return root, set(planted)


@pytest.fixture(scope="module")
def digits(session_dir):
    """(the built-in digits as tables, the indices of those with wrong labels)."""
    folder = demo.unpack_demo("image-classification", session_dir / "cache")
    splits = {split: [(str(path), path.parent.name) for path in sorted((folder / split).rglob("*.png"))]
              for split in ("train", "val")}
    return write_planted(session_dir / "planted-digits", ["image", "label"], splits, order_of(len(splits["train"])))


@pytest.fixture(scope="module")
def topics(session_dir):
    """(texts of eight words of a letter each, the indices of those with wrong labels)."""
    generator, letters = np.random.default_rng(0), np.array([*"abcdefghijklmnopqrstuvwx"]).reshape(4, 6)
    splits = {split: [(" ".join(generator.choice(letters[number % 4], 8)), f"topic{number % 4}")
                      for number in range(count)] for split, count in (("train", 1280), ("val", 80))}
    planted = order_of(1280, Lengths(torch.full((1280,), 10), WINDOW))
    return write_planted(session_dir / "planted-topics", ["text", "label"], splits, planted)


@pytest.fixture(scope="module")
def of_digits(session_dir, digits, run_train):
    """A run on one process under --strategy exact."""
    run = session_dir / "replay-digits"
    result = run_train("--data", digits[0], "--model", "small-cnn", "--image-size", 16, "--mean", 0.287, 0.287, 0.287,
                       "--std", 0.354, 0.354, 0.354, "--augmentation", "none", "--strategy", "exact", *SPIKED,
                       "--run-dir", run)
    assert result.returncode == 0, result.text
    return run


@pytest.fixture(scope="module")
def of_topics(session_dir, topics, run_torchrun):
    """A run on two processes under --strategy ddp."""
    run = session_dir / "replay-topics"
    result = run_torchrun(2, "--task", "text-classification", "--data", topics[0], "--model", "bert-tiny",
                          "--vocab-size", 200, "--max-length", 16, *SPIKED, "--run-dir", run)
    assert result.returncode == 0, result.text
    return run


def assert_planted_first(rows, planted):
    """The samples with wrong labels come first, all of them in the step with the spike."""
    of_spike = [row["index"] in planted and row["step"] == SPIKE for row in rows]
    assert sum(of_spike) == BATCH and sum(of_spike[:BATCH]) >= 0.8 * BATCH and all(of_spike[:10])


# --- which samples are behind a spike


def test_planted_labels_come_first_with_the_same_bytes_on_1_2_and_3(
        of_digits, digits, run_dir, run_train, run_torchrun):
    before, answers, outputs = written(of_digits), set(), [run_dir.parent / str(count) for count in (1, 2, 3)]
    for processes, output in enumerate(outputs, 1):
        start = run_train if processes == 1 else lambda *words, n=processes, **more: run_torchrun(n, *words, **more)
        result = start(of_digits, "--steps", f"{SPIKE - 5}:{SPIKE + 5}", "--output", output, **REPLAY)
        assert result.returncode == 0, result.text
        assert "computing 11 steps again, from step 24 of" in result.err and "processes" not in result.err
        answers.add(result.out.replace(str(output), "OUTPUT"))
    [answer] = answers
    assert "the same bits as recorded: loss, grad_norm and lr of steps 25 to 35" in answer
    assert max(map(len, answer.splitlines()[2:])) <= 120
    first, *others = ({path.name: path.read_bytes() for path in output.iterdir()} for output in outputs)
    assert others == [first, first] and written(of_digits) == before
    assert_planted_first(rows_of(outputs[0]), digits[1])

    # all digits of the records
    kept = {record["step"]: record for record in records(of_digits)}
    for row in rows_of(outputs[0], "steps"):
        assert row == {name: kept[row["step"]][name] for name in ("step", "loss", "grad_norm", "lr")} | {
            "normalizer": BATCH}


@pytest.mark.long
@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ddp_repeats_bits_on_as_many_processes_else_up_to_rounding(of_topics, topics, run_dir, run_torchrun, processes):
    result = run_torchrun(processes, of_topics, "--steps", "25:35", "--output", run_dir, **REPLAY)
    assert result.returncode == 0, result.text
    assert_planted_first(rows_of(run_dir), topics[1])
    said = f"processes: 2 then, {processes} here; with --strategy ddp sums may be rounded differently"
    if processes == 2:
        assert said not in result.err and "the same bits as recorded" in result.out
    else:
        assert result.err.count(said) == 1 and re.search(
            r"not as recorded: \w+ of step \d+: \S+ then, \S+ now: apart by \S+ of the value, which rounding may do",
            result.out)


@pytest.mark.slow
def test_more_processes_than_micro_batches_are_refused(photos, run_dir, run_torchrun):
    """With --micro-batch-size auto they would cut a step otherwise, and each part would draw its own dropout."""
    words = ["--model", "small-cnn", "--image-size", 16, "--max-steps", 2, "--threads", 1]
    assert run_torchrun(2, "--data", photos, *words, "--run-dir", run_dir).returncode == 0
    result = run_torchrun(3, run_dir, "--step", 1, **REPLAY)
    said = "cut a step into 2 micro-batches, and here it would be 4: use at most 2 processes"
    assert result.code == Exit.OTHER_RUN and said in result.err, result.text


def test_the_names_alone_and_the_inputs_alone_are_those_of_the_step(of_digits, run_dir, run_train):
    folders = {word: run_dir.parent / word.strip("-") for word in ("--step", "--list", "--inputs-only")}
    for word, folder in folders.items():
        words = [word] if word != "--step" else []
        result = run_train(of_digits, "--step", SPIKE, *words, "--output", folder, **REPLAY)
        assert result.returncode == 0 and ("computing" in result.err) == (not words), result.text
    of_step, of_list, of_inputs = map(rows_of, folders.values())
    assert sorted(row["sample"] for row in of_list) == sorted(row["sample"] for row in of_step)
    seen = {row["sample"]: (row["seen"], row["label"]) for row in of_step}
    assert {row["sample"]: (row["seen"], row["label"]) for row in of_inputs} == seen
    for name, _ in seen.values():
        pictures = [np.asarray(Image.open(folders[word] / name)) for word in ("--step", "--inputs-only")]
        assert np.array_equal(*pictures)


# --- what a run has gone through


def test_a_skipped_sample_adds_nothing_and_a_void_step_names_its_losses(own_photos, run_dir, run_train):
    """Step 1 has a sample that cannot be read; the gradient of step 2 is not finite, and ended the run."""
    bad = sample_of(0, 1)
    image_of(own_photos, "train", bad).write_bytes(b"broken")
    result = run_train("--data", own_photos, *PHOTOS, "--bad-samples", "skip", "--optimizer", "sgd", "--lr", "1e18",
                       "--precision", "fp32", "--run-dir", run_dir)
    assert result.returncode == Exit.DIVERGED, result.text
    output = run_dir.parent / "output"
    result = run_train(run_dir, "--steps", "1:2", "--output", output, "--grad-norms", **REPLAY)
    assert result.returncode == 0, result.text
    assert "the same bits as recorded: loss, grad_norm and lr of step 1" in result.out  # step 2 has no record
    rows = rows_of(output)
    assert [(row["loss"], row["grad_norm"]) for row in rows if row["index"] == bad and row["step"] == 1] == [(0, 0)]
    assert [row["loss"] for row in rows if row["step"] == 2] == [None] * sum(row["step"] == 2 for row in rows)
    assert rows[0]["step"] == 2 and math.isfinite(rows[-1]["loss"])


@pytest.mark.long
@pytest.mark.parametrize("strategy, processes", [("ddp", 2), ("exact", 1)])
def test_the_command_about_a_step_that_is_not_finite_lists_its_samples(
        strategy, processes, photos, run_dir, run_torchrun):
    """Step 2 is skipped, and step 3 ends the run."""
    result = run_torchrun(processes, "--data", photos, *PHOTOS, "--strategy", strategy, "--optimizer", "sgd",
                          "--lr", "1e18", "--precision", "fp32", "--max-nonfinite", 1, "--run-dir", run_dir)
    assert result.code == Exit.DIVERGED, result.text
    steps = sorted(set(re.findall(rf"python -m ask\.replay {re.escape(str(run_dir))} --step (\d)", result.text)))
    assert steps == ["2", "3"], result.text
    for step, number in (("2", processes), ("3", 1)):
        output = run_dir.parent / f"output-{step}"
        result = run_torchrun(number, run_dir, "--step", step, "--output", output, **REPLAY)
        assert result.code == 0 and rows_of(output)[0]["loss"] is None, result.text


@pytest.mark.slow
def test_a_run_killed_grown_and_continued_otherwise_is_replayed(
        photos, run_dir, run_train, run_torchrun, start_torchrun):
    """Each start has settings of its own; between them no checkpoint is left."""
    words = ["--data", photos, *PHOTOS, "--run-dir", run_dir, "--keep-every", 0]
    exact = [*words, "--strategy", "exact", "--precision", "fp32"]
    assert run_train(*exact, "--stop-after", 2).returncode == Exit.STOPPED
    killed = start_torchrun(2, *exact, "--save-every", 1)
    killed.wait_for(lambda: trained_steps(run_dir) >= 4, "two steps")
    killed.kill_all()
    finer = [*words, "--strategy", "exact", "--micro-batch-size", 3]
    assert run_torchrun(3, *finer, "--stop-after", 2).code == Exit.STOPPED
    assert run_torchrun(2, *words, "--strategy", "ddp", "--micro-batch-size", 3).returncode == 0
    for checkpoint in (run_dir / "checkpoints").iterdir():
        if checkpoint != newest_checkpoint(run_dir):
            checkpoint.rename(checkpoint.with_name(f"away-{checkpoint.name}"))
    result = run_torchrun(2, run_dir, "--steps", "2:9", **REPLAY)
    assert result.code == 0 and "the same bits as recorded: loss, grad_norm and lr of steps 1 to 9" in result.out, (
        result.text)
    assert len(read_starts(run_dir)) == 4 and "computing 9 steps again, from step 0 of" in result.err


@pytest.mark.long
def test_a_run_that_is_still_training_is_replayed(photos, run_dir, start_torchrun, run_train):
    live = start_torchrun(None, "--data", photos, *PHOTOS, "--epochs", 1000, "--save-every", 3, "--run-dir", run_dir)
    live.wait_for(lambda: trained_steps(run_dir) >= 4, "four steps")
    result = run_train(run_dir, "--step", 2, **REPLAY)
    assert live.process.poll() is None
    live.kill_all()
    assert result.returncode == 0 and "the same bits as recorded" in result.out, result.text


def test_data_that_moved_are_found_and_other_data_are_refused(of_digits, digits, photos, run_train):
    moved = shutil.copytree(digits[0], digits[0].with_name("moved-digits"))  # the images are where they were
    result = run_train(of_digits, "--step", 36, "--data", moved, **REPLAY)
    assert result.returncode == 0 and "the same bits as recorded" in result.out, result.text
    result = run_train(of_digits, "--step", 36, "--data", photos, **REPLAY)
    assert (result.returncode, result.err.count(f"{photos} does not hold the data of {of_digits}")) == (
        Exit.OTHER_RUN, 1), result.text


@pytest.mark.long
def test_a_sample_that_cannot_be_read_any_more_is_named(own_photos, run_dir, run_train):
    result = run_train("--data", own_photos, *PHOTOS, "--epochs", 1, "--run-dir", run_dir)
    assert result.returncode == 0, result.text
    image = image_of(own_photos, "train", sample_of(0, 3))
    image.write_bytes(b"broken")
    result = run_train(run_dir, "--step", 3, **REPLAY)
    assert (result.returncode, str(image) in result.err, result.out) == (Exit.BAD_DATA, True, ""), result.text


# --- stops


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_a_stop_leaves_neither_a_folder_nor_a_change(of_digits, run_dir, start_torchrun, number):
    before, output, temporary = written(of_digits), run_dir.parent / "output", run_dir.parent / "temporary"
    temporary.mkdir()
    live = start_torchrun(None, of_digits, "--steps", "1:36", "--grad-norms", "--output", output, **REPLAY, real=True,
                          env={"TMPDIR": str(temporary)})
    live.wait_for(lambda: any(output.glob("*.png")), "the first step")
    assert any(temporary.glob("lockstep-*"))
    live.process.send_signal(number)
    result = live.wait()
    if number == signal.SIGINT:
        assert result.returncode == Exit.STOPPED and result.err.count("replay: stopped at step") == 1, result.text
    assert_no_process(live)
    assert not any(temporary.glob("lockstep-*")), [*temporary.iterdir()]
    assert written(of_digits) == before and result.out == "" and not (output / "samples.csv").exists()


@pytest.mark.parametrize("words, code, said", [
    (["--step", 37], Exit.USAGE, "has taken 36 steps; ask for steps from 1 to 36"),
    (["--step", 0], Exit.USAGE, "give --step N, or --steps A:B with A up to B"),
    (["--steps", "1:2", "--list"], Exit.USAGE, "--list and --inputs-only are for one step"),
    (["--step", 1, "--output", Path(__file__)], Exit.CANNOT_CREATE, "samples.csv: cannot write it (")])
def test_what_cannot_be_asked_is_refused_before_anything_is_computed(of_digits, run_train, words, code, said):
    result = run_train(of_digits, *words, **REPLAY)
    assert (result.returncode, result.err.count(said), result.out) == (code, 1, ""), result.text


def test_a_run_of_a_version_without_starts_is_named(of_digits, run_dir, run_train):
    run_dir.mkdir()
    for name in ("auto.json", "config.yaml", "metrics.jsonl"):
        (run_dir / name).write_bytes((of_digits / name).read_bytes())
    result = run_train(run_dir, "--step", 3, **REPLAY)
    assert (result.returncode, "a version before 0.11 began this run" in result.err) == (Exit.NO_INPUT, True)
