"""Real runs under --strategy fsdp: stops and kills change nothing, the strategy may change, what is NaN is named.

The runs are those of test_exactness.py; fsdp has no simulated device, so they are on the CPU.
"""

import json

import pytest

from models.tasks import TASKS
from tests.contracts.test_exactness import COMMON, WORDS
from tests.harness.run_directory import outcome, records, status, trained_steps, weights_sha256
from utils.errors import Exit

STEPS = 3  # one epoch


@pytest.fixture
def words_of(data_of):
    """words_of(task, strategy): a run of one epoch, in fp32."""
    def words(task, strategy="fsdp"):
        return ["--task", task, "--strategy", strategy, "--data", data_of[task], *WORDS[task], *COMMON,
                "--epochs", "1", "--precision", "fp32", "--workers", "0"]

    return words


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_fsdp_stopped_and_killed_ends_as_if_uninterrupted(task, words_of, run_dir, run_torchrun, start_torchrun):
    words, straight = words_of(task), run_dir.parent / "straight"
    result = run_torchrun(2, *words, "--run-dir", straight)
    assert result.returncode == 0, result.text
    assert trained_steps(straight) == STEPS

    stopped = run_torchrun(2, *words, "--run-dir", run_dir, "--stop-after", 1)
    assert (stopped.code, status(run_dir)["step"]) == (Exit.STOPPED, 1), stopped.text
    killed = start_torchrun(2, *words, "--run-dir", run_dir, "--save-every", 1)
    killed.wait_for(lambda: trained_steps(run_dir) >= 2, "a step more")
    killed.kill_all()
    finished = run_torchrun(2, *words, "--run-dir", run_dir)
    assert finished.returncode == 0, finished.text
    assert "resumed at step" in finished.out
    assert outcome(run_dir) == outcome(straight)


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_a_run_goes_on_under_another_strategy_and_evaluates_alike(task, words_of, run_dir, run_torchrun):
    """ddp -> fsdp on 4 with uneven shares -> exact -> ddp; --eval-only gives the digits that the run has on record."""
    for step, (strategy, processes) in enumerate((("ddp", 2), ("fsdp", 4), ("exact", 2)), 1):
        stopped = run_torchrun(processes, *words_of(task, strategy), "--epochs", 2, "--run-dir", run_dir,
                               "--stop-after", 1)
        assert (stopped.code, status(run_dir)["step"]) == (Exit.STOPPED, step), stopped.text
    finished = run_torchrun(2, *words_of(task, "ddp"), "--epochs", 2, "--run-dir", run_dir)
    assert finished.returncode == 0, finished.text

    result = run_torchrun(2, "--eval-only", "--run-dir", run_dir, "--strategy", "fsdp")
    assert result.returncode == 0, result.text
    found = {name: value for name, value in json.loads(result.out).items() if name != "time"}
    best = json.loads((run_dir / "summary.json").read_text())["best"]["step"]
    assert [found] == [record for record in records(run_dir) if record["split"] == "val" and record["step"] == best]


def test_a_sample_that_is_not_a_number_ends_both_ranks_with_80(words_of, run_dir, run_torchrun):
    words = [*words_of("image-classification"), "--run-dir", run_dir, "--save-every", 1]
    ended = run_torchrun(2, *words, script="tests/faults/train_with_nan.py", env={"NAN_SAMPLES": "7"})
    assert ended.code == Exit.DIVERGED, ended.text
    assert "is not finite; it comes from rank" in ended.err, ended.text
    assert "timed out" not in ended.text  # both ranks ended by themselves


@pytest.mark.parametrize("words, said", [
    (["--ema-decay", "0.9"], "--ema-decay 0.9: this --strategy keeps no averages"),
    (["--compile"], "--compile does not work with --strategy fsdp")])
def test_what_fsdp_cannot_do_is_refused_before_training(words_of, run_dir, run_torchrun, words, said):
    result = run_torchrun(2, *words_of("image-classification"), "--run-dir", run_dir, *words)
    assert (result.code, result.err.count(said)) == (Exit.USAGE, 1), result.text


@pytest.mark.slow
def test_fsdp_in_one_process_is_ddp_in_one_process(words_of, run_dir, run_train):
    runs = {strategy: run_dir.parent / strategy for strategy in ("fsdp", "ddp")}
    for strategy, run in runs.items():
        result = run_train(*words_of("image-classification", strategy), "--run-dir", run)
        assert result.returncode == 0, result.text
    assert weights_sha256(runs["fsdp"]) == weights_sha256(runs["ddp"])


# fully_shard's models are contiguous in memory, ddp's are channels_last: on a CPU without bf16, a convolution in bf16
# takes another kernel there, which rounds otherwise. With both contiguous, the bounds of fp32 hold.
@pytest.mark.slow
@pytest.mark.parametrize("task, precision, loss_bound, norm_bound", [
    ("image-classification", "fp32", 1e-6, 1e-5), ("image-classification", "bf16", 1e-4, 1e-2),
    ("masked-lm", "bf16", 1e-6, 1e-5)])
def test_fsdp_with_activation_checkpointing_and_clipping(
        task, precision, loss_bound, norm_bound, words_of, run_dir, run_torchrun):
    """Checkpointed activations change no bit; of a step that clips, the records hold the norm that ddp has."""
    runs = {}
    for name, strategy, more in (("fsdp", "fsdp", ()), ("again", "fsdp", ("--checkpoint-activations",)), (
            "ddp", "ddp", ())):
        runs[name] = run_dir.parent / name
        result = run_torchrun(2, *words_of(task, strategy), "--precision", precision, "--max-grad-norm", "0.5", *more,
                              "--run-dir", runs[name])
        assert result.returncode == 0, result.text
    assert weights_sha256(runs["fsdp"]) == weights_sha256(runs["again"])
    first, of_ddp = records(runs["fsdp"])[0], records(runs["ddp"])[0]
    assert first["loss"] == pytest.approx(of_ddp["loss"], rel=loss_bound)
    assert first["grad_norm"] == pytest.approx(of_ddp["grad_norm"], rel=norm_bound)
