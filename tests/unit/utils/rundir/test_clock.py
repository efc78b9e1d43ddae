"""utils/rundir/clock.py: the timing fields of a train record, and the shares of a start's time."""

import time
from types import SimpleNamespace

import pytest
import torch

from utils.hardware.devices import Stopwatch
from utils.rundir.clock import SHARES, Clock

CPU = torch.device("cpu")
ALONE = [[1.0, 0.0, 0.0]]


@pytest.fixture
def pass_time(monkeypatch):
    """A clock that shows what it is told to: pass_time(seconds)."""
    now = [1000.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return lambda seconds: now.__setitem__(0, now[0] + seconds)


def test_tokens_per_second_are_recorded_where_there_are_tokens_only():
    images, texts = Clock(CPU, None), Clock(CPU, None)
    images.step(samples=4)
    texts.step(samples=4, tokens=12)
    assert ["tokens_per_s" in images.record(ALONE), "tokens_per_s" in texts.record(ALONE)] == [False, True]


def test_tokens_and_samples_are_counted_over_the_same_time():
    clock = Clock(CPU, None)
    for samples, tokens in ((4, 40), (2, 2)):
        clock.step(samples, tokens)
    fields = clock.record(ALONE)
    assert fields["tokens_per_s"] / fields["samples_per_s"] == pytest.approx(7)


def test_tokens_are_counted_anew_after_a_record():
    clock = Clock(CPU, None)
    clock.step(samples=1, tokens=5)
    clock.record(ALONE)
    clock.step(samples=1)
    assert "tokens_per_s" not in clock.record(ALONE)


def test_the_slowest_rank_is_the_one_that_waits_least_for_others(pass_time):
    """Two steps in 10 s on four ranks. Data that it waits for are a rank's own time."""
    clock = Clock(CPU, Stopwatch(CPU))
    for _ in range(2):
        pass_time(5)
        clock.step(samples=8)
    fields = clock.record([[10, 0, 6], [10, 4, 0], [10, 2, 3], [10, 0, 3]])
    assert fields == {"samples_per_s": 1.6, "step_s": 3.5, "slowest_step_s": 5, "slowest_rank": 1, "data_wait": 0.15,
                      "communication": 0.3}


def test_what_is_no_step_is_left_out_of_the_speed_and_counted_once(pass_time):
    """The save is inside of the evaluation."""
    clock = Clock(CPU, None)
    pass_time(1)
    clock.step(samples=1)
    clock.record(ALONE)
    before = clock.shares()
    with clock.on("evaluation"):
        pass_time(20)
        with clock.on("checkpoints"):
            pass_time(10)
    pass_time(4)
    clock.step(samples=8)
    assert clock.record([[4, 1, 0]]) == {"samples_per_s": 2, "data_wait": 0.25}
    shares, total = clock.shares(), 30 / (clock.shares()["evaluation"] + clock.shares()["checkpoints"])
    assert shares["evaluation"] == pytest.approx(2 * shares["checkpoints"]) and before["evaluation"] == 0
    assert shares["data_wait"] * total == pytest.approx(1)
    assert list(shares) == list(SHARES) and sum(shares.values()) == pytest.approx(1)


def test_starting_lasts_until_the_first_step_with_the_import_of_torch(pass_time):
    clock = Clock(CPU, None)  # this process is a second old, or older: it has imported torch
    pass_time(7)
    clock.step(samples=1)
    before = clock.shares()["starting"]
    pass_time(1000)
    after = clock.shares()["starting"]
    assert before == pytest.approx(1) and 1000 * after / (1 - after) > 8


def test_waits_of_the_warm_up_and_the_first_step_are_a_part_of_starting(pass_time):
    stopwatch = Stopwatch(CPU)
    clock = Clock(CPU, stopwatch)
    for is_step in (False, True):
        clock.restart()
        stopwatch.start()
        pass_time(3)
        stopwatch.stop()
        if is_step:
            clock.step(samples=1)
    assert clock.times() == [3, 0, 0]
    clock.record([clock.times()])
    assert clock.shares()["starting"] == pytest.approx(1)


def waited(clock, stopwatch, pass_time, num_steps=1):
    """Steps of 10 s each; of these 3 s wait for data, and 2 s for other ranks."""
    loader = clock.waiting(iter(lambda: pass_time(3) or 1, None))
    for _ in range(num_steps):
        next(loader)
        stopwatch.start()
        pass_time(2)
        stopwatch.stop()
        pass_time(5)
        clock.step(samples=1)


@pytest.mark.parametrize("recorded", [0, 1, 4])
def test_waits_since_the_last_record_are_in_the_shares_and_the_next_one(pass_time, recorded):
    stopwatch = Stopwatch(CPU)
    clock = Clock(CPU, stopwatch)
    clock.step(samples=1)
    waited(clock, stopwatch, pass_time, recorded)
    clock.record([clock.times()] * 2)
    waited(clock, stopwatch, pass_time, 10 - recorded)
    for _ in range(2):  # asking changes nothing
        shares, words = clock.shares(), clock.words()
    of_wait = [shares[name] / shares["data_wait"] for name in ("computing", "communication")]
    assert of_wait == pytest.approx([5 / 3, 2 / 3])
    assert "waiting for data" in words and sum(shares.values()) == pytest.approx(1)
    fields = clock.record([clock.times()] * 2)
    assert [fields[name] for name in ("data_wait", "communication")] == pytest.approx([0.3, 0.2])
    assert clock.shares() == pytest.approx(shares)


def test_a_start_without_a_step_is_starting_and_evaluating(pass_time):
    """A run that was killed in its last evaluation: the next start has no step to take."""
    clock = Clock(CPU, Stopwatch(CPU))
    with clock.on("evaluation"):
        pass_time(1000)
    pass_time(1000)
    shares, words = clock.shares(), clock.words()
    assert shares["starting"] == pytest.approx(1 - shares["evaluation"]) and shares["starting"] > 0.5
    assert shares["computing"] == 0 and "starting" in words
    assert "computing" not in words and "until the first step" not in words


def test_the_stopwatch_of_a_device_tells_without_waiting_what_is_done(monkeypatch):
    """An event that is not reached has no time: torch raises an error."""
    done = []

    class Event:
        def __init__(self, device, enable_timing):
            self.ms = None

        def record(self, stream):
            self.ms = 1000 * len(made)
            made.append(self)

        def query(self):
            return self in done

        def elapsed_time(self, other):
            assert self in done and other in done
            return other.ms - self.ms

    made: list[Event] = []
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch, "accelerator", SimpleNamespace(current_stream=lambda device: None))
    stopwatch = Stopwatch(torch.device("meta"))
    for _ in range(3):
        stopwatch.start()
        stopwatch.stop()
    done += made[:5]  # the last stop is ahead
    found = [stopwatch.so_far(), stopwatch.so_far()]
    done += made[5:]
    assert (found, stopwatch.take(), stopwatch.so_far()) == ([2, 2], 3, 0)


def test_waits_of_an_epoch_without_a_record_are_kept_for_the_next_one(pass_time):
    stopwatch = Stopwatch(CPU)
    clock = Clock(CPU, stopwatch)
    for _ in range(3):
        clock.restart()
        stopwatch.start()
        pass_time(2)
        stopwatch.stop()
        clock.step(samples=1)
    assert clock.times() == [6, 0, 4]  # the first step's is a part of starting
