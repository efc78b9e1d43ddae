"""Devices that fail, hang, are too few or not there; gradients that are not finite."""

import json
import socket

import pytest

from tests.conftest import ROOT
from tests.device.runs import STEPS
from tests.harness.launches import assert_failed
from tests.harness.run_directory import newest_checkpoint, outcome, status, trained_steps, weights_sha256
from utils.errors import Exit

KEY = ("image-classification", "ddp")
LAST = [1, pytest.param(2, marks=[pytest.mark.needs("two devices"), pytest.mark.slow])]


@pytest.fixture
def words(runs, run_dir):
    return [*runs.words(*KEY), "--run-dir", run_dir]


def middle(runs, processes):
    """A number of an operation about the middle of the last rank's run."""
    operations = runs.report(runs.on_device(processes, *KEY), processes - 1)["operations"]
    return operations[str(processes - 1)] // 2


@pytest.mark.slow
@pytest.mark.needs("simulation")
@pytest.mark.parametrize("processes", LAST)
def test_a_device_that_fails_is_71_and_named_and_the_run_goes_on(accelerator, live, runs, words, run_dir, processes):
    failing = accelerator.simulating(fails={"rank": processes - 1, "operation": middle(runs, processes)})
    number = processes if processes > 1 else None
    said = (f"device {processes - 1} of {socket.gethostname()} (rank {processes - 1}) failed"
            " (sim error: uncorrectable ECC error")
    assert_failed(live(failing, number, *words), run_dir, Exit.HARDWARE, said)
    assert said in status(run_dir)["message"] and 0 < trained_steps(run_dir) < STEPS
    result = accelerator.run(number, *words)
    assert result.returncode == 0, result.text
    assert outcome(run_dir) == outcome(runs.on_device(processes, *KEY))


@pytest.mark.slow
@pytest.mark.needs("simulation")
@pytest.mark.parametrize("processes", LAST)
def test_a_device_that_hangs_is_76_and_named_and_the_run_goes_on(accelerator, live, runs, words, run_dir, processes):
    hanging = accelerator.simulating(hangs={"rank": processes - 1, "operation": middle(runs, processes)})
    number = processes if processes > 1 else None
    launch = live(hanging, number, *words, "--step-timeout", 10)
    result = launch.wait()
    assert result.code == Exit.LOST_PEERS, result.text
    assert f"rank {processes - 1} on {socket.gethostname()} made no progress" in result.err
    assert " on sim:" in status(run_dir)["message"]  # rank 0's: it waited as long, for the rank that hangs
    result = accelerator.run(number, *words)
    assert result.returncode == 0, result.text
    assert outcome(run_dir) == outcome(runs.on_device(processes, *KEY))


@pytest.mark.slow
@pytest.mark.needs("simulation")
@pytest.mark.parametrize("fault", ["fails", "hangs"])
def test_retries_continue_a_run_whose_device_failed_or_hung_once(accelerator, runs, words, run_dir, fault):
    broken = accelerator.simulating(
        **{fault: {"rank": 1, "operation": middle(runs, 2), "once": run_dir.parent / "struck"}})
    launcher = ["--nproc-per-node", 2, "--retries", 1]
    result = broken.start(None, *launcher, *words, "--step-timeout", 10, command=(ROOT / "launch.sh",)).wait()
    assert result.returncode == 0, result.text
    assert (run_dir.parent / "struck").exists() and "resumed at step" in result.out
    assert outcome(run_dir) == outcome(runs.on_device(2, *KEY))


@pytest.mark.needs("simulation")
@pytest.mark.parametrize("devices, given, parts", [
    (1, "auto", ["--device auto: 2 processes on this node, but 1 sim device", "start 1, or use --device cpu"]),
    pytest.param(0, "sim", ["--device sim: torch ", "finds no accelerator here; use --device cpu"],
                 marks=pytest.mark.slow),
    pytest.param(4, "xpu", ["--device xpu: torch ", "finds sim here; use --device sim"], marks=pytest.mark.slow),
    pytest.param(4, "sim:1", ["--device sim:1: torch ", "finds sim here; use --device sim"], marks=pytest.mark.slow)])
def test_a_device_that_is_not_there_is_refused(accelerator, live, words, run_dir, devices, given, parts):
    launch = live(accelerator.simulating(devices=devices), 2, *words, "--device", given)
    result = launch.wait()
    assert result.code == Exit.USAGE, result.text
    assert all(part in result.err for part in parts) and result.err.count("train.py: ") == 1, result.text
    assert not (run_dir / "checkpoints").exists()


@pytest.mark.slow
@pytest.mark.needs("simulation")
def test_without_a_device_auto_is_the_cpu(accelerator, runs, words, run_dir):
    result = accelerator.simulating(devices=0).run(None, *words)
    assert result.returncode == 0 and " on 1 x cpu;" in result.out, result.text
    assert json.loads((run_dir / "auto.json").read_text())["device"] == "cpu"
    assert weights_sha256(run_dir) == weights_sha256(runs.on_cpu(1, *KEY))


@pytest.mark.slow
@pytest.mark.parametrize("processes", [None, pytest.param(2, marks=pytest.mark.needs("two devices"))])
def test_a_gradient_that_is_not_finite_is_80_and_changes_nothing(accelerator, live, words, run_dir, processes):
    launch = live(accelerator, processes, *words, "--save-every", 1, "--workers", 0, "--bad-samples", "stop",
                  script="tests/faults/train_with_nan.py", env={"NAN_SAMPLES": "17"})
    assert_failed(launch, run_dir, Exit.DIVERGED, "is not finite; it comes from rank")
    step = status(run_dir)["step"]
    assert newest_checkpoint(run_dir).name.startswith(f"step-{step - 1:010d}-") if step > 1 else (
        not list(run_dir.glob("checkpoints/*")))
