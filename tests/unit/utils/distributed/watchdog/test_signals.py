"""utils/distributed/watchdog.py: signals arrive whatever the main thread does, and no process outlives its parent."""

import os
import signal
import subprocess
import time

import pytest

from tests.unit.utils.distributed.watchdog.conftest import LIMIT_S, TORCHRUN, line_of
from utils.distributed.watchdog import SIGNALS

NOTED = """
watchdog = Watchdog()
watchdog.at_end, watchdog.is_stoppable = told_at_end, False
told("ready", watchdog.wants_to_stop())
known = None
while True:
    until(lambda: watchdog.reason != known)
    known = watchdog.reason
    told(known, watchdog.wants_to_stop())
"""


def test_a_signal_becomes_the_reason_where_there_is_something_to_save(start):
    process, answers = start(NOTED), []
    for number in (None, *SIGNALS):
        if number is not None:
            process.send_signal(number)
        answers.append(line_of(process))
    assert answers == ["ready False", *(f"{signal.Signals(number).name} True" for number in SIGNALS)]


def test_a_repeated_sigterm_is_ignored(start):
    process = start(NOTED)
    answers = [line_of(process)]
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM):  # SIGUSR1 comes between: a pending signal does not add up
        process.send_signal(number)
        answers.append(line_of(process))
    assert answers == ["ready False", "SIGTERM True", "SIGUSR1 True", "SIGTERM True"]


def test_after_a_pause_by_sigstop_and_sigcont_signals_are_heard_as_before(start):
    process = start(NOTED)
    answers = [line_of(process)]
    numbers = [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP] * 3
    for number in numbers:
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        time.sleep(0.05)  # for several beats
        process.send_signal(signal.SIGCONT)
        time.sleep(0.05)  # and several
        process.send_signal(number)
        answers.append(line_of(process))
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    process.send_signal(signal.SIGTERM)  # while it is paused
    process.send_signal(signal.SIGCONT)
    answers.append(line_of(process))
    assert answers == ["ready False", *(f"{number.name} True" for number in numbers), "SIGTERM True"]


def test_after_a_pause_by_sigstop_and_sigcont_a_deadline_holds_as_before(start):
    process = start("""
watchdog = Watchdog()
watchdog.is_stoppable = False
watchdog.enter("training", 1000)
told("ready")
until(lambda: watchdog.reason)
watchdog.enter("saving", 0)
until(lambda: False)
""")
    line_of(process)
    for _ in range(3):
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        time.sleep(0.05)  # for several beats
        process.send_signal(signal.SIGCONT)
        time.sleep(0.05)
    process.send_signal(signal.SIGUSR1)
    err = process.communicate(timeout=LIMIT_S)[1]
    assert (process.returncode, "does not get on for 0 s: starting, saving" in err) == (76, True)


@pytest.mark.parametrize("second, environment", [(signal.SIGINT, {}), (signal.SIGINT, TORCHRUN), (signal.SIGTERM, TORCHRUN)])
def test_a_second_ctrl_c_leaves_without_saving(start, tmp_path, second, environment):
    process = start(NOTED, RANK="3", **environment)
    line_of(process)
    process.send_signal(signal.SIGINT)
    first = line_of(process)
    process.send_signal(second)  # SIGTERM: so torchrun passes it on
    out, err = process.communicate(timeout=LIMIT_S)
    message = "rank 3: a second Ctrl-C, leaving without saving"
    assert (first, out, err, process.returncode, (tmp_path / "exit").read_text()) == (
        "SIGINT True", f"at_end failed 130 {message}\n", f"train.py: {message}\n", 130, "130\n")


@pytest.mark.parametrize("environment, first", [({}, "SIGINT True"), (TORCHRUN, "SIGINT to rank 0 True")])
def test_a_sigterm_after_a_ctrl_c_that_torchrun_did_not_pass_on_is_no_second_one(start, environment, first):
    process = start(NOTED, **environment)
    line_of(process)
    subprocess.run(["kill", "-INT", str(process.pid)], check=True)  # by a process that is not its parent
    answers = [line_of(process)]
    process.send_signal(signal.SIGTERM)
    assert [*answers, line_of(process)] == [first, "SIGTERM True"]


WAYS_TO_BE_STUCK = {
    "a sleep": "time.sleep(1000)",
    "a lock": "lock = threading.Lock(); lock.acquire(); lock.acquire()",
    "a read": "os.read(os.pipe()[0], 1)",
    "a call in C that no handler would interrupt":  # twice the lock of a plain mutex
        "mutex = ctypes.create_string_buffer(64); lock = ctypes.CDLL(None).pthread_mutex_lock; lock(mutex); lock(mutex)"}


@pytest.mark.parametrize("stuck", WAYS_TO_BE_STUCK.values(), ids=WAYS_TO_BE_STUCK)
def test_where_nothing_would_be_lost_a_signal_ends_the_process_whatever_its_main_thread_does(start, tmp_path, stuck):
    process = start(f"watchdog = Watchdog()\nwatchdog.at_end = told_at_end\ntold('ready')\n{stuck}")
    ready = line_of(process)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=LIMIT_S)
    message = "stopped (SIGTERM); there was nothing to save"
    assert (ready, process.returncode, out, err, (tmp_path / "exit").read_text()) == (
        "ready", 75, f"at_end stopped 75 {message}\n", f"train.py: {message}\n", "75\n")


def test_a_training_that_began_while_peers_were_listened_to_is_saved(start):
    process = start("""
watchdog = Watchdog()

def listen():
    watchdog.is_stoppable = False  # the first step has begun meanwhile
    return []

watchdog.silent_peers = listen
told("ready")
until(lambda: watchdog.reason)
told(watchdog.reason)
""", **TORCHRUN)
    ready = line_of(process)
    process.send_signal(signal.SIGTERM)
    assert (ready, line_of(process)) == ("ready", "SIGTERM")


def test_of_a_stop_with_nothing_to_save_only_rank_0_speaks(start):
    process = start("Watchdog()\ntold('ready')\ntime.sleep(1000)", RANK="1")
    line_of(process)
    process.send_signal(signal.SIGUSR1)
    assert (process.communicate(timeout=LIMIT_S)[1], process.returncode) == ("", 75)


def test_a_signal_that_was_ignored_stays_ignored(start):
    process = start("signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup\n"
                    "watchdog = Watchdog()\nwatchdog.at_end = told_at_end\ntold('ready')\ntime.sleep(1000)")
    line_of(process)
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)  # if both were pending, SIGHUP would be fetched first: the lower number
    assert process.communicate(timeout=LIMIT_S)[0] == "at_end stopped 75 stopped (SIGTERM); there was nothing to save\n"


def test_signals_are_blocked_in_every_thread_and_every_child(start):
    process = start("""
Watchdog()
def is_blocked():
    return set(SIGNALS) <= signal.pthread_sigmask(signal.SIG_BLOCK, [])
found = []
thread = threading.Thread(target=lambda: found.append(is_blocked()))
thread.start()
thread.join()
child = os.fork()
if child == 0:
    os._exit(is_blocked())
told(is_blocked(), found, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
""")
    assert line_of(process) == "True [True] 1"


def test_a_child_that_ends_with_its_parent_ends_when_that_is_killed(start):
    process = start("""
child = os.fork()
if child == 0:
    signal.alarm(60)
    end_with_parent(signal.SIGKILL)
    told("ready")
    signal.pause()
os.waitpid(child, 0)
""")
    ready, began = line_of(process), time.monotonic()
    process.kill()
    rest = process.stdout.read()  # ends when the last process that could write does
    assert (ready, rest, time.monotonic() - began < LIMIT_S / 2) == ("ready", "", True)


@pytest.mark.parametrize("environment, says", [
    ({"TORCHELASTIC_RUN_ID": "none"}, "at_end stopped 75 stopped (SIGTERM); there was nothing to save\n"), ({}, "")])
def test_under_torchrun_its_end_is_a_sigterm_and_a_shells_end_is_nothing(start, environment, says):
    process = start("""
child = os.fork()
if child == 0:
    signal.alarm(60)
    watchdog, parent = Watchdog(), os.getppid()
    watchdog.at_end = told_at_end
    told("ready")
    until(lambda: os.getppid() != parent and "TORCHELASTIC_RUN_ID" not in os.environ)
    os._exit(0)
os.waitpid(child, 0)
""", **environment)
    ready = line_of(process)
    process.kill()
    assert (ready, process.stdout.read()) == ("ready", says)
