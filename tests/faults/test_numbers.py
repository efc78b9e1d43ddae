"""Gradients that are not finite: 80, step and rank by name, and nothing was changed by the step."""

import json
import re
import socket

import pytest

from tests.harness.launches import (
    EPOCHS,
    STEPS_PER_EPOCH,
    WORDS,
    assert_as_undisturbed,
    assert_failed,
    messages,
    sample_of,
)
from tests.harness.run_directory import newest_checkpoint, status, trained_steps
from utils.errors import Exit

SCRIPT = "tests/faults/train_with_nan.py"
HOST = socket.gethostname()


@pytest.fixture
def words(photos, run_dir):
    return [*WORDS, "--data", photos, "--run-dir", run_dir, "--save-every", 1, "--workers", 0]


def test_a_loss_of_nan_is_named_with_step_and_rank_on_1_and_2_processes(
        words, run_dir, start_torchrun, run_torchrun, undisturbed):
    bad = sample_of(rank=1, step=2)
    said = f"the gradient of optimizer step 2 is not finite; it comes from rank 1 on {HOST}; the training diverged"
    options = {"script": SCRIPT, "env": {"NAN_SAMPLES": str(bad)}}
    asks = "-m ask.replay {} --step 2"
    on_two = assert_failed(start_torchrun(2, *words, **options), run_dir, Exit.DIVERGED, said, asks.format(run_dir))
    assert newest_checkpoint(run_dir).name == "step-0000000001-g1"

    other = run_dir.parent / "other"
    words_there = [other if word == run_dir else word for word in words]
    on_one = assert_failed(start_torchrun(None, *words_there, **options), other, Exit.DIVERGED)
    assert messages(on_one) == [messages(on_two)[0].replace("rank 1", "rank 0").replace(str(run_dir), str(other))]
    assert_as_undisturbed(run_torchrun(2, *words), run_dir, undisturbed)


def test_the_run_ends_before_the_next_update_without_a_save_that_asks(photos, run_dir, start_torchrun):
    words = [*WORDS, "--data", photos, "--run-dir", run_dir, "--save-every", 1000, "--workers", 0]
    bad = sample_of(rank=0, step=1)
    assert_failed(start_torchrun(None, *words, script=SCRIPT, env={"NAN_SAMPLES": str(bad)}), run_dir, Exit.DIVERGED,
                  "the gradient of optimizer step 1 is not finite")
    assert status(run_dir)["step"] == 1


@pytest.mark.long
def test_where_nothing_is_due_the_rank_is_named_a_step_later(photos, run_dir, start_torchrun):
    """At the end of the epoch, after step 3; the weights have gone one step further."""
    words = [*WORDS, "--data", photos, "--run-dir", run_dir, "--save-every", 1000, "--log-every", 1000, "--workers", 0]
    bad = sample_of(rank=1, step=2)
    assert_failed(start_torchrun(2, *words, script=SCRIPT, env={"NAN_SAMPLES": str(bad)}), run_dir, Exit.DIVERGED,
                  f"the gradient of optimizer step 2 is not finite; it comes from rank 1 on {HOST}; the training")
    assert trained_steps(run_dir) == 1  # the first step always has a record


@pytest.mark.slow
def test_a_tolerated_step_changes_nothing_and_counts_until_the_run_ends(
        words, photos, run_dir, start_torchrun, run_torchrun):
    bad = sample_of(rank=1, step=2)
    options = {"script": SCRIPT, "env": {"NAN_SAMPLES": str(bad)}}
    stopped = run_torchrun(2, *words, "--max-nonfinite", 1, "--stop-after", 3, **options)
    assert stopped.code == Exit.STOPPED, stopped.text
    assert stopped.out.count("the step changed nothing (--max-nonfinite: 1 of 1)") == 1, stopped.text
    files = sorted((run_dir / "checkpoints").glob("step-*"))
    assert [file.name for file in files] == [
        "step-0000000001-g1", "step-0000000002-g1", "step-0000000003-g1-unevaluated"]
    weights = [(file / "model.safetensors").read_bytes() for file in files]
    assert weights[0] == weights[1] != weights[2]
    assert [json.loads((file / "trainer.json").read_text())["progress"]["skipped"] for file in files] == [0, 1, 1]

    result = assert_failed(start_torchrun(2, *words, "--max-nonfinite", 1, **options), run_dir, Exit.DIVERGED,
                           "it comes from rank ")
    [step] = map(int, re.findall(r"gradient of optimizer step (\d) is not finite", result.err))
    assert STEPS_PER_EPOCH < step <= 2 * STEPS_PER_EPOCH
    assert status(run_dir)["step"] == step and trained_steps(run_dir) == step - 1  # judged before its record


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_diverging_learning_rate_is_80_and_the_checkpoint_before_stays(
        processes, photos, run_dir, start_torchrun):
    words = [*WORDS, "--precision", "fp32", "--lr", "1e30", "--data", photos, "--run-dir", run_dir,
             "--save-every", 1, "--workers", 0]
    result = assert_failed(start_torchrun(processes, *words), run_dir, Exit.DIVERGED, "use a smaller --lr")
    [step] = map(int, re.findall(r"gradient of optimizer step (\d) is not finite", result.err))
    assert 2 <= step < EPOCHS * STEPS_PER_EPOCH
    assert newest_checkpoint(run_dir).name == f"step-{step - 1:010d}-g1"
