"""Data that change under a run, and two runs in one directory."""

import os
import subprocess

import pytest

from tests.harness.launches import (
    EPOCHS,
    NUM_TRAIN,
    WORDS,
    HeldImage,
    assert_as_undisturbed,
    assert_failed,
    assert_gone,
    image_of,
    messages,
    sample_of,
    traced,
    trained,
)
from tests.harness.run_directory import newest_checkpoint, outcome, status
from utils.errors import Exit


@pytest.fixture
def words(own_photos, run_dir):
    return [*WORDS, "--data", own_photos, "--run-dir", run_dir, "--save-every", 1, "--workers", 0]


@pytest.mark.long
def test_a_vanished_image_ends_the_run_and_the_next_start_wants_it_back(
        words, own_photos, run_dir, start_torchrun, run_torchrun, undisturbed):
    held = HeldImage(image_of(own_photos, "train", sample_of(rank=1, step=2)))
    gone = image_of(own_photos, "train", sample_of(rank=0, step=3))
    live = start_torchrun(2, *words)
    live.wait_for(held.is_wanted, "the second step's data")
    gone.rename(run_dir.parent / "elsewhere.png")
    held.give()
    assert_failed(live, run_dir, Exit.BAD_DATA, f"cannot read {gone}: ", "No such file", "--bad-samples skip")
    assert newest_checkpoint(run_dir).name == "step-0000000002-g1"

    assert_failed(start_torchrun(2, *words), run_dir, Exit.OTHER_RUN,
                  f"the data set changed since {run_dir} was created", "--fresh")

    (run_dir.parent / "elsewhere.png").rename(gone)
    assert_as_undisturbed(run_torchrun(2, *words), run_dir, undisturbed)


def truncate(image):
    """Spoil an image; returns what makes it whole again."""
    data = image.read_bytes()
    image.write_bytes(data[:len(data) // 2])
    return lambda: image.write_bytes(data)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_bad_training_image_stops_all_with_the_step_before_saved(
        words, own_photos, run_dir, start_torchrun, run_torchrun, undisturbed, workers):
    repair = truncate(bad := image_of(own_photos, "train", sample_of(rank=1, step=2)))
    words = [*words, "--save-every", 1000, "--workers", workers]
    assert_failed(start_torchrun(2, *words), run_dir, Exit.BAD_DATA,
                  f"cannot read {bad}: ", "the same command continues")
    assert newest_checkpoint(run_dir).name == "step-0000000001-g1"
    repair()
    result = run_torchrun(2, *words)
    assert "resumed at step 1" in result.out, result.text
    assert_as_undisturbed(result, run_dir, undisturbed)


@pytest.mark.long
def test_a_bad_validation_image_stops_all_with_the_epoch_saved(
        words, own_photos, run_dir, start_torchrun, run_torchrun, undisturbed):
    repair = truncate(bad := image_of(own_photos, "val", 60))
    words = [*words, "--save-every", 1000]
    assert_failed(start_torchrun(2, *words), run_dir, Exit.BAD_DATA,
                  f"cannot read {bad}: ", "the same command continues")
    assert newest_checkpoint(run_dir).name == "step-0000000003-g1-unevaluated"
    repair()
    result = run_torchrun(2, *words)
    assert "resumed at step 3" in result.out, result.text
    assert_as_undisturbed(result, run_dir, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_under_any_precision_a_bad_image_costs_no_bit(own_photos, run_dir, run_train, precision):
    words = [*WORDS, "--data", own_photos, "--workers", 0, "--precision", precision]
    straight = run_dir.parent / "straight"
    assert run_train(*words, "--run-dir", straight).returncode == 0
    repair = truncate(image_of(own_photos, "train", sample_of(rank=1, step=2)))
    assert run_train(*words, "--run-dir", run_dir).returncode == Exit.BAD_DATA
    repair()
    assert run_train(*words, "--run-dir", run_dir).returncode == 0
    assert outcome(run_dir) == outcome(straight)


@pytest.mark.slow
def test_a_vanished_image_that_is_skipped_is_listed_and_counts_as_done(
        words, own_photos, run_dir, start_torchrun, undisturbed):
    held = HeldImage(image_of(own_photos, "train", sample_of(rank=1, step=2)))
    gone = image_of(own_photos, "train", sample_of(rank=0, step=3))
    live = start_torchrun(2, *words, "--bad-samples", "skip")
    live.wait_for(held.is_wanted, "the second step's data")
    gone.unlink()
    held.give()
    result = assert_gone(live, run_dir)
    assert (result.returncode, status(run_dir)["state"]) == (0, "finished"), result.text
    [line] = (run_dir / "bad_samples.txt").read_text().splitlines()
    assert line.startswith(f"{gone}: ") and "No such file" in line
    assert f"skipped 1 unreadable sample, see {run_dir / 'bad_samples.txt'}" in result.out, result.text
    assert trained(run_dir) == [NUM_TRAIN - 1] * EPOCHS
    assert outcome(run_dir)["records"][:2] == outcome(undisturbed)["records"][:2]
    assert outcome(run_dir)["weights"] != outcome(undisturbed)["weights"]


@pytest.mark.slow
def test_a_save_under_way_is_finished_where_another_rank_fails(words, own_photos, run_dir, start_torchrun):
    held = HeldImage(image_of(own_photos, "train", sample_of(rank=1, step=2)))
    image_of(own_photos, "train", sample_of(rank=1, step=3)).write_bytes(b"")
    live = start_torchrun(2, *words)
    live.wait_for(held.is_wanted, "the second step's data")
    with traced(live.rank(0), run_dir.parent, "fsync:delay_enter=500000"):  # microseconds
        held.give()
        assert_failed(live, run_dir, Exit.BAD_DATA, "cannot read ", within_s=60)
    assert newest_checkpoint(run_dir).name == "step-0000000002-g1"


@pytest.mark.slow
def test_a_start_that_waits_for_the_lock_takes_over_from_a_killed_holder(
        words, own_photos, run_dir, start_torchrun, undisturbed):
    held = HeldImage(image_of(own_photos, "train", sample_of(rank=1, step=2)))
    holder = start_torchrun(2, *words)
    holder.wait_for(held.is_wanted, "the second step's data")
    holder.wait_for(lambda: any(run_dir.glob("checkpoints/step-*")), "a checkpoint")
    heir = start_torchrun(2, *words)
    heir.wait_for(lambda: is_open(run_dir / ".lock", heir._processes()), "that it waits for the lock")
    holder.kill_all()
    held.give()
    result = heir.wait()
    assert "resumed at step 1" in result.out, result.text
    assert status(run_dir)["start"] == 2
    assert_as_undisturbed(result, run_dir, undisturbed)


def is_open(file, processes):
    """Whether one of the processes has opened the file."""
    for pid in processes:
        try:
            links = [os.readlink(f"/proc/{pid}/fd/{number}") for number in os.listdir(f"/proc/{pid}/fd")]
        except OSError:
            continue
        if str(file) in links:
            return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_small_shared_memory_ends_the_run_at_once_with_advice(
        processes, photos, run_dir, start_launcher, session_dir):
    """A /dev/shm of 1 MB, less than a batch. Needs root."""
    if os.geteuid() != 0 or subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("needs root, and to be permitted mount namespaces")
    small = ("mount --bind $0 /mnt && mount -t tmpfs -o size=1m none /dev/shm && mkdir -p $0 && mount --bind /mnt $0"
             ' && exec "$@"')  # the tests' own folder stays where it was
    live = start_launcher("--nproc-per-node", processes, *WORDS, "--data", photos, "--run-dir", run_dir, "--workers", 1,
                          "--image-size", 224, inside=["unshare", "--mount", "sh", "-c", small, session_dir])
    result = assert_gone(live, run_dir)
    assert result.returncode == Exit.IO, result.text
    assert all("/dev/shm is full" in line and "--shm-size" in line for line in messages(result)), result.text
