"""Processes that are killed and signalled: the code, one message, nothing left.

And the same command goes on as if nothing had been.
"""

import os
import signal
import subprocess

import pytest

from tests.harness.launches import (
    STEPS,
    WORDS,
    HeldImage,
    assert_as_undisturbed,
    assert_failed,
    assert_gone,
    assert_no_process,
    assert_stopped,
    has_passed_on,
    image_of,
    is_watched,
    messages,
    sample_of,
    traced,
)
from tests.harness.run_directory import records, status, trained_steps
from utils.errors import Exit

NO_MORE_RESTARTS = "train.py: not restarted, because a restart would end in the same way: stopped, "


@pytest.fixture
def words(photos, run_dir):
    return [*WORDS, "--data", photos, "--run-dir", run_dir, "--save-every", 1]


@pytest.fixture
def own_words(own_photos, run_dir):
    """The same on a copy of the images."""
    return [*WORDS, "--data", own_photos, "--run-dir", run_dir]


def terminate_while_held(live, held):
    """torchrun gets SIGTERM and has sent it to its ranks before the image that one of them waits for arrives."""
    live.wait_for(held.is_wanted, "that a rank waits for data")
    live.process.send_signal(signal.SIGTERM)
    live.wait_for(lambda: has_passed_on(live, "SIGTERM"), "that torchrun passes it on")
    held.give()


def reach(launch, run, step):
    """Wait until this many steps are on record."""
    launch.wait_for(lambda: trained_steps(run) >= step, f"step {step}")


@pytest.mark.slow
def test_a_run_killed_rank_by_rank_and_at_once_ends_as_if_undisturbed(
        words, run_dir, start_torchrun, run_torchrun, undisturbed):
    for rank, step, says in ((1, 1, "failed"), (0, 3, "running")):
        live = start_torchrun(2, *words)
        reach(live, run_dir, step)
        live.kill_rank(rank)
        assert_failed(live, run_dir, Exit.LOST_PEERS, f"rank {1 - rank} on ", " lost its peers",
                      f"no heartbeat from rank {rank}", says=says)
    live = start_torchrun(2, *words, "--workers", 2)
    reach(live, run_dir, 5)
    live.kill_all()
    assert_gone(live, run_dir)
    assert trained_steps(run_dir) < STEPS, "too late to test anything"
    result = run_torchrun(2, *words)
    assert "resumed at step" in result.out
    assert_as_undisturbed(result, run_dir, undisturbed)


@pytest.mark.slow
def test_torchrun_restarts_a_run_after_a_killed_rank_and_it_goes_on(words, run_dir, start_torchrun, undisturbed):
    live = start_torchrun(2, *words, torchrun=("--max-restarts=3",))
    for rank, step in ((1, 2), (0, 5)):
        reach(live, run_dir, step)
        live.kill_rank(rank)
        live.wait_for(lambda start=rank: status(run_dir)["start"] == 3 - start, "the next start")
    result = assert_gone(live, run_dir)
    assert (result.code, result.out.count("resumed at step")) == (0, 2), result.text  # not the code of a start before
    assert_as_undisturbed(result, run_dir, undisturbed)


def test_a_run_that_torchrun_stops_and_leaves_ends_as_if_undisturbed(
        own_words, own_photos, run_dir, start_torchrun, run_torchrun, undisturbed):
    held = HeldImage(image_of(own_photos, "train", sample_of(rank=1, step=2)))
    live = start_torchrun(2, *own_words, "--workers", 2)
    live.wait_for(held.is_wanted, "the second step's data")
    reach(live, run_dir, 1)  # data are loaded ahead, from before the first step on
    ranks = [live.rank(0), live.rank(1)]
    live.process.send_signal(signal.SIGTERM)
    live.wait_for(lambda: has_passed_on(live, "SIGTERM"), "that torchrun passes it on")
    for pid in [*ranks, *ranks]:  # again and again
        os.kill(pid, signal.SIGTERM)
    held.give()
    assert assert_stopped(live, run_dir, "SIGTERM") in (2, 3)
    assert [path.name.split("-")[2] for path in run_dir.glob("checkpoints/*")] == ["g1"]

    live = start_torchrun(2, *own_words, "--workers", 2)
    reach(live, run_dir, 4)
    live.process.kill()
    live.process.wait()
    assert_no_process(live)
    assert 4 <= assert_stopped(live, run_dir, "SIGTERM") < STEPS

    assert_as_undisturbed(run_torchrun(2, *own_words), run_dir, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rank", "reason"), [
    ("SIGTERM", 1, "SIGTERM to rank 1"), ("SIGUSR1", 0, "SIGUSR1 to rank 0"), ("SIGHUP", 1, "SIGHUP to rank 1"),
    ("SIGINT", 0, "SIGINT to rank 0")])
def test_a_signal_to_one_rank_stops_all_at_one_step_and_no_restart_trains(
        name, rank, reason, words, run_dir, start_torchrun, run_torchrun, undisturbed):
    live = start_torchrun(2, *words, torchrun=("--max-restarts=3",))
    reach(live, run_dir, 2)
    os.kill(live.rank(rank), signal.Signals[name])
    result = assert_gone(live, run_dir)
    found = status(run_dir)
    assert (result.code, found["state"], found["message"], found["start"]) == (
        Exit.STOPPED, "stopped", reason, 1), result.text
    assert 2 <= found["step"] == trained_steps(run_dir) < STEPS
    # torchrun has no way to be asked not to restart: it does so three times, and each start leaves at once.
    assert messages(result) == [f"{NO_MORE_RESTARTS}{reason}"] * 3, result.text
    assert_as_undisturbed(run_torchrun(2, *words), run_dir, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 3, 4])
def test_killed_runs_of_1_3_and_4_processes_end_as_if_undisturbed(
        processes, words, run_dir, photos, start_torchrun, run_torchrun):
    undisturbed = run_dir.parent / "undisturbed"
    run_torchrun(processes, *WORDS, "--data", photos, "--run-dir", undisturbed)
    for step in (2, 5):
        live = start_torchrun(processes, *words)
        reach(live, run_dir, step)
        live.kill_all()
        assert_gone(live, run_dir)
        assert trained_steps(run_dir) < STEPS, "too late to test anything"
    assert_as_undisturbed(run_torchrun(processes, *words), run_dir, undisturbed)


@pytest.mark.slow
def test_a_save_that_torchrun_gives_no_time_for_is_lost_and_nothing_else(
        own_words, own_photos, run_dir, start_torchrun, run_torchrun, undisturbed):
    held = HeldImage(image_of(own_photos, "train", sample_of(rank=1, step=2)))
    live = start_torchrun(2, *own_words, "--workers", 0, "--save-every", 1, env={"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "2"})
    live.wait_for(held.is_wanted, "the second step's data")
    live.wait_for(lambda: any(run_dir.glob("checkpoints/step-*")), "a checkpoint")
    with traced(live.rank(0), run_dir.parent, "fsync:delay_enter=2000000"):
        terminate_while_held(live, held)
        result = assert_gone(live, run_dir)
    assert result.returncode == 1, result.text
    assert [path.name for path in run_dir.glob("checkpoints/step-*")] == ["step-0000000001-g1"]
    assert_as_undisturbed(run_torchrun(2, *own_words), run_dir, undisturbed)


@pytest.mark.slow
def test_sigterm_in_the_first_batch_saves_a_step(
        own_words, own_photos, run_dir, start_torchrun, run_torchrun, undisturbed):
    held = HeldImage(image_of(own_photos, "train", sample_of(rank=1, step=1)))
    live = start_torchrun(2, *own_words, "--workers", 0)
    terminate_while_held(live, held)
    assert 1 <= assert_stopped(live, run_dir, "SIGTERM") < STEPS  # torchrun says it, then does it: 1 or 2 if at once
    assert_as_undisturbed(run_torchrun(2, *own_words), run_dir, undisturbed)


@pytest.mark.slow
def test_sigterm_abandons_an_evaluation_and_the_next_start_does_it_first(
        own_words, own_photos, run_dir, start_torchrun, run_torchrun, undisturbed):
    held = HeldImage(image_of(own_photos, "val", 0))
    live = start_torchrun(2, *own_words, "--workers", 0)
    terminate_while_held(live, held)
    assert assert_stopped(live, run_dir, "SIGTERM") == 3
    assert [record["step"] for record in records(run_dir) if record["split"] == "val"] == []
    assert_as_undisturbed(run_torchrun(2, *own_words), run_dir, undisturbed)


@pytest.mark.slow
def test_sigterm_in_a_save_finishes_it(own_words, own_photos, run_dir, start_torchrun, run_torchrun, undisturbed):
    held = HeldImage(image_of(own_photos, "val", 0))
    live = start_torchrun(2, *own_words, "--workers", 0)
    live.wait_for(held.is_wanted, "the first evaluation's data")
    before = run_dir / "checkpoints" / "step-0000000003-g1-unevaluated"
    assert before.exists(), "an evaluation began before what it follows was on disk"
    with traced(live.rank(0), run_dir.parent, "fsync:delay_enter=300000"):  # microseconds
        held.give()
        live.wait_for(lambda: any(run_dir.glob("checkpoints/.tmp-*")), "a save")
        live.process.send_signal(signal.SIGTERM)
        live.wait_for(lambda: has_passed_on(live, "SIGTERM"), "that torchrun passes it on")
        assert not (run_dir / "checkpoints" / "step-0000000003-g1").exists(), "too late to test anything"
        assert assert_stopped(live, run_dir, "SIGTERM") < STEPS
    assert (run_dir / "checkpoints" / "step-0000000003-g1").exists()
    assert_as_undisturbed(run_torchrun(2, *own_words), run_dir, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize(("moment", "is_reached"), [
    ("before torch is imported", lambda live, run: True),
    ("once the run directory is open", lambda live, run: (run / "status.json").exists()),
    ("once the model is there", lambda live, run: (run / "auto.json").exists()),
])
def test_sigterm_in_the_start_up_leaves_nothing_to_mend(
        moment, is_reached, words, run_dir, start_torchrun, run_torchrun, undisturbed):
    live = start_torchrun(2, *words)
    live.wait_for(lambda: len(ranks_of(live)) == 2 and all(map(is_watched, ranks_of(live)))
                  and is_reached(live, run_dir), moment)
    assert trained_steps(run_dir) == 0, "too late to test anything"
    live.process.send_signal(signal.SIGTERM)
    result = assert_gone(live, run_dir)
    assert result.code == Exit.STOPPED, result.text
    if not any(run_dir.glob("checkpoints/step-*")):
        assert messages(result) == ["train.py: stopped (SIGTERM); there was nothing to save"], result.text
    if (run_dir / "status.json").exists():
        assert (status(run_dir)["state"], status(run_dir)["exit_code"]) == ("stopped", Exit.STOPPED), result.text
    assert_as_undisturbed(run_torchrun(2, *words), run_dir, undisturbed)


def ranks_of(live):
    """Process ids of the ranks that have been started."""
    found = []
    for number in (0, 1):
        try:
            found.append(live.rank(number))
        except StopIteration:
            break
    return found


@pytest.mark.slow
def test_a_second_ctrl_c_leaves_a_stuck_rank_and_its_checkpoint_stays(
        own_words, own_photos, run_dir, start_torchrun, run_torchrun, undisturbed):
    held = HeldImage(image_of(own_photos, "train", sample_of(rank=1, step=3)))
    live = start_torchrun(2, *own_words, "--workers", 0, "--save-every", 1)
    live.wait_for(held.is_wanted, "the third step's data")
    live.wait_for(lambda: any(run_dir.glob("checkpoints/step-*-g1")), "a checkpoint")
    live.process.send_signal(signal.SIGINT)
    live.wait_for(lambda: has_passed_on(live, "SIGINT"), "that torchrun passes it on")
    live.process.send_signal(signal.SIGINT)
    result = assert_gone(live, run_dir)
    assert result.code == 130, result.text
    held.give()
    assert_as_undisturbed(run_torchrun(2, *own_words), run_dir, undisturbed)


@pytest.mark.slow
def test_a_rank_that_raises_in_mid_run_ends_all_soon_with_its_message(
        own_words, own_photos, run_dir, start_torchrun, run_torchrun, undisturbed):
    bad = image_of(own_photos, "train", sample_of(rank=1, step=3))
    whole = bad.read_bytes()
    bad.write_bytes(whole[:-200])
    live = start_torchrun(2, *own_words, "--save-every", 1)
    reach(live, run_dir, 2)
    assert_failed(live, run_dir, Exit.BAD_DATA, f"cannot read {bad}: ", "--bad-samples skip", within_s=10)
    bad.write_bytes(whole)
    assert_as_undisturbed(run_torchrun(2, *own_words), run_dir, undisturbed)


@pytest.mark.slow
def test_a_data_loading_process_that_is_killed_ends_the_run_with_its_id(
        words, run_dir, start_torchrun, run_torchrun, undisturbed):
    live = start_torchrun(2, *words, "--workers", 2)
    reach(live, run_dir, 2)
    worker = children_of(live, live.rank(1))[0]
    os.kill(worker, signal.SIGKILL)
    assert_failed(live, run_dir, Exit.HARDWARE, f"data loading process {worker} of rank 1 was killed",
                  "the same command continues")
    assert_as_undisturbed(run_torchrun(2, *words), run_dir, undisturbed)


def children_of(live, pid):
    """Process ids of a rank's data loading processes."""
    def parent(child):
        with open(f"/proc/{child}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[1])
    return sorted(child for child in live._processes() if parent(child) == pid)


@pytest.mark.slow
def test_a_checkpoint_that_rank_0_cannot_write_ends_all_with_one_message(
        own_words, own_photos, run_dir, start_torchrun, run_torchrun, undisturbed):
    held = HeldImage(image_of(own_photos, "train", sample_of(rank=1, step=2)))
    live = start_torchrun(2, *own_words, "--workers", 0, "--save-every", 1)
    live.wait_for(held.is_wanted, "the second step's data")
    live.wait_for(lambda: any(run_dir.glob("checkpoints/step-*")), "a checkpoint")
    (run_dir / "checkpoints").rename(run_dir / "elsewhere")
    (run_dir / "checkpoints").touch()
    held.give()
    assert_failed(live, run_dir, Exit.IO, f"cannot save {run_dir}/checkpoints/step-0000000002-g1",
                  "earlier checkpoints are unchanged")
    # The save of step 2 fails beside step 3; the flag that says so is started with step 3 or 4, and read a step later.
    assert trained_steps(run_dir) in (3, 4)
    (run_dir / "checkpoints").unlink()
    (run_dir / "elsewhere").rename(run_dir / "checkpoints")
    assert_as_undisturbed(run_torchrun(2, *own_words), run_dir, undisturbed)


@pytest.mark.slow
def test_a_full_disk_ends_all_with_one_message_and_room_on_it_is_enough(
        words, run_dir, start_torchrun, run_torchrun, undisturbed):
    disk = run_dir.parent / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=30m", "tmpfs", disk]).returncode:
        pytest.skip("needs to mount a small disk")
    try:
        here = [disk / "run" if word == run_dir else word for word in words]
        assert_failed(start_torchrun(2, *here), disk / "run", Exit.IO, "cannot save ", " MiB free)", "make room")
        subprocess.run(["mount", "-o", "remount,size=300m", disk], check=True)
        result = run_torchrun(2, *here)
        assert "resumed at step" in result.out, result.text
        assert_as_undisturbed(result, disk / "run", undisturbed)
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


@pytest.mark.slow
def test_no_whole_checkpoint_is_82_on_all_ranks_and_all_stay_as_they_are(words, run_dir, start_torchrun, run_torchrun):
    stopped = run_torchrun(2, *words, "--stop-after", 2)
    assert stopped.code == Exit.STOPPED, stopped.text
    for file in run_dir.glob("checkpoints/step-*/model.safetensors"):
        file.write_bytes(file.read_bytes()[:-1])
    result = start_torchrun(2, *words).wait()
    assert (result.code, len(messages(result))) == (Exit.NO_CHECKPOINT, 1), result.text
    assert (status(run_dir)["exit_code"], trained_steps(run_dir)) == (Exit.NO_CHECKPOINT, 2)


@pytest.mark.slow
def test_a_disk_that_fails_under_rank_0_ends_all_ranks_with_one_message(
        own_words, own_photos, run_dir, start_torchrun, run_torchrun, undisturbed):
    held = HeldImage(image_of(own_photos, "val", 0))
    live = start_torchrun(2, *own_words, "--workers", 0)
    live.wait_for(held.is_wanted, "the first evaluation's data")
    before = run_dir / "checkpoints" / "step-0000000003-g1-unevaluated"
    assert before.exists(), "an evaluation began before what it follows was on disk"
    with traced(live.rank(0), run_dir.parent, "fsync:error=EIO"):
        held.give()
        # not even that it failed can be written
        assert_failed(live, run_dir, Exit.IO, "Input/output error", says="running")
    assert list(run_dir.glob("checkpoints/step-*")) == [before]
    assert trained_steps(run_dir) <= 5
    assert_as_undisturbed(run_torchrun(2, *own_words), run_dir, undisturbed)


