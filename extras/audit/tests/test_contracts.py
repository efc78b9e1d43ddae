"""--audit-every raises no false alarm, and the run is the one without audits: each task and strategy, 2 and 3 ranks."""

import pytest

from models.tasks import TASKS
from tests.contracts.test_exactness import COMMON, WORDS
from tests.harness.run_directory import outcome
from tests.harness.strategies import ACROSS
from utils.errors import Exit
from utils.strategies import STRATEGIES, load_strategy

ALL = [(task, strategy, processes) for task in sorted(WORDS) for strategy in ACROSS for processes in (2, 3)]
SHORT = ("image-classification", "ddp", 3), ("masked-lm", "exact", 2)


@pytest.fixture
def words_of(data_of):
    return lambda task, *more: ["--task", task, "--data", data_of[task], *WORDS[task], *COMMON, "--workers", 0, *more]


def is_run(result):
    assert result.returncode == 0, result.text


def test_the_strategies_that_can_be_audited_are_those_of_this_contract():
    assert [name for name in STRATEGIES if load_strategy(name).can_audit] == ACROSS and set(WORDS) == set(TASKS)


@pytest.mark.long
@pytest.mark.parametrize("task, strategy, processes", [
    pytest.param(*each, marks=() if each in SHORT else pytest.mark.slow) for each in ALL])
def test_an_audited_run_is_the_one_without_audits(task, strategy, processes, words_of, run_torchrun, run_dir):
    words, plain = words_of(task, "--strategy", strategy), run_dir.parent / "plain"
    is_run(run_torchrun(processes, *words, "--run-dir", plain))
    is_run(run_torchrun(processes, *words, "--run-dir", run_dir, "--audit-every", 1))
    assert outcome(run_dir) == outcome(plain)


@pytest.mark.long
@pytest.mark.parametrize("more", [
    ["--micro-batch-size", "8"],  # three: what is compared is then what DDP sends
    *(pytest.param(more, marks=pytest.mark.slow) for more in (
        ["--precision", "fp16"], ["--ema-decay", "0.9"], ["--find-unused-parameters"], ["--checkpoint-activations"],
        ["--mixup", "0.8", "--class-weights", "balanced"], ["--freeze", "backbone"],
        ["--micro-batch-size", "8", "--strategy", "exact"]))], ids=" ".join)
def test_a_technique_is_no_alarm(more, words_of, run_torchrun, run_dir):
    words, plain = words_of("image-classification", *more), run_dir.parent / "plain"
    is_run(run_torchrun(3, *words, "--run-dir", plain))
    is_run(run_torchrun(3, *words, "--run-dir", run_dir, "--audit-every", 1))
    assert outcome(run_dir) == outcome(plain)


@pytest.mark.slow
def test_a_run_that_stops_between_audits_has_the_same_ones(words_of, run_torchrun, run_dir):
    words, plain = words_of("text-classification"), run_dir.parent / "plain"
    is_run(run_torchrun(3, *words, "--run-dir", plain))
    for stop in (2, 3):
        stopped = run_torchrun(3, *words, "--run-dir", run_dir, "--audit-every", 3, "--stop-after", stop)
        assert stopped.code == Exit.STOPPED, stopped.text
    is_run(run_torchrun(3, *words, "--run-dir", run_dir, "--audit-every", 3))
    assert outcome(run_dir) == outcome(plain)
