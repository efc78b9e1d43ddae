"""--audit-every, and the sums of exact, on a simulated device: flipped bits are found, and named where they can be.

Operations are those of tests/harness/accelerator. Micro-batches have four images; a rank has two of six or three.
"""

import json
import socket

import pytest

from tests.device.runs import STEPS
from tests.harness.launches import assert_failed
from tests.harness.run_directory import newest_checkpoint, outcome, status, trained_steps
from utils.errors import Exit

KEY = ("image-classification", "ddp")
UNIT = {"rank": 1, "operation": 1, "every": 1}  # wrong in the same way each time

pytestmark = pytest.mark.needs("simulation", "two devices")


@pytest.fixture
def words(runs, run_dir):
    return [*runs.words(*KEY), "--deterministic", "--save-every", 1, "--workers", 0, "--run-dir", run_dir]


def named(rank):
    return f"rank {rank} on {socket.gethostname()} (sim:{rank})"


@pytest.mark.long
@pytest.mark.parametrize("only", ["convolution_backward", *(pytest.param(other, marks=pytest.mark.slow) for other in (
    "convolution", "native_batch_norm", "addmm|mm"))])
def test_a_unit_that_is_always_wrong_is_named_by_three_ranks(only, accelerator, live, words, run_dir):
    device = accelerator.simulating(flips=UNIT | {"only": only}, report=run_dir.parent / "report")
    assert_failed(live(device, 3, *words, "--audit-every", 2), run_dir, Exit.HARDWARE,
                  f"{named(1)} computed micro-batch 1 of optimizer step 2 wrongly: two other ranks agree on other bits")
    assert trained_steps(run_dir) == status(run_dir)["step"] == 1


@pytest.mark.slow
def test_a_unit_that_is_wrong_now_and_then_contradicts_itself(accelerator, live, words, run_dir):
    device = accelerator.simulating(flips=UNIT | {"only": "convolution_backward", "every": 97})
    assert_failed(live(device, 2, *words, "--audit-every", 1), run_dir, Exit.HARDWARE,
                  f"{named(1)} computed micro-batch ", "wrongly: its bits were others when it repeated it")


@pytest.mark.slow
def test_weights_that_the_optimizer_got_wrong_are_found(accelerator, live, words, run_dir):
    device = accelerator.simulating(flips=UNIT | {"only": "_fused_adamw_"})
    assert_failed(live(device, 3, *words, "--audit-every", 2), run_dir, Exit.HARDWARE,
                  f"before optimizer step 2 {named(1)} has other weights than the other ranks")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "exact"])
def test_a_device_that_works_is_no_alarm(strategy, accelerator, runs, words, run_dir):
    result = accelerator.run(3, *words, "--strategy", strategy, "--audit-every", 1)
    assert result.returncode == 0 and trained_steps(run_dir) == STEPS, result.text
    assert outcome(run_dir) == outcome(runs.on_device(3, "image-classification", strategy))


@pytest.mark.slow
def test_on_a_device_it_needs_deterministic_algorithms(accelerator, live, runs, run_dir):
    words = [*runs.words(*KEY), "--run-dir", run_dir, "--audit-every", 2]
    assert_failed(live(accelerator, 2, *words), run_dir, Exit.USAGE, "sim repeats them with --deterministic alone")


@pytest.mark.slow
@pytest.mark.parametrize("on, wrong", [(1, [1]), (None, [0, 1])])
def test_a_sum_that_changes_on_its_way_between_devices_is_found(on, wrong, accelerator, live, runs, run_dir):
    words = [*runs.words("image-classification", "exact"), "--save-every", 1, "--workers", 0, "--run-dir", run_dir]
    fault = {"CHANGED": json.dumps({"step": 5, "on": on, "at": 1000, "bit": 40})}
    launch = live(accelerator, 2, *words, script="tests/faults/train_with_changed_sums.py", env=fault)
    hosts = ", ".join(f"rank {rank} on {socket.gethostname()}" for rank in wrong)
    assert_failed(launch, run_dir, Exit.HARDWARE, "of optimizer step 5 is not the sum of what the ranks sent", hosts)
    assert (newest_checkpoint(run_dir).name, trained_steps(run_dir)) == ("step-0000000004-g1", 3)  # records: 1, 3, 6
