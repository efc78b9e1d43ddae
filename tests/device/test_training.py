"""Training on a device: the weights of the CPU, no wait of the host inside a step, kills, moves between devices.

On the simulated device every copy is late and memory that is being copied from is watched, so that each of these runs
is also a test of both. On a real one sums are rounded in another order: losses are compared.
"""

import json
import os
import signal
from collections import Counter
from functools import partial
from itertools import product

import pytest

from tests.device.runs import CLOSE, COARSE, EVALUATIONS, OBJECTIVES, RECORDED, STEPS, TASKS, TECHNIQUES
from tests.harness.run_directory import newest_checkpoint, outcome, records, status, trained_steps, weights_sha256
from tests.harness.strategies import ACROSS
from utils.errors import Exit


def all_but(*essential):
    """(task, strategy, processes): all; but the essential ones only in `make device` and `make gpu`."""
    def row(case):
        needs = [pytest.mark.needs("two devices")] if case[2] > 1 else []
        return pytest.param(*case, marks=needs if case in essential else [*needs, pytest.mark.slow])

    return pytest.mark.parametrize(
        ("task", "strategy", "processes"),
        [row((task, name, n)) for task in TASKS for name in ACROSS for n in (1, 2)])


EXPECTED = (ANSWER, RECORD, METRICS) = (
    "engine/step.py:is_wrong", "engine/records/steps.py:_record_step",
    "models/metrics/metric.py:values")
WAITS = {ANSWER: STEPS, RECORD: len(RECORDED), METRICS: EVALUATIONS}  # of a run without techniques
ESSENTIAL = [("image-classification", "ddp", 2), ("masked-lm", "exact", 1)]


@pytest.mark.long
@pytest.mark.needs("simulation")
@all_but(*ESSENTIAL)
def test_the_weights_are_those_of_the_cpu(runs, figure, task, strategy, processes):
    on_device, on_cpu = (run(processes, task, strategy) for run in (runs.on_device, runs.on_cpu))
    figure(weights_sha256(on_device)[:16])
    assert outcome(on_device) == outcome(on_cpu)


@pytest.mark.needs("simulation")
@all_but(*ESSENTIAL)
def test_the_host_waits_in_a_step_for_the_flag_of_the_last_one_alone(runs, figure, task, strategy, processes):
    run = runs.on_device(processes, task, strategy)
    for rank in range(processes):
        found = waits_by_cause(runs.report(run, rank)["waits"])
        figure(f"{dict(found)}")
        once = [name for name, count in found.items() if name not in EXPECTED and count == 2]
        if strategy == "ddp" and processes > 1:  # DDP lays out its buckets anew: two copies each way, once
            assert [name.partition(" in ")[0] for name in sorted(once)] == ["copy to device", "copy to host"]
            found = {name: count for name, count in found.items() if name not in once}
        assert found == WAITS


@pytest.mark.long
@pytest.mark.needs("simulation")
@pytest.mark.parametrize("task, precision", [
    pytest.param(*case, marks=[] if case == ("image-classification", "fp16") else [pytest.mark.slow])
    for case in product(TASKS, COARSE)])
def test_the_host_waits_no_more_in_low_precision(runs, figure, task, precision):
    """The loss scale of fp16 arrives with the flag."""
    found = waits_by_cause(runs.report(runs.on_device(1, task, "ddp", precision), 0)["waits"])
    figure(f"{dict(found)}")
    assert found == WAITS


@pytest.mark.slow
@pytest.mark.needs("simulation")
@pytest.mark.parametrize("task", TECHNIQUES)
def test_techniques_have_the_cpus_weights_and_add_no_wait_to_a_step(runs, figure, task):
    """The run may stop early, after two of three epochs; a checkpointed layer of the encoder has dropout."""
    key = (task, "ddp", "fp32", "techniques")
    run = runs.on_device(1, *key)
    stop = trained_steps(run)
    figure(weights_sha256(run)[:16])
    assert outcome(run) == outcome(runs.on_cpu(1, *key))
    expected = {ANSWER: stop, RECORD: len([step for step in RECORDED if step <= stop]),
                METRICS: 2 * stop * EVALUATIONS // STEPS}  # with averages
    assert waits_by_cause(runs.report(run, 0)["waits"]) == expected


@pytest.mark.slow
@pytest.mark.needs("simulation")
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_numbers_and_several_labels_have_the_cpus_weights_and_add_no_wait(runs, figure, objective):
    key = (objective, "ddp", "fp32")
    run = runs.on_device(1, *key)
    figure(weights_sha256(run)[:16])
    assert outcome(run) == outcome(runs.on_cpu(1, *key))
    assert waits_by_cause(runs.report(run, 0)["waits"]) == WAITS


@pytest.mark.long
@pytest.mark.needs("simulation")
@pytest.mark.parametrize("strategy, processes", [("ddp", 1), ("exact", 1)])
def test_a_fitted_head_has_the_cpus_weights_and_adds_no_wait_to_a_step(
        runs, figure, monkeypatch, strategy, processes):
    """Of several labels, on the weights of a run for one class. Besides, step 0 is evaluated."""
    base = runs.on_cpu(1, "text-classification", "ddp", "fp32") / "model"
    fitted = "fitted-labels"
    monkeypatch.setitem(OBJECTIVES, fitted, [
        "--task", "text-classification", "--model", base, "--max-length", "32", "--text-column", "text",
        "--label-column", "labels", "--multi-label"])
    monkeypatch.setitem(runs._data, fitted, runs._data["text-labels"])
    run, on_cpu = (make(processes, fitted, strategy, "fp32") for make in (runs.on_device, runs.on_cpu))
    figure(weights_sha256(run)[:16])
    assert [record["step"] for record in records(run) if record["split"] == "val"] == [0, 3, 6, 9]
    assert outcome(run) == outcome(on_cpu)
    evaluated = WAITS[METRICS] // EVALUATIONS * (EVALUATIONS + 1)
    assert waits_by_cause(runs.report(run, 0)["waits"]) == WAITS | {METRICS: evaluated}


def waits_by_cause(waits):
    """How often the host waited in steps and evaluations, not in saves: for events, by what asked; for all else."""
    found = Counter()
    for kind, frames, count in waits:
        if {"train.py:train_one_epoch", "engine/evaluation.py:run"} & set(frames) and (
                "engine/saving.py:save" not in frames):
            cause = next((name for name in EXPECTED if name in frames), None) if kind == "event" else None
            found[cause or f"{kind} in {' < '.join(frames[:3])}"] += count
    return found


def test_a_batch_is_copied_beside_the_devices_other_work(accelerator):
    result = accelerator.run(None, script="tests/device/check_copies.py")
    assert result.returncode == 0, result.text


@pytest.mark.slow
@pytest.mark.needs("hardware", "cuda")
@pytest.mark.parametrize("task", TASKS)
def test_a_step_makes_no_call_that_torch_knows_to_wait(accelerator, runs, run_dir, task):
    result = accelerator.run(None, *runs.words(task), "--run-dir", run_dir,
                             script="tests/device/train_without_waits.py")
    assert result.returncode == 0, result.text


@pytest.mark.slow
@pytest.mark.parametrize("processes", [None, pytest.param(2, marks=pytest.mark.needs("two devices"))])
@pytest.mark.parametrize("strategy", ACROSS)
@pytest.mark.parametrize("task", TASKS)
def test_losses_are_close_to_those_of_the_cpu_over_20_steps(
        runs, losses_beside_the_cpu, no_dropout, task, strategy, processes):
    words = [*runs.words(task, strategy), *no_dropout[task], "--max-steps", 20, "--epochs", 20, "--log-every", 1,
             "--lr", 1e-4]
    found, expected = losses_beside_the_cpu(words, processes)
    assert len(found) >= 20 and found == pytest.approx(expected, abs=CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("precision", COARSE)
def test_low_precision_has_the_losses_of_the_cpu(
        accelerator, runs, losses_beside_the_cpu, no_dropout, task, precision):
    """Of texts, half are padded: attention has a mask. Without dropout the CPU's bits are another generator's, too."""
    found, expected = losses_beside_the_cpu([*runs.words(task, "ddp", precision), *no_dropout[task]])
    assert found == (expected if accelerator.is_simulated else pytest.approx(expected, abs=COARSE[precision]))


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.needs("two devices"))])
def test_a_killed_run_in_fp16_ends_with_the_weights_of_one_that_was_not(accelerator, live, runs, run_dir, processes):
    words = [*runs.words("image-classification", "ddp", "fp16"), "--deterministic", "--log-every", 1]
    number, whole = processes if processes > 1 else None, run_dir.parent / "whole"
    result = accelerator.run(number, *words, "--run-dir", whole)
    assert result.returncode == 0, result.text
    launch = live(accelerator, number, *words, "--run-dir", run_dir)
    launch.wait_for(lambda: trained_steps(run_dir) >= 5, "step 5")
    os.kill(launch.rank(processes - 1) if processes > 1 else launch.process.pid, signal.SIGKILL)
    assert launch.wait().returncode != 0
    result = accelerator.run(number, *words, "--run-dir", run_dir)
    assert result.returncode == 0, result.text
    assert "resumed at step" in result.out
    assert outcome(run_dir) == outcome(whole)


@pytest.mark.slow
def test_a_run_moves_to_the_cpu_and_back(accelerator, runs, run_train, run_dir):
    words = [*runs.words("image-classification", "exact"), "--run-dir", run_dir]
    for kind, before, stop in ((accelerator.name, None, 3), ("cpu", accelerator.name, 3),
                               (accelerator.name, "cpu", STEPS)):
        start = run_train if kind == "cpu" else partial(accelerator.run, None)
        result = start(*words, "--device", kind, "--stop-after", stop)
        assert result.returncode == (Exit.STOPPED if stop < STEPS else 0), result.text
        assert (f"device was {before} in this run and is now {kind};" in result.out) == (
            before is not None), result.text
    assert status(run_dir)["state"] == "finished"
    if accelerator.has_the_cpus_bits:
        assert weights_sha256(run_dir) == weights_sha256(runs.on_cpu(1, "image-classification", "exact"))


@pytest.mark.slow
def test_a_checkpoint_of_the_device_is_evaluated_on_the_cpu(accelerator, runs, run_train):
    run = runs.on_device(1, "image-classification", "ddp")
    result = run_train(*runs.words("image-classification", "ddp"), "--run-dir", run, "--device", "cpu", "--eval-only")
    assert result.returncode == 0, result.text
    found, trained = json.loads(result.out), [record for record in records(run) if record["split"] == "val"]
    best = next(record for record in trained if record["step"] == found["step"])
    tolerance = 0 if accelerator.is_simulated else CLOSE
    assert found["loss"] == pytest.approx(best["loss"], abs=tolerance) and newest_checkpoint(run).is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "exact"])
def test_a_run_is_verified_on_its_device_and_not_judged_on_another(accelerator, run_train, runs, run_dir, strategy):
    words = [*runs.words("image-classification", strategy), "--deterministic", "--run-dir", run_dir]
    for more, code in ((["--stop-after", 4], Exit.STOPPED), ([], Exit.DONE)):
        result = accelerator.run(None, *words, *more)
        assert result.returncode == code, result.text
    result = accelerator.run(None, run_dir, script="ask/verify.py")
    assert result.returncode == 0 and f"verified: {run_dir}" in result.out, result.text
    result = run_train(run_dir, "--device", "cpu", script="ask/verify.py")
    assert "\nhardware: " in result.out, result.text
    assert result.returncode == (Exit.DONE if accelerator.has_the_cpus_bits else Exit.OTHER_RUN), result.text
