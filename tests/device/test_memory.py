"""Memory of a device that runs out: a size that fits is found or named before training, a smaller one after a save.

Only a simulated device can be given a small memory. A step takes 100 MiB in a micro-batch of 57 samples, 63 in one of
28, 45 in one of 14.
"""

import json

import pytest

from tests.device.runs import TASKS
from tests.harness.launches import assert_failed
from tests.harness.run_directory import newest_checkpoint, records, status, trained_steps
from utils.errors import Exit

pytestmark = pytest.mark.needs("simulation")
ROOM_FOR_28, ROOM_FOR_14 = 75 * 2**20, 54 * 2**20  # bytes
LATER = 17_000  # an operation between the first save and the end
STEPS = 4  # of all samples each


@pytest.fixture
def words(photos, run_dir):
    return [*TASKS["image-classification"], "--image-size", 64, "--threads", 1, "--precision", "fp32", "--workers", 0,
            "--global-batch-size", 57, "--eval-batch-size", 16, "--epochs", STEPS, "--log-every", 1, "--save-every", 1,
            "--data", photos, "--run-dir", run_dir]


def micro_batches(run):
    return json.loads((run / "auto.json").read_text())["micro_batches"]


@pytest.mark.slow
@pytest.mark.needs("two devices")
def test_auto_under_ddp_finds_a_size_that_fits_and_the_run_keeps_it(accelerator, words, run_dir):
    """One device of two is small: both ranks take the size that fits there, and keep it where there is room again."""
    small = accelerator.simulating(shrinks={"rank": 1, "operation": 1, "memory": ROOM_FOR_14})
    result = small.run(2, *words, "--stop-after", 1)
    assert result.code == Exit.STOPPED, result.text
    note = "out of memory: a global batch is cut into 6 micro-batches instead of 2, each of at most 14 samples"
    assert result.out.count(note) == 1, result.text
    assert micro_batches(run_dir) == 6
    result = accelerator.run(2, *words)
    assert (result.returncode, micro_batches(run_dir)) == (0, 6), result.text


@pytest.mark.slow
@pytest.mark.parametrize("given", [["--micro-batch-size", 57], ["--strategy", "exact", "--micro-batch-size", 57]])
def test_a_size_that_the_user_gave_is_refused_with_one_that_fits(accelerator, words, given):
    small = accelerator.simulating(memory=ROOM_FOR_28)
    result = small.run(None, *words, *given)
    assert result.returncode == Exit.USAGE, result.text
    assert "micro-batches of 57 samples do not fit into memory" in result.err
    assert "--micro-batch-size 28 fits" in result.err
    result = small.run(None, *words, *given, "--micro-batch-size", 28)  # that advice is true
    assert result.returncode == 0, result.text


@pytest.mark.slow
def test_auto_under_exact_is_refused_for_it_decides_about_bits(accelerator, words):
    result = accelerator.simulating(memory=36 * 2**20).run(None, *words, "--strategy", "exact")
    assert result.returncode == Exit.USAGE and "micro-batches of 15 samples do not fit" in result.err, result.text


@pytest.mark.slow
def test_evaluation_batches_that_do_not_fit_are_refused(accelerator, words):
    result = accelerator.simulating(memory=40 * 2**20).run(
        None, *words, "--micro-batch-size", 4, "--eval-batch-size", 147)
    assert result.returncode == Exit.USAGE, result.text
    assert "at step 0" in result.err and "nothing is saved yet; use a smaller --eval-batch-size than 147" in result.err


@pytest.mark.slow
def test_a_model_that_does_not_fit_at_all_is_refused(accelerator, words):
    result = accelerator.simulating(memory=2**23).run(None, *words)
    assert result.returncode == Exit.USAGE and (
        "one sample does not fit: use a smaller --model" in result.err), result.text


@pytest.mark.slow
@pytest.mark.parametrize("processes", [None, 2])
def test_late_lack_of_memory_names_the_checkpoint_and_a_smaller_size(accelerator, live, words, run_dir, processes):
    room, size = (ROOM_FOR_14, 29) if processes else (ROOM_FOR_28, 57)
    shrinking = accelerator.simulating(shrinks={"operation": LATER, "memory": room})
    launch = live(shrinking, processes, *words, "--micro-batch-size", size)
    result = assert_failed(launch, run_dir, Exit.USAGE, "out of memory on sim:0 of rank 0 at step ",
                           "the run is saved at step ", f"use a smaller --micro-batch-size than {size}")
    saved = int(newest_checkpoint(run_dir).name.split("-")[1])
    assert f"the run is saved at step {saved}" in result.err and (
        0 < saved <= trained_steps(run_dir) == status(run_dir)["step"])
    result = accelerator.simulating(memory=room).run(processes, *words, "--micro-batch-size", size // 2)
    assert result.returncode == 0 and f"resumed at step {saved}" in result.out, result.text
    assert [record["step"] for record in records(run_dir) if record["split"] == "train"] == list(range(1, STEPS + 1))
