"""Processes and data that hang: the run ends in time with 76, and says who hangs and where."""

import os
import re
import signal
import socket
import time

import pytest

from tests.conftest import LIMIT_S
from tests.harness.launches import (
    WORDS,
    HeldImage,
    assert_as_undisturbed,
    assert_failed,
    assert_gone,
    image_of,
    messages,
    sample_of,
)
from utils.distributed.deadlines import MARGIN_S
from utils.distributed.peers import BEAT_S
from utils.errors import Exit

TIMEOUT_S = 10  # three times as long for a start
SHORT = ["--step-timeout", TIMEOUT_S]
SILENCE_S = 4 * BEAT_S  # in which peers are listened to


@pytest.fixture
def words(own_photos, run_dir):
    return [*WORDS, "--data", own_photos, "--run-dir", run_dir, "--save-every", 1]


@pytest.mark.slow  # torchrun gives the frozen one 30 s
def test_a_frozen_rank_is_named_with_the_place_where_it_fell_silent(
        words, own_photos, run_dir, start_torchrun, run_torchrun, undisturbed):
    held = HeldImage(image_of(own_photos, "train", sample_of(rank=1, step=2)))
    live = start_torchrun(2, *words, "--workers", 0, *SHORT)
    live.wait_for(held.is_wanted, "the second step's data")
    os.kill(live.rank(1), signal.SIGSTOP)
    began = time.monotonic()
    live.wait_for(lambda: live._exit_file.exists(), "that rank 0 gives up")
    assert time.monotonic() - began < TIMEOUT_S + MARGIN_S + SILENCE_S + 3
    result = assert_failed(live, run_dir, Exit.LOST_PEERS, "rank 0 on ", "made no progress for ", "s: step ",
                           "training", has_stacks=True)
    assert re.search(r"\n  rank 1 on \S+: step [01], .+, no heartbeat since then\n", result.err), result.text
    held.give()
    assert_as_undisturbed(run_torchrun(2, *words), run_dir, undisturbed)


@pytest.mark.slow
def test_a_rank_that_a_frozen_peer_keeps_from_stopping_says_so_in_time(
        words, own_photos, run_dir, start_torchrun, run_torchrun, undisturbed):
    held = HeldImage(image_of(own_photos, "train", sample_of(rank=1, step=2)))
    live = start_torchrun(2, *words, "--workers", 0, env={"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "8"})
    live.wait_for(held.is_wanted, "the second step's data")
    os.kill(live.rank(1), signal.SIGSTOP)
    live.process.send_signal(signal.SIGTERM)
    result = assert_failed(live, run_dir, Exit.LOST_PEERS, "rank 0 on ", "made no progress for ", "s: step ",
                           has_stacks=True, within_s=LIMIT_S)
    assert "no heartbeat since then" in result.err, result.text
    held.give()
    assert_as_undisturbed(run_torchrun(2, *words), run_dir, undisturbed)


@pytest.mark.long
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_an_image_whose_reading_hangs_is_named(
        workers, words, own_photos, run_dir, start_torchrun, run_torchrun, undisturbed):
    held = HeldImage(image_of(own_photos, "train", sample_of(rank=1, step=2)))
    live = start_torchrun(2, *words, "--workers", workers, *SHORT)
    assert_failed(live, run_dir, Exit.LOST_PEERS, "rank 1 on ", "made no progress for ",
                  "s: step 1, training, waiting for data", f"({held.image} is being read)",
                  has_stacks=True, within_s=LIMIT_S)
    held.give()
    assert_as_undisturbed(run_torchrun(2, *words), run_dir, undisturbed)


@pytest.mark.slow
def test_an_image_whose_reading_hangs_in_an_evaluation_is_named(
        words, own_photos, run_dir, start_torchrun, run_torchrun, undisturbed):
    # the first of rank 1: evaluation batches are two micro-batches of four
    held = HeldImage(image_of(own_photos, "val", 8))
    live = start_torchrun(2, *words, "--workers", 1, "--step-timeout", TIMEOUT_S)
    assert_failed(live, run_dir, Exit.LOST_PEERS, "rank 1 on ", "made no progress for ",
                  "s: step 3, evaluation, waiting for data", f"({held.image} is being read)",
                  has_stacks=True, within_s=LIMIT_S)
    held.give()
    assert_as_undisturbed(run_torchrun(2, *words), run_dir, undisturbed)


def environments():
    """What torchrun would give to two ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]),
                  "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    return [common | {"RANK": rank, "LOCAL_RANK": rank} for rank in "01"]


def test_ranks_that_were_given_other_settings_do_not_wait_for_each_other(words, run_dir, start_torchrun):
    ranks = [start_torchrun(None, *words, "--lr", lr, env=environment)
             for lr, environment in zip((0.1, 0.2), environments(), strict=True)]
    results = [assert_gone(rank, run_dir) for rank in ranks]
    assert [result.returncode for result in results] == [Exit.BAD_DATA] * 2, [result.text for result in results]
    [said] = [message for result in results for message in messages(result)]
    assert said.startswith("train.py: the settings must be the same on all nodes"), said
    assert not run_dir.exists()


@pytest.mark.long
@pytest.mark.parametrize(("present", "said"), [(0, "timed out after 3 s waiting for rank 1"), (1, "rank 1 on ")])
def test_a_rank_that_never_comes_to_the_meeting_is_missed(present, said, words, run_dir, start_torchrun):
    live = start_torchrun(None, *words, "--step-timeout", 1, env=environments()[present])
    result = assert_gone(live, run_dir)
    assert (result.returncode, result.code) == (Exit.LOST_PEERS, Exit.LOST_PEERS), result.text
    assert [said in message for message in messages(result)] == [True], result.text
    assert "Traceback" not in result.err
    assert not run_dir.exists()
