"""Strategies of several devices in a process: the gradient of `ddp`, who computes what and where, kills, refusals."""

import json
import os
import signal
import sys

import pytest

from tests.conftest import ROOT
from tests.device.runs import OBJECTIVES, STEPS, TASKS
from tests.harness.run_directory import newest_checkpoint, outcome, trained_steps
from utils.errors import Exit

CHECKS = ROOT / "tests/device/check_strategies.py"
simulated_alone = pytest.mark.needs("simulation")


@pytest.fixture(scope="module")
def step(launch, tmp_path_factory):
    """step("dp", 2, "wide"): what check_strategies.py printed, and `peak`, the bytes that each device held at most."""
    known = {}

    def run(*words):
        if words not in known:
            folder = tmp_path_factory.mktemp("step")
            result = launch(None, *words, command=(sys.executable, "-m", "tests.harness.accelerator", CHECKS), env={
                "SIMULATED_ACCELERATOR": json.dumps({"devices": 4, "report": str(folder)})}).wait()
            assert result.returncode == 0, result.text
            report = json.loads((folder / "rank-0.json").read_text())
            known[words] = json.loads(result.out) | {"peak": [report["peak"][str(index)] for index in range(words[1])]}
        return known[words]

    return run


@pytest.mark.rows(1)
@simulated_alone
@pytest.mark.parametrize("words", [
    ("dp", 2, "wide-norm"), ("dp", 4, "wide"), ("dp", 3, "resnet18"), ("model-parallel", 3, "resnet18"),
    ("model-parallel", 2, "wide-norm"), ("dp-classic", 2, "wide")],
    ids=lambda words: "-".join(map(str, words)))
def test_the_gradient_is_that_of_one_device(step, figure, words):
    found = step(*words)
    figure(f"relative difference {found['gradient']:.1e}")
    assert found["gradient"] < 1e-6 and found["buffers"] == 0


@simulated_alone
def test_a_replica_of_dp_computes_whole_micro_batches_on_its_device(step):
    seen = step("dp", 4, "wide")["seen"]
    assert [device for device, _ in seen] == [f"sim:{index}" for index in (0, 1, 2, 3, 0, 1)]
    assert [samples for _, samples in seen] == [[1000 * index + i for i in range(256)] for index in range(6)]


@simulated_alone
def test_classic_data_parallel_splits_each_micro_batch_and_its_batch_norm(step):
    found = step("dp-classic", 2, "wide-norm")
    assert sorted(device for device, _ in found["seen"]) == ["sim:0"] * 6 + ["sim:1"] * 6
    assert all(len(samples) == 128 for _, samples in found["seen"])
    assert len({sample for _, samples in found["seen"] for sample in samples}) == 6 * 256
    assert found["gradient"] > 1e-3  # BatchNorm's statistics are those of half a micro-batch


@simulated_alone
def test_dp_holds_the_same_on_each_device_and_dp_classic_does_not(step, figure):
    (first, second), (gathers, other) = step("dp", 2, "wide")["peak"], step("dp-classic", 2, "wide")["peak"]
    figure(f"dp {first / 2**20:.1f} and {second / 2**20:.1f} MiB, dp-classic {gathers / 2**20:.1f} and"
           f" {other / 2**20:.1f} MiB")
    assert abs(first - second) < 0.1 * second and gathers > 2 * other


@pytest.mark.long
@simulated_alone
@pytest.mark.parametrize("number", [2, 3])
def test_no_device_of_a_split_model_holds_more_than_its_share_and_a_block(step, number):
    found = step("model-parallel", number, "resnet18")
    assert len(found["held"]) == number
    assert max(found["held"].values()) <= sum(found["held"].values()) / number + found["largest"]


LEARNT = [*TASKS, *OBJECTIVES]
EACH = [(strategy, what) for strategy in ("dp", "model-parallel", "dp-classic") for what in LEARNT
        if (strategy, what) != ("dp-classic", "masked-lm")]  # which is refused
ESSENTIAL = [("dp", "text-classification")]


@pytest.mark.long
@pytest.mark.needs("two devices")
@pytest.mark.parametrize("strategy, what", [
    pytest.param(*each, marks=() if each in ESSENTIAL else pytest.mark.slow) for each in EACH])
def test_a_killed_run_ends_with_the_weights_of_one_that_was_not(accelerator, live, runs, run_dir, strategy, what):
    words = [*runs.words(what, strategy), "--ema-decay", "0.9", "--deterministic", "--devices-per-process", "2"]
    whole = run_dir.parent / "whole"
    result = accelerator.run(None, *words, "--run-dir", whole)
    assert result.returncode == 0 and f" on 2 x {accelerator.name} in 1 process;" in result.out, result.text
    assert "evaluated 147 of 147" in result.out and "trained on 57 of 57 samples" in result.out
    launch = live(accelerator, None, *words, "--run-dir", run_dir)
    launch.wait_for(lambda: trained_steps(run_dir) >= 3 and newest_checkpoint(run_dir), "a checkpoint")
    os.kill(launch.process.pid, signal.SIGKILL)
    assert launch.wait().returncode != 0
    result = accelerator.run(None, *words, "--run-dir", run_dir)
    assert result.returncode == 0 and "resumed at step" in result.out, result.text
    assert trained_steps(run_dir) == STEPS and outcome(run_dir) == outcome(whole)


@pytest.mark.slow
@simulated_alone
@pytest.mark.parametrize("what", LEARNT)
def test_a_split_model_is_shared_by_two_processes_also_after_a_kill(accelerator, live, runs, run_dir, what):
    words, whole = runs.words(what, "model-parallel"), run_dir.parent / "whole"
    result = accelerator.run(2, *words, "--run-dir", whole)
    assert result.returncode == 0 and f" on 4 x {accelerator.name} in 2 processes;" in result.out, result.text
    launch = live(accelerator, 2, *words, "--run-dir", run_dir)
    launch.wait_for(lambda: trained_steps(run_dir) >= 3 and newest_checkpoint(run_dir), "a checkpoint")
    launch.kill_rank(1)
    assert launch.wait().code == Exit.LOST_PEERS
    result = accelerator.run(2, *words, "--run-dir", run_dir)
    assert result.returncode == 0 and "resumed at step" in result.out, result.text
    assert trained_steps(run_dir) == STEPS and outcome(run_dir) == outcome(whole)


@pytest.mark.slow
@pytest.mark.needs("two devices")
@pytest.mark.parametrize("strategy, what", EACH)
def test_an_evaluation_gives_the_digits_of_ddp(accelerator, runs, strategy, what):
    run, found = runs.on_device(1, what), []
    for words in (["ddp"], [strategy, "--devices-per-process", "2"]):
        result = accelerator.run(None, "--eval-only", "--run-dir", run, "--strategy", *words)
        assert result.returncode == 0, result.text
        found.append({key: value for key, value in json.loads(result.out).items() if key != "time"})
    assert found[0] == found[1]


@pytest.mark.rows(1)
@simulated_alone
@pytest.mark.parametrize("devices, processes, words, parts", [
    (4, 2, ["--strategy", "dp"], ["--strategy dp computes in 1 process, and there are 2", "python train.py"]),
    (1, None, ["--strategy", "model-parallel"], ["needs 2 devices in each process, and sim gives 1"]),
    (4, None, ["--strategy", "model-parallel", "--devices-per-process", "5"],
     ["1 process on this node, but 4 sim devices; each process needs 5 of its own: --devices-per-process 4"]),
    (16, None, ["--strategy", "model-parallel"], ["blocks, the largest with", "use --devices-per-process "]),
    (4, None, ["--devices-per-process", "2"], ["with --strategy ddp a process has one device", "dp or dp-classic"]),
    (4, None, ["--strategy", "dp-classic", "--task", "masked-lm"], ["a layer of this model takes a whole one"]),
    (4, None, ["--strategy", "dp-classic", "--checkpoint-activations"], ["cannot compute activations again"]),
    (4, None, ["--strategy", "dp", "--find-unused-parameters"], ["--strategy dp has none; leave it out"]),
    (4, None, ["--strategy", "model-parallel", "--compile"], ["--compile does not work with --strategy model-p"]),
], ids=["processes", "one-device", "too-few", "too-fine", "ddp", "tokens", "again", "switch", "compiled"])
def test_what_cannot_be_is_refused_before_training(accelerator, runs, run_dir, devices, processes, words, parts):
    task = "masked-lm" if "masked-lm" in words else "image-classification"
    result = accelerator.simulating(devices=devices).run(
        processes, *runs.words(task), *words, "--run-dir", run_dir)
    assert result.code == Exit.USAGE, result.text
    assert all(result.err.count(part) == 1 for part in parts), result.text
    assert not run_dir.exists()
