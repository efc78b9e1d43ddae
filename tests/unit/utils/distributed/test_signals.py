"""utils/distributed/signals.py: what each signal means. (That they arrive: test_watchdog.py.)"""

import os
import signal
import subprocess
import sys

import pytest

from utils.distributed import signals
from utils.distributed.signals import Signals
from utils.errors import SIGNALS

TORCHRUN, ANOTHER = 4711, 4712  # process ids


def reasons(signals, *received):
    """The reason to stop after each (signal, sender)."""
    found = []
    for number, sender in received:
        signals.accept(signals.receive(number, sender))
        found.append((signals.reason, signals.wants_to_stop()))
    return found


def test_without_a_signal_there_is_no_wish_to_stop():
    signals = Signals(0, None)
    assert (signals.reason, signals.wants_to_stop()) == (None, False)


@pytest.mark.parametrize("number", SIGNALS)
def test_every_signal_is_a_reason_to_stop(number):
    assert reasons(Signals(0, None), (number, ANOTHER)) == [(signal.Signals(number).name, True)]


def test_the_last_signal_is_the_reason():
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM)
    assert reasons(Signals(0, None), *((number, ANOTHER) for number in numbers)) == [
        ("SIGTERM", True), ("SIGUSR1", True), ("SIGTERM", True)]


def test_under_torchrun_the_reason_names_a_rank_that_alone_got_a_signal():
    """Until torchrun sends one to all."""
    assert [reason for reason, _ in reasons(
        Signals(3, TORCHRUN), (signal.SIGUSR1, ANOTHER), (signal.SIGHUP, ANOTHER), (signal.SIGTERM, TORCHRUN),
        (signal.SIGHUP, ANOTHER))] == ["SIGUSR1 to rank 3", "SIGUSR1 to rank 3", "SIGTERM", "SIGTERM"]


@pytest.mark.parametrize("sender, is_from_torchrun", [(TORCHRUN, True), (0, True), (ANOTHER, False)])
def test_the_kernels_signal_at_torchruns_death_is_from_torchrun(sender, is_from_torchrun):
    assert Signals(0, TORCHRUN).receive(signal.SIGTERM, sender).is_from_torchrun == is_from_torchrun


@pytest.mark.parametrize("torchrun, first, second, expected", [
    (None, (signal.SIGINT, ANOTHER), (signal.SIGINT, ANOTHER), True),
    (TORCHRUN, (signal.SIGINT, TORCHRUN), (signal.SIGINT, TORCHRUN), True),
    (TORCHRUN, (signal.SIGINT, TORCHRUN), (signal.SIGTERM, TORCHRUN), True),  # what torchrun sends at the second
    (TORCHRUN, (signal.SIGINT, TORCHRUN), (signal.SIGTERM, ANOTHER), False),
    (TORCHRUN, (signal.SIGINT, ANOTHER), (signal.SIGTERM, TORCHRUN), False),  # torchrun did not pass the first on
    (None, (signal.SIGINT, ANOTHER), (signal.SIGTERM, ANOTHER), False),
    (TORCHRUN, (signal.SIGTERM, TORCHRUN), (signal.SIGTERM, TORCHRUN), False),  # schedulers send it twice
    (None, (signal.SIGTERM, ANOTHER), (signal.SIGTERM, ANOTHER), False),
    (TORCHRUN, (signal.SIGTERM, TORCHRUN), (signal.SIGINT, TORCHRUN), False)])
def test_what_is_a_second_ctrl_c(torchrun, first, second, expected):
    signals = Signals(0, torchrun)
    assert [signals.receive(*received).is_second_interrupt for received in (first, second)] == [False, expected]


def test_stop_after_is_a_reason_once_its_time_is_over(clock):
    signals = Signals(0, None)
    signals.stop_after(100)
    found = []
    for seconds in (99, 2):
        clock.now += seconds
        found.append((signals.wants_to_stop(), signals.reason))
    assert found == [(False, None), (True, "--stop-after")]


@pytest.mark.parametrize("parent, is_killed", [(1, True), (4713, False)])
def test_torchruns_death_is_seen_where_others_processes_are_hidden(monkeypatch, parent, is_killed):
    """proc(5), hidepid: /proc has the processes of this user alone."""
    def hidden(path, mode="r"):
        raise FileNotFoundError(path)

    sent = []
    monkeypatch.setattr("builtins.open", hidden)
    monkeypatch.setattr(os, "getppid", lambda: parent)
    monkeypatch.setattr(os, "kill", lambda process, number: sent.append(number))
    monkeypatch.setattr(signal, "pthread_sigmask", lambda how, numbers: None)
    monkeypatch.setattr(signals, "end_with_parent", lambda number: None)
    Signals(0, TORCHRUN).block()
    assert sent == [signal.SIGTERM] * is_killed


_ORPHAN = """
import os, signal, time
from utils.distributed.signals import end_worker_with
parent = os.getpid()
if os.fork():
    os.kill(parent, signal.SIGKILL)
while os.getppid() == parent:
    time.sleep(0.001)
end_worker_with(parent, 0)
print("alive", flush=True)
"""


def test_a_process_whose_parent_has_ended_already_ends_too():
    """A data loading process is forked, and its rank killed before the kernel knows that they end together."""
    done = subprocess.run([sys.executable, "-c", _ORPHAN], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, ""), done.stderr
