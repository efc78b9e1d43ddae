"""Every task under every strategy: what a run computes depends neither on who computes it nor on interruptions.

Compared are the final weights by sha256, metrics.jsonl but for its timings, state.pt tensor for tensor, and the files
of RUN/eval byte for byte.
Nine steps, three an epoch (24, 17 and 16 samples in six micro-batches): no number of processes above 3 shares them
evenly.
"""

import json
import signal

import pytest

from models.tasks import TASKS
from tests.harness.run_directory import outcome, records, status, trained_steps, weights_sha256
from tests.harness.strategies import ACROSS
from utils.errors import Exit

WORDS = {
    # BatchNorm and dropout
    "image-classification": ["--model", "mobilenet_v3_small", "--image-size", "32"],
    # dropout, length buckets, a vocabulary that is learnt at the first start, sentence pairs
    "text-classification": [
        "--model", "bert-tiny", "--vocab-size", "200", "--max-length", "32", "--text-column", "text,more"],
    # besides, masks and a tied weight
    "masked-lm": ["--model", "bert-tiny", "--vocab-size", "200", "--max-length", "32"],
    # two images in a sample, two targets
    "image-regression": ["--model", "mobilenet_v3_small", "--image-size", "32", "--image-column", "image,mask",
                         "--label-column", "brightness,number", "--loss", "huber"],
    "text-regression": ["--model", "bert-tiny", "--vocab-size", "200", "--max-length", "32", "--text-column", "text",
                        "--label-column", "length"],
}
REGRESSION = "image-regression", "text-regression"
COMMON = ["--global-batch-size", "24", "--micro-batch-size", "4", "--epochs", "3", "--threads", "1",
          "--precision", "bf16", "--log-every", "1"]
STEPS = 9
AUGMENTED = [
    "--mixup", "0.8", "--cutmix", "1", "--auto-augment", "randaugment", "--random-erasing", "0.5",
    "--augmentation", "photo",
    "--class-weights", "balanced", "--loss", "bce", "--label-smoothing", "0.1", "--ema-decay", "0.9"]


def but_in_faults(*slow):
    """The tasks; these in `make faults` alone."""
    return [pytest.param(task, marks=pytest.mark.slow if task in slow else ()) for task in sorted(WORDS)]


of_ddp = pytest.mark.parametrize(
    "task", but_in_faults("text-classification", "masked-lm", *REGRESSION), indirect=True, scope="module")


def test_every_task_and_strategy_is_held_to_this_contract():
    assert set(WORDS) == set(TASKS)
    assert set(ACROSS) == {"exact", "ddp"}


class Contract:
    """Runs of one task under one strategy; those that were not interrupted are computed once."""

    def __init__(self, task, strategy, folder, run_train, run_torchrun, data):
        self.words = ["--task", task, "--strategy", strategy, "--data", data[task], *WORDS[task], *COMMON]
        self.folder, self._run_train, self._run_torchrun = folder, run_train, run_torchrun
        folder.mkdir(parents=True)

    def launch(self, processes, run, *words):
        """One launch, one process without torchrun; its result."""
        start = self._run_train if processes == 1 else lambda *all_words: self._run_torchrun(processes, *all_words)
        return start(*self.words, "--run-dir", run, *words)

    def straight(self, processes, workers=0):
        """The run directory of an uninterrupted run."""
        run = self.folder / f"straight-{processes}"
        if not run.exists():
            result = self.launch(processes, run, "--workers", workers)
            assert result.returncode == 0, result.text
            assert trained_steps(run) == STEPS
        return run


@pytest.fixture(scope="module", params=but_in_faults("image-classification", "text-classification", *REGRESSION))
def task(request):
    return request.param


@pytest.fixture(scope="module")
def contract_of(task, session_dir, run_train, run_torchrun, data_of):
    return {name: Contract(task, name, session_dir / "contracts" / f"{task}-{name}", run_train, run_torchrun, data_of)
            for name in ACROSS}


@pytest.fixture
def exact(contract_of):
    return contract_of["exact"]


@pytest.fixture
def ddp(contract_of):
    return contract_of["ddp"]


@pytest.mark.parametrize(("processes", "workers"), [
    (2, 2), *(pytest.param(more, 0, marks=pytest.mark.slow) for more in (3, 4))])
def test_exact_computes_the_same_bits_on_1_2_3_and_4_processes(exact, processes, workers):
    assert outcome(exact.straight(processes, workers)) == outcome(exact.straight(1))


def test_exact_stopped_on_4_killed_on_3_finished_on_2_has_the_same_bits(exact, run_dir, start_torchrun):
    stopped = exact.launch(4, run_dir, "--stop-after", 4)
    assert (stopped.returncode, stopped.code, status(run_dir)["step"]) == (1, Exit.STOPPED, 4), stopped.text

    killed = start_torchrun(3, *exact.words, "--run-dir", run_dir, "--save-every", 1, "--workers", 2)
    killed.wait_for(lambda: trained_steps(run_dir) >= 6, "two more steps")
    killed.kill_rank(1)
    result = killed.wait()
    assert (result.returncode, result.code) == (1, Exit.LOST_PEERS), result.text
    assert status(run_dir)["state"] == "failed"

    finished = exact.launch(2, run_dir)
    assert finished.returncode == 0, finished.text
    assert "resumed at step" in finished.out
    assert outcome(run_dir) == outcome(exact.straight(1))


@pytest.mark.slow
def test_exact_with_all_augmentation_and_ema_survives_a_kill_on_1_to_4(
        session_dir, run_dir, run_train, run_torchrun, start_torchrun, photos):
    name = "image-classification"
    contract = Contract(name, "exact", session_dir / "contracts" / "augmented", run_train, run_torchrun, {name: photos})
    contract.words += AUGMENTED
    expected = outcome(contract.straight(1))
    assert all("ema_loss" in record for record in expected["records"] if record["split"] == "val")
    assert "samples.csv" in expected["evaluation"]
    for processes, workers in ((2, 1), (3, 0), (4, 0)):
        assert outcome(contract.straight(processes, workers)) == expected

    killed = start_torchrun(2, *contract.words, "--run-dir", run_dir, "--save-every", 1, "--workers", 1)
    killed.wait_for(lambda: trained_steps(run_dir) >= 4, "four steps")
    killed.kill_rank(1)
    assert killed.wait().code == Exit.LOST_PEERS
    finished = contract.launch(3, run_dir)
    assert finished.returncode == 0, finished.text
    assert "resumed at step" in finished.out and outcome(run_dir) == expected


@pytest.mark.slow
@of_ddp
@pytest.mark.parametrize(("processes", "workers"), [(1, 2), (3, 0)])
def test_ddp_stopped_in_mid_epoch_and_continued_ends_as_if_uninterrupted(ddp, run_dir, processes, workers):
    stopped = ddp.launch(processes, run_dir, "--stop-after", 4, "--workers", workers)
    assert (stopped.code, status(run_dir)["step"], status(run_dir)["state"]) == (
        Exit.STOPPED, 4, "stopped"), stopped.text
    finished = ddp.launch(processes, run_dir, "--workers", workers)
    assert finished.returncode == 0, finished.text
    assert "resumed at step 4" in finished.out
    assert outcome(run_dir) == outcome(ddp.straight(processes))


@pytest.mark.slow
@of_ddp
def test_ddp_stopped_terminated_and_killed_ends_as_if_uninterrupted(ddp, run_dir, start_torchrun):
    stopped = ddp.launch(2, run_dir, "--stop-after", 1)
    assert (stopped.code, status(run_dir)["step"]) == (Exit.STOPPED, 1), stopped.text

    terminated = start_torchrun(2, *ddp.words, "--run-dir", run_dir, "--workers", 2)
    terminated.wait_for(lambda: trained_steps(run_dir) >= 2, "a step")
    terminated.process.send_signal(signal.SIGTERM)
    result = terminated.wait()
    assert result.returncode != 0
    assert (result.code, status(run_dir)["state"], status(run_dir)["message"]) == (
        Exit.STOPPED, "stopped", "SIGTERM"), result.text
    reached = status(run_dir)["step"]
    assert 2 <= reached < 6, "too late to test a kill in mid-run"
    assert [record["step"] for record in records(run_dir) if record["split"] == "train"] == list(range(1, reached + 1))

    killed = start_torchrun(2, *ddp.words, "--run-dir", run_dir, "--save-every", 2)
    killed.wait_for(lambda: trained_steps(run_dir) > reached, "a step more")
    killed.kill_all()
    assert status(run_dir)["state"] == "running"

    finished = ddp.launch(2, run_dir, "--workers", 0)
    assert finished.returncode == 0, finished.text
    assert outcome(run_dir) == outcome(ddp.straight(2))


def test_ddp_and_exact_agree_to_rounding_on_2_processes(exact, ddp):
    # bf16 forwards and Adam's division make rounding errors grow; the first step's figures have had no time for it.
    first_of_exact, first_of_ddp = records(exact.straight(2))[0], records(ddp.straight(2))[0]
    assert first_of_ddp["loss"] == first_of_exact["loss"]
    assert first_of_ddp["grad_norm"] == pytest.approx(first_of_exact["grad_norm"], rel=1e-6)
    assert weights_sha256(ddp.straight(2)) != weights_sha256(exact.straight(2))


@pytest.mark.long
@of_ddp
@pytest.mark.parametrize("processes", [
    *(pytest.param(count, marks=pytest.mark.slow) for count in (1, 2, 4)), 3])
def test_eval_only_on_1_to_4_processes_gives_the_digits_of_training(ddp, processes):
    run = ddp.straight(2)
    before = listing(run)
    result = ddp_evaluation(ddp, processes, run)
    assert result.returncode == 0, result.text
    [line] = result.out.splitlines()
    found = {name: value for name, value in json.loads(line).items() if name != "time"}
    best = json.loads((run / "summary.json").read_text())["best"]["step"]
    assert [found] == [record for record in records(run) if record["split"] == "val" and record["step"] == best]
    assert listing(run) == before


def ddp_evaluation(ddp, processes, run):
    """--eval-only takes its settings from the run."""
    words = ["--eval-only", "--run-dir", run]
    return ddp._run_train(*words) if processes == 1 else ddp._run_torchrun(processes, *words)


def listing(run):
    """Every file with its size and time."""
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in run.rglob("*") if path.is_file()}
