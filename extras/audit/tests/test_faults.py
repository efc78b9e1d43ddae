"""--audit-every: a rank that computes wrongly is named, before the optimizer has changed anything; others are not."""

import json
import re
import socket

import pytest

from tests.harness.launches import (
    STEPS,
    WORDS,
    assert_as_undisturbed,
    assert_failed,
    assert_gone,
    assert_stopped,
    image_of,
    sample_of,
)
from tests.harness.run_directory import newest_checkpoint, outcome, status, trained_steps
from utils.errors import Exit

SCRIPT = "extras/audit/tests/train_with_a_fault.py"
HOST = socket.gethostname()
NAMED = f"rank 1 on {HOST} (cpu) computed micro-batch {{}} of optimizer step {{}} wrongly"


@pytest.fixture
def words(photos, run_dir):
    return [*WORDS, "--data", photos, "--run-dir", run_dir, "--save-every", 1, "--workers", 0]


@pytest.fixture
def failing(start_torchrun, words):
    """failing(processes, every, words, kind=..., ...): a live launch whose rank 1 is at fault."""
    def start(processes, every, *more, **fault):
        return start_torchrun(processes, *words, "--audit-every", every, *more, script=SCRIPT,
                              env={"FAULT": json.dumps({"rank": 1} | fault)})

    return start


def saved_step(run):
    return int(re.search(r"step-0*(\d+)", newest_checkpoint(run).name)[1])


# --- what is found


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("exact", marks=pytest.mark.slow)])
def test_of_three_ranks_the_wrong_one_is_named_and_nothing_has_changed(
        strategy, words, run_dir, failing, run_torchrun):
    launch = failing(3, 3, "--strategy", strategy, kind="always")
    assert_failed(launch, run_dir, Exit.HARDWARE, NAMED.format(0, 3), NAMED.format(1, 3),
                  "two other ranks agree on other bits")
    assert NAMED.format(1, 3) in status(run_dir)["message"]
    assert saved_step(run_dir) == status(run_dir)["step"] == trained_steps(run_dir) == 2
    weights = (newest_checkpoint(run_dir) / "model.safetensors").read_bytes()
    again = run_torchrun(3, *words, "--strategy", strategy, "--stop-after", 1)
    assert again.code == Exit.STOPPED and "resumed at step 2" in again.out, again.text
    assert (run_dir / "checkpoints/step-0000000002-g1/model.safetensors").read_bytes() == weights


def test_of_two_ranks_the_one_that_contradicts_itself_is_named(run_dir, failing):
    launch = failing(2, 3, "--strategy", "exact", kind="once", step=3, index=1)
    assert_failed(launch, run_dir, Exit.HARDWARE, NAMED.format(1, 3) + ": its bits were others when it repeated it")
    assert saved_step(run_dir) == 2


@pytest.mark.long
def test_of_two_ranks_one_that_repeats_its_error_is_one_of_the_two(run_dir, failing):
    either = f"rank 0 on {HOST} (cpu) or rank 1 on {HOST} (cpu) computed micro-batch {{}} of optimizer step 3 wrongly"
    assert_failed(failing(2, 3, kind="always"), run_dir, Exit.HARDWARE, either.format(0), either.format(1))


@pytest.mark.slow
def test_an_error_of_the_rank_that_audits_names_that_rank(run_dir, failing):
    """In its first audit rank 1 computes micro-batch (1 + 1 + 1 mod 2) mod 3."""
    launch = failing(3, 3, kind="once", step=3, index=0)
    assert_failed(launch, run_dir, Exit.HARDWARE, NAMED.format(0, 3))


@pytest.mark.slow
@pytest.mark.parametrize("step, index", [(2, 1), (3, 4)])
def test_a_single_error_outside_of_what_is_audited_is_not_found(words, run_dir, failing, step, index):
    result = assert_gone(failing(3, 3, kind="once", step=step, index=index), run_dir)
    assert result.returncode == 0 and trained_steps(run_dir) == STEPS, result.text


@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_weights_that_differ_are_found_at_the_next_audit(processes, run_dir, failing):
    who = f"rank 1 on {HOST} (cpu)" if processes > 2 else f"rank 0 on {HOST} (cpu) or rank 1 on {HOST} (cpu)"
    assert_failed(failing(processes, 3, kind="weights", step=2), run_dir, Exit.HARDWARE,
                  f"before optimizer step 3 {who} has other weights than the other ranks")


# --- what does not disturb an audit, and what an audit does not disturb


@pytest.mark.long
@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_rank_that_is_killed_in_an_audit_is_lost_and_the_run_goes_on(
        processes, words, run_dir, failing, run_torchrun, undisturbed):
    launch = failing(processes, 2, kind="in_audit", signal="SIGKILL", step=4)
    if processes == 3:  # each of the two that are left says it
        assert launch.wait().code == Exit.LOST_PEERS
    else:
        assert_failed(launch, run_dir, Exit.LOST_PEERS, "lost its peers")
    assert saved_step(run_dir) == 3
    if processes == 2:
        assert_as_undisturbed(run_torchrun(2, *words, "--audit-every", 2), run_dir, undisturbed)


@pytest.mark.long
def test_a_stop_in_an_audit_saves_after_that_step(words, run_dir, failing, run_torchrun, undisturbed):
    launch = failing(2, 2, kind="in_audit", signal="SIGTERM", step=4)
    assert assert_stopped(launch, run_dir, "SIGTERM to rank 1") in (4, 5)
    assert_as_undisturbed(run_torchrun(2, *words, "--audit-every", 2), run_dir, undisturbed)


@pytest.mark.long
def test_samples_that_cannot_be_read_are_no_alarm(own_photos, run_dir, run_torchrun):
    """A sample of the micro-batch that is audited in step 2; skipped, and where it stops the run."""
    words = [*WORDS, "--data", own_photos, "--run-dir", run_dir, "--workers", 0, "--audit-every", 1]
    bad = image_of(own_photos, "train", sample_of(rank=1, step=2))
    bad.write_bytes(bad.read_bytes()[:40])
    stopped = run_torchrun(2, *words)
    assert stopped.code == Exit.BAD_DATA and stopped.err.count(f"cannot read {bad}") == 1, stopped.text
    assert "more)" not in stopped.err
    skipped = run_torchrun(2, *words, "--bad-samples", "skip")
    assert skipped.returncode == 0 and "skipped 1 unreadable sample" in skipped.out, skipped.text


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("exact", marks=pytest.mark.slow)])
def test_a_gradient_that_is_not_finite_is_no_alarm(strategy, words, run_dir, start_torchrun):
    launch = start_torchrun(2, *words, "--strategy", strategy, "--audit-every", 1, env={
        "NAN_SAMPLES": str(sample_of(rank=1, step=2))}, script="tests/faults/train_with_nan.py")
    assert_failed(launch, run_dir, Exit.DIVERGED, "the gradient of optimizer step 2 is not finite")


@pytest.mark.slow
def test_a_restart_by_torchrun_continues_from_the_save_before(words, run_dir, run_torchrun, undisturbed):
    fault = {"rank": 1, "kind": "once", "step": 5, "index": 1, "until": str(run_dir.parent / "was-wrong")}
    result = run_torchrun(2, *words, "--audit-every", 5, script=SCRIPT, env={"FAULT": json.dumps(fault)},
                          torchrun=["--max-restarts", 1])
    assert NAMED.format(1, 5) in result.text and "resumed at step 4" in result.out
    assert_as_undisturbed(result, run_dir, undisturbed)


@pytest.mark.long
def test_it_continues_on_another_number_of_processes(words, run_dir, run_torchrun):
    """Under exact: with ranks that have no work, and audit others."""
    words += ["--strategy", "exact", "--micro-batch-size", 12]
    first = run_torchrun(3, *words, "--audit-every", 1, "--stop-after", 4)
    assert first.code == Exit.STOPPED, first.text
    assert run_torchrun(2, *words, "--audit-every", 1).returncode == 0
    plain = [run_dir.parent / "plain" if word == run_dir else word for word in words]
    assert run_torchrun(2, *plain).returncode == 0
    assert outcome(run_dir) == outcome(run_dir.parent / "plain")


# --- where it is refused


@pytest.mark.parametrize("processes, more, said", [
    (1, [], "processes check one another, and there is one; start two or more"),
    (2, ["--strategy", "fsdp"], "with --strategy fsdp no process can compute alone what another one computes; use"
                                " --strategy ddp or exact"),
    pytest.param(1, ["--strategy", "dp"], "with --strategy dp no process", marks=pytest.mark.slow),
    pytest.param(1, ["--strategy", "dp-classic"], "with --strategy dp-classic no", marks=pytest.mark.slow),
    pytest.param(2, ["--strategy", "model-parallel", "--devices-per-process", 2], "with --strategy model-parallel no",
                 marks=pytest.mark.slow),
    (2, ["--compile"], "with --compile the bits depend on the shapes")])
def test_it_is_refused_where_bits_cannot_be_compared(processes, more, said, words, run_dir, start_torchrun):
    launch = start_torchrun(processes, *words, "--audit-every", 10, *more)
    result = assert_failed(launch, run_dir, Exit.USAGE, "--audit-every 10: ", said)
    assert "is whole without it" not in result.text  # extras that were not opened are closed, too
