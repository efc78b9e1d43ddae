"""Memory of a device that runs out: before the first step a size that fits is found or named, later the checkpoint stands.

Only a simulated device can be given a small memory. The image runs take about 0.7 MiB a sample and 25 MiB besides.
"""

import json

import pytest

from tests.device.runs import TASKS
from tests.faults.launches import assert_failed
from tests.run_directory import newest_checkpoint, records, status, trained_steps
from utils.errors import Exit

pytestmark = pytest.mark.needs("simulation")
WORDS = [*TASKS["image-classification"], "--image-size", "64", "--threads", "1", "--precision", "fp32", "--workers", "0",
         "--global-batch-size", "48", "--epochs", "2", "--log-every", "1", "--save-every", "1"]
SMALL = 48 * 2**20  # bytes: enough for 24 samples, not for 48


@pytest.fixture
def words(photos, run_dir):
    return [*WORDS, "--data", photos, "--run-dir", run_dir]


def micro_batches(run):
    return json.loads((run / "auto.json").read_text())["micro_batches"]


@pytest.mark.needs("two devices")
def test_auto_under_ddp_finds_a_size_that_fits_and_the_run_keeps_it(accelerator, words, run_dir):
    """One device of two is small, and both ranks take the size that fits there."""
    small = accelerator.simulating(memory=SMALL // 2, memory_of_rank=1)
    result = small.run(2, *words, "--stop-after", 1)
    assert result.code == Exit.STOPPED, result.text
    assert result.out.count("out of memory in micro-batches of 24 samples: a global batch of 48 is cut into 4 micro-batches of at most 12"
                            " instead of 2, in this run from here on") == 1, result.text
    assert micro_batches(run_dir) == 4
    result = accelerator.run(2, *words)  # also where there is room again
    assert (result.returncode, micro_batches(run_dir)) == (0, 4), result.text


@pytest.mark.slow
@pytest.mark.parametrize("given", [["--micro-batch-size", 48], ["--strategy", "exact", "--micro-batch-size", 48]])
def test_a_size_that_the_user_gave_is_refused_with_one_that_fits(accelerator, words, run_dir, given):
    small = accelerator.simulating(memory=SMALL)
    result = small.run(None, *words, *given)
    assert result.returncode == Exit.USAGE, result.text
    message = result.err.splitlines()[-1]
    assert "--micro-batch-size: batches of 48 samples do not fit into memory" in message and "--micro-batch-size 24 fits" in message
    result = small.run(None, *words, *given, "--micro-batch-size", 24)  # that advice is true
    assert result.returncode == 0, result.text


@pytest.mark.slow
def test_auto_under_exact_is_refused_for_it_decides_about_bits(accelerator, words):
    result = accelerator.simulating(memory=SMALL // 2).run(None, *words, "--strategy", "exact", "--global-batch-size", 57)
    assert result.returncode == Exit.USAGE and "--micro-batch-size: batches of " in result.err, result.text


@pytest.mark.slow
def test_evaluation_batches_that_do_not_fit_are_refused_with_a_size_that_does(accelerator, words):
    result = accelerator.simulating(memory=SMALL).run(None, *words, "--micro-batch-size", 4, "--eval-batch-size", 147)
    assert result.returncode == Exit.USAGE, result.text
    assert "--eval-batch-size: batches of 147 samples do not fit" in result.err and "--eval-batch-size 73 fits" in result.err


@pytest.mark.slow
def test_a_model_that_does_not_fit_at_all_is_refused(accelerator, words):
    result = accelerator.simulating(memory=2**23).run(None, *words)
    assert result.returncode == Exit.USAGE and "out of memory" in result.err, result.text


@pytest.mark.slow
@pytest.mark.parametrize("processes", [None, 2])
def test_where_memory_runs_out_later_the_checkpoint_stands_and_a_size_is_named(accelerator, live, words, run_dir, processes):
    from_step_2 = accelerator.simulating(memory=SMALL // 2, memory_from_operation=60_000, memory_of_rank=0)
    launch = live(from_step_2, processes, *words, "--micro-batch-size", 24 if processes else 48)
    step = "at step "
    result = assert_failed(launch, run_dir, Exit.USAGE, "out of memory on sim:0 of ", "(rank 0)", step, "the checkpoint of step ", " fits")
    saved, fit = int(newest_checkpoint(run_dir).name.split("-")[1]), int(result.err.rpartition("--micro-batch-size ")[2].split()[0])
    assert f"the checkpoint of step {saved} stands" in status(run_dir)["message"] and 0 < saved <= trained_steps(run_dir)
    result = accelerator.simulating(memory=SMALL // 2).run(processes, *words, "--micro-batch-size", fit)
    assert result.returncode == 0 and f"resumed at step {saved}" in result.out, result.text
    assert [record["step"] for record in records(run_dir) if record["split"] == "train"] == list(range(1, 5))
