"""utils/distributed/deadlines.py: when the main thread is late. (What happens then: test_watchdog.py.)"""

import signal
import subprocess

import pytest

from utils.distributed.deadlines import Deadlines

DRAIN_S = 25


@pytest.fixture
def is_late(clock):
    """is_late(deadlines, seconds): let them pass; whether a deadline is missed then."""
    def after(deadlines, seconds):
        clock.now += seconds
        return deadlines.is_missed()
    return after


def test_before_anything_is_entered_there_is_no_deadline(is_late):
    assert not is_late(Deadlines(DRAIN_S), 1e9)


def test_a_new_deadline_takes_the_place_of_the_old_one(is_late):
    deadlines, late = Deadlines(DRAIN_S), []
    for seconds in (10, 10, 100, 10):
        deadlines.enter("saving", seconds)
        late.append(is_late(deadlines, seconds - 1))
    assert [*late, is_late(deadlines, 2)] == [False] * 4 + [True]


def test_it_is_known_what_is_late_and_what_its_limit_was(is_late):
    deadlines = Deadlines(DRAIN_S)
    deadlines.enter("evaluation", 0.25, lambda: " (a.png is being read)")
    assert (is_late(deadlines, 1), str(deadlines), deadlines.limit_s) == (
        True, "evaluation (a.png is being read)", 0.25)


@pytest.mark.parametrize("waits, seen, limit_s, doing", [
    ([99, 104, 9, 14, 9, 14], "abc", None, None),
    ([101], "", 100, "training, waiting for data (a.png)"), ([99, 106], "", 105, "training"),  # the first item
    ([99, 104, 11], "a", 10, "training, waiting for data (a.png)"), ([99, 104, 9, 16], "a", 15, "training"),
    ([99, 104, 9, 14, 9, 16], "ab", 15, "training")])
def test_each_item_has_a_limit_and_work_on_it_a_longer_one(is_late, waits, seen, limit_s, doing):
    """So the rank without data reports first. The first item has longer than the others."""
    deadlines, left, found, late = Deadlines(DRAIN_S), iter(waits), [], []

    def pass_time():
        if is_late(deadlines, next(left, 0)):
            late.append((deadlines.limit_s, str(deadlines)))
        return not late

    def items():
        for item in "abc":
            if not pass_time():  # until it comes
                return
            yield item

    for item in deadlines.watch(items(), "training", 100, 10, lambda: " (a.png)"):
        if not pass_time():  # to be worked on
            break
        found.append(item)
    assert ("".join(found), late) == (seen, [(limit_s, doing)] if doing else [])


def test_the_end_of_the_items_may_be_late_too(is_late):
    deadlines = Deadlines(DRAIN_S)
    items = list(deadlines.watch("ab", "training", 100, 10, lambda: ""))
    assert (items, is_late(deadlines, 9), is_late(deadlines, 2)) == (["a", "b"], False, True)


def test_an_error_of_the_items_names_what_was_being_loaded():
    def items():
        yield "a"
        raise RuntimeError("killed")
    with pytest.raises(RuntimeError, match="killed") as caught:
        list(Deadlines(DRAIN_S).watch(items(), "training", 1000, 1000, lambda: " (a.png)"))
    assert caught.value.__notes__ == [" (a.png)"]


def test_a_pipe_that_a_dying_loading_process_closes_waits_for_its_id():
    """Its pipe is closed before SIGCHLD comes, whose handler in torch says which process it was."""
    def items():
        subprocess.Popen(["true"])  # its end is a SIGCHLD
        raise ConnectionResetError
        yield

    def handle(number, frame):
        raise RuntimeError("process 7 was killed")

    before = signal.signal(signal.SIGCHLD, handle)
    try:
        with pytest.raises(RuntimeError, match="process 7 was killed") as caught:
            next(Deadlines(DRAIN_S).watch(items(), "training", 30, 20, lambda: " (a.png)"))
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert caught.value.__notes__ == [" (a.png)"]


def test_draining_shortens_the_limit_of_what_is_being_done(is_late):
    deadlines = Deadlines(DRAIN_S)
    deadlines.enter("training", 1000)
    deadlines.drain()
    assert (is_late(deadlines, DRAIN_S - 1), is_late(deadlines, 2), deadlines.limit_s) == (False, True, DRAIN_S)


def test_draining_lengthens_nothing(is_late):
    deadlines = Deadlines(DRAIN_S)
    deadlines.enter("training", 10)
    deadlines.drain()
    assert (is_late(deadlines, 9), is_late(deadlines, 2), deadlines.limit_s) == (False, True, 10)


def test_while_draining_each_thing_that_is_still_done_has_the_limit(is_late):
    deadlines, late = Deadlines(DRAIN_S), []
    deadlines.enter("training", 1000)
    deadlines.drain()
    for _ in range(3):
        late.append(is_late(deadlines, DRAIN_S - 1))
        deadlines.enter("evaluation", 1000)
    assert (late, is_late(deadlines, DRAIN_S + 1)) == ([False] * 3, True)


@pytest.mark.parametrize("drains_first", [False, True])
def test_a_save_may_take_as_long_as_before_while_draining(is_late, drains_first):
    deadlines = Deadlines(DRAIN_S)
    if drains_first:
        deadlines.drain()
    deadlines.enter("saving", 1000, drains=False)
    deadlines.drain()
    assert (is_late(deadlines, 999), is_late(deadlines, 2), deadlines.limit_s) == (False, True, 1000)
