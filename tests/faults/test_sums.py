"""Sums of gradients that change on their way (--strategy exact): 71, host, rank and step; nothing of them is kept.

Which faults are found: tests/distributed/test_sums.py.
"""

import json
import socket

import pytest

from tests.harness.launches import EPOCHS, STEPS, WORDS, assert_as_undisturbed, assert_failed
from tests.harness.run_directory import newest_checkpoint, records, status, trained_steps
from utils.errors import Exit

SCRIPT = "tests/faults/train_with_changed_sums.py"
HOST = socket.gethostname()
FOR_EVER = 10 * STEPS
NUM_BAD, CHECKSUM = -2, -1  # places of the two numbers after the sums


@pytest.fixture
def words(photos, run_dir):
    return [*WORDS, "--strategy", "exact", "--data", photos, "--run-dir", run_dir, "--workers", 0]


@pytest.fixture(scope="module")
def exact_undisturbed(session_dir, run_train, photos):
    run = session_dir / "exact-undisturbed"
    result = run_train(*WORDS, "--strategy", "exact", "--data", photos, "--run-dir", run)
    assert result.returncode == 0, result.text
    return run


def changed(step, on, at=1000, bit=40, **more):
    return {"CHANGED": json.dumps({"step": step, "on": on, "at": at, "bit": bit, **more})}


@pytest.mark.long
def test_a_changed_sum_of_one_rank_is_71_before_its_record_and_its_save(
        words, run_dir, start_torchrun, run_torchrun, exact_undisturbed):
    launch = start_torchrun(2, *words, "--save-every", 1, script=SCRIPT, env=changed(5, on=1))
    assert_failed(launch, run_dir, Exit.HARDWARE, "of optimizer step 5 is not the sum of what the ranks sent",
                  f"wrong on rank 1 on {HOST};")
    assert (newest_checkpoint(run_dir).name, trained_steps(run_dir)) == ("step-0000000004-g1", 4)
    assert "of optimizer step 5" in status(run_dir)["message"]
    assert_as_undisturbed(run_torchrun(2, *words), run_dir, exact_undisturbed)


def test_a_changed_number_of_bad_ranks_is_71_and_not_a_step_to_go_over(words, run_dir, start_torchrun):
    """On one rank alone the gradient is infinite. Nothing is due: the others know two steps later."""
    few = ["--save-every", FOR_EVER, "--log-every", FOR_EVER, "--max-nonfinite", 5]
    launch = start_torchrun(2, *words, *few, script=SCRIPT, env=changed(4, on=1, at=NUM_BAD, bit=0))
    result = assert_failed(launch, run_dir, Exit.HARDWARE, "of optimizer step 4 ", f"wrong on rank 1 on {HOST};")
    assert "the step changed nothing" not in result.text
    assert status(run_dir)["step"] == 5


@pytest.mark.slow
@pytest.mark.parametrize("at, bit", [(0, 63), (1000, 0), (NUM_BAD, 0), (CHECKSUM, 17)])
def test_one_that_all_ranks_receive_is_71_before_an_evaluation(words, run_dir, start_torchrun, at, bit):
    few = ["--save-every", FOR_EVER, "--log-every", FOR_EVER, "--max-nonfinite", 5]
    launch = start_torchrun(2, *words, *few, script=SCRIPT, env=changed(3, None, at, bit))
    assert_failed(launch, run_dir, Exit.HARDWARE, "of optimizer step 3 ", f"rank 0 on {HOST}, rank 1 on {HOST};")
    assert not [*(run_dir / "checkpoints").glob("step-*")] and not (run_dir / "model").exists()
    assert [(record["split"], record["step"]) for record in records(run_dir) if record["split"] != "epoch"] == [
        ("train", 1)]


@pytest.mark.slow
def test_one_in_the_last_step_of_all_is_71_before_the_end(words, run_dir, start_torchrun):
    launch = start_torchrun(3, *words, script=SCRIPT, env=changed(STEPS, on=2))
    assert_failed(launch, run_dir, Exit.HARDWARE, f"of optimizer step {STEPS} ", f"wrong on rank 2 on {HOST};")
    assert not (run_dir / "summary.json").exists()
    assert len([record for record in records(run_dir) if record["split"] == "val"]) == EPOCHS - 1


@pytest.mark.slow
def test_one_before_a_stop_is_71_and_no_save(words, run_dir, start_torchrun):
    launch = start_torchrun(2, *words, "--stop-after", 2, script=SCRIPT, env=changed(2, on=0))
    assert_failed(launch, run_dir, Exit.HARDWARE, "of optimizer step 2 ", f"wrong on rank 0 on {HOST};")
    assert not [*(run_dir / "checkpoints").glob("step-*")]


@pytest.mark.slow
def test_a_restart_by_torchrun_ends_with_the_weights_of_an_undisturbed_run(
        words, run_dir, run_torchrun, exact_undisturbed):
    env = changed(5, on=1, once=str(run_dir.parent / "was-changed"))
    result = run_torchrun(2, *words, "--save-every", 2, script=SCRIPT, env=env, torchrun=["--max-restarts", 1])
    assert "of optimizer step 5 is not the sum" in result.text
    assert_as_undisturbed(result, run_dir, exact_undisturbed)
