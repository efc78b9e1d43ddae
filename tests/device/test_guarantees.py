"""docs/strategies.md, "What each guarantees": every cell of its table, from runs.

One process with several devices has simulated ones; a strategy that puts one device into a process runs on the CPU.
Three steps, of all 57 samples in six micro-batches: two or four processes or devices add them up in another order than
one; and dp-classic, which gives a device two samples at least, uses four.
"""

import re

import pytest
from safetensors.torch import load_file

from tests.conftest import ROOT
from tests.device.runs import TEXTS
from tests.harness.run_directory import newest_checkpoint, outcome, records
from utils.errors import Exit
from utils.strategies import STRATEGIES, load_strategy

UNMIXED = ["--mixup", "0", "--cutmix", "0"]
MODELS = {  # what ranks or devices could compute differently
    "plain": ["--model", "squeezenet1_1", "--dropout", "0", "--image-size", "32", *UNMIXED],
    "BatchNorm": ["--model", "resnet18", "--image-size", "32", *UNMIXED],
    "dropout": [*TEXTS, "--text-column", "text,more"],
}
GRADIENT = {  # a cell, and the models whose gradient is that of ddp
    "yes": set(MODELS), "up to rounding": set(MODELS), "only without dropout": {"plain", "BatchNorm"},
    "only without BatchNorm and dropout": {"plain"}}
ROUNDING = 1e-4  # relative, of losses, norms and statistics; the devices of this suite compute alike
ROWS = {row[0]: row[1:] for row in (
    [cell.strip(" `") for cell in line.strip("|").split("|")] for line in re.search(
        r"\| strategy \| more processes .*\n.*\n((?:\| `.*\n)+)",
        (ROOT / "docs/strategies.md").read_text())[1].splitlines())}

pytestmark = [pytest.mark.slow, pytest.mark.needs("simulation")]


@pytest.fixture(scope="module")
def launched(accelerator, runs, run_torchrun, session_dir):
    """launched(strategy, number, model, name, *words): a Result and its run directory, which may be there already.

    number: of processes; where one process alone is allowed, of its devices.
    """
    devices = accelerator.simulating(devices=4)

    def launch(strategy, number, model, name, *words):
        kind, run = load_strategy(strategy), session_dir / "guarantees" / f"{strategy}-{number}-{model}-{name}"
        task = "text-classification" if model == "dropout" else "image-classification"
        words = [*runs.words(task, strategy), *MODELS[model], "--global-batch-size", "57", "--micro-batch-size", "10",
                 "--epochs", "3", "--log-every", "1", "--run-dir", run, *words]
        if kind.max_devices == 1:
            return run_torchrun(number, *words, "--device", "cpu"), run
        processes, each = (None, number) if kind.max_processes == 1 else (number, 2)
        return devices.run(processes, *words, "--devices-per-process", each), run

    return launch


@pytest.fixture(scope="module")
def first_step(launched):
    """first_step(strategy, model): norm of the gradient, and BatchNorm's running statistics after one step."""
    known = {}

    def find(strategy, model):
        if (strategy, model) not in known:
            result, run = launched(strategy, 2, model, "first", "--stop-after", 1)
            assert result.code == Exit.STOPPED, result.text
            record, *_ = records(run)
            statistics = {name: value for name, value in load_file(newest_checkpoint(run) / "model.safetensors").items()
                          if "running" in name}
            known[strategy, model] = record["grad_norm"], statistics
        return known[strategy, model]

    return find


def is_close(value, other):
    """Up to rounding."""
    return value == pytest.approx(other, rel=ROUNDING)


def test_the_table_has_each_strategy():
    assert list(ROWS) == list(STRATEGIES)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_number_of_processes_changes_the_result_as_it_says(launched, strategy):
    if ROWS[strategy][0] == "one only":
        assert load_strategy(strategy).max_processes == 1  # refused: test_strategies.py
        return
    (one, run), (two, other) = (launched(strategy, number, "plain", "whole") for number in (1, 2))
    assert one.returncode == two.returncode == 0, one.text + two.text
    is_same = outcome(run) == outcome(other)
    assert is_close(*([each["loss"] for each in records(folder) if "loss" in each] for folder in (run, other)))
    assert ROWS[strategy][0] == f"change {'nothing' if is_same else 'rounding'}"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_resumed_run_has_the_bits_that_it_says(launched, strategy):
    result, whole = launched(strategy, 2, "plain", "straight")
    assert result.returncode == 0, result.text
    is_alone = load_strategy(strategy).max_processes == 1

    def is_same_on(number):
        result, run = launched(strategy, 2, "plain", f"stopped-{number}", "--stop-after", 1)
        assert result.code == Exit.STOPPED, result.text
        result, _ = launched(strategy, number, "plain", "resumed", "--run-dir", run)
        assert result.returncode == 0 and "resumed at step 1" in result.text, result.text
        return outcome(run) == outcome(whole)

    assert is_same_on(2)
    is_same_on_others = is_same_on(4 if is_alone else 1)
    assert ROWS[strategy][1] == (
        "on any number" if is_same_on_others else "on the same number" + " of devices" * is_alone)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_gradient_is_that_of_ddp_where_it_says(first_step, strategy, figure):
    found = {model: first_step(strategy, model)[0] / first_step("ddp", model)[0] - 1 for model in MODELS}
    figure(", ".join(f"{model} {difference:.0e}" for model, difference in found.items()))
    assert {model for model, difference in found.items() if is_close(1 + difference, 1)} == GRADIENT[ROWS[strategy][2]]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_batch_norms_statistics_are_those_of_ddp_where_it_says(first_step, strategy):
    found, expected = (first_step(name, "BatchNorm")[1] for name in (strategy, "ddp"))
    assert len(expected) == 40 and set(found) == set(expected)
    is_ddps = all((found[name] - value).abs().max() <= ROUNDING * value.abs().max() for name, value in expected.items())
    assert ROWS[strategy][3].startswith("yes" if is_ddps else "no")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_dropout_is_that_of_ddp_where_it_says(first_step, strategy):
    found, expected = (first_step(name, "dropout")[0] for name in (strategy, "ddp"))
    assert ROWS[strategy][4].startswith("yes" if is_close(found, expected) else "no")
