"""utils/watchdog.py: signals arrive whatever the main thread does, and a process that does not get on says so and leaves.

All of it in processes of their own: a Watchdog blocks the signals of its process for good.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from utils.watchdog import SIGNALS

ROOT = Path(__file__).parents[3]
LIMIT_S = 60  # of one process
BEGINNING = f"""
import ctypes, os, signal, sys, threading, time
from types import SimpleNamespace
from utils import watchdog as module
from utils.watchdog import SIGNALS, Watchdog, end_with_parent

signal.alarm({LIMIT_S})  # whatever goes wrong: it ends, and the test with it (a child needs its own)
module.BEAT_S = 0.01
told = lambda *words: print(*words, flush=True)

class Clock:  # an hour passes when a test says so; `looks` counts how often it was looked at
    now = looks = 0.0
    sleep = staticmethod(time.sleep)

    def monotonic(self):
        self.looks += 1
        return self.now

    def passes(self, seconds):
        self.now, looks = self.now + seconds, self.looks
        while self.looks < looks + 2:  # one more look that began after it
            time.sleep(0.001)

class Store:  # the part of torch.distributed.Store that one process alone needs
    values = {{}}
    clone = lambda self: self
    set = lambda self, name, value: self.values.__setitem__(name, value)
    get = lambda self, name: self.values[name]
    check = lambda self, names: all(name in self.values for name in names)

def told_at_end(state, code, message):
    told(f"at_end {{state}} {{int(code)}} {{message}}")

def until(is_so):
    while not is_so():
        time.sleep(0.001)
"""


@pytest.fixture
def start(tmp_path):
    """start(program, **environment): a process that runs it; killed at the end. Its exit file is tmp_path / "exit"."""
    processes = []

    def started(program, **environment):
        inherited = {name: value for name, value in os.environ.items() if name != "RANK" and not name.startswith("TORCHELASTIC")}
        processes.append(subprocess.Popen(
            [sys.executable, "-c", BEGINNING + program], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=inherited | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "LOCKSTEP_EXIT_FILE": str(tmp_path / "exit")} | environment))
        return processes[-1]

    yield started
    for process in processes:
        process.kill()
        process.communicate()


def line_of(process):
    """The next line that it says."""
    return process.stdout.readline().rstrip("\n")


# --- signals


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


def test_a_second_ctrl_c_leaves_without_saving(start, tmp_path):
    process = start(NOTED, RANK="3")
    line_of(process)
    process.send_signal(signal.SIGINT)
    first = line_of(process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=LIMIT_S)
    message = "rank 3: a second Ctrl-C, leaving without saving"
    assert (first, out, err, process.returncode, (tmp_path / "exit").read_text()) == (
        "SIGINT True", f"at_end failed 130 {message}\n", f"train.py: {message}\n", 130, "130\n")


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


# --- deadlines


def test_a_missed_deadline_is_76_with_all_stacks_and_what_it_was_doing(start, tmp_path):
    process = start("""
module.socket.gethostname = lambda: "host"
def never_ends():
    time.sleep(1000)
def in_a_thread():
    told("ready")
    time.sleep(1000)
watchdog = Watchdog()
watchdog.at_end, watchdog.where = told_at_end, lambda: "step 7"
watchdog.expect("evaluation", 0, lambda: " (a/b.png is being read)")
threading.Thread(target=in_a_thread, daemon=True).start()
never_ends()
""", RANK="2")
    out, err = process.communicate(timeout=LIMIT_S)
    message = "rank 2 on host does not get on: step 7, evaluation (a/b.png is being read)"
    assert (process.returncode, (tmp_path / "exit").read_text(), set(out.splitlines())) == (
        76, "76\n", {"ready", f"at_end failed 76 {message}"})
    assert err.endswith(f"\ntrain.py: {message}\n") and "in never_ends\n" in err and "in in_a_thread\n" in err


@pytest.mark.parametrize("stoppable, code", [(True, 75), (False, 76)])
def test_a_status_that_cannot_be_written_keeps_no_process_from_leaving(start, stoppable, code):
    process = start(f"""
def fail(*words):
    raise OSError(28, "No space left on device")
watchdog = Watchdog()
watchdog.at_end, watchdog.is_stoppable = fail, {stoppable}
told("ready")
watchdog.expect("training", {"1000" if stoppable else "0"})
time.sleep(1000)
""")
    line_of(process)
    if stoppable:
        process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT_S) == code


def test_before_anything_is_expected_there_is_no_deadline(start):
    process = start("module.time = clock = Clock()\nWatchdog()\nclock.passes(1e9)\ntold('alive')\nos._exit(0)")
    assert (line_of(process), process.wait(LIMIT_S)) == ("alive", 0)


def test_a_new_expectation_takes_the_place_of_the_old_one(start):
    process = start("""
module.time = clock = Clock()
watchdog = Watchdog()
for seconds in (10, 10, 100, 10):
    watchdog.expect("saving", seconds)
    clock.passes(seconds - 1)
told("alive")
clock.passes(2)
until(lambda: False)
""")
    assert (line_of(process), process.wait(LIMIT_S)) == ("alive", 76)


EACH = """
module.time, module.socket.gethostname = Clock(), lambda: "host"
clock, watchdog, passes = module.time, Watchdog(), iter({passes})
def items():
    for item in "abc":
        clock.passes(next(passes))  # until it comes
        yield item
for item in watchdog.each(items(), "training", 100, 10, lambda: " (a.png)"):
    clock.passes(next(passes))  # to be worked on
    told(item)
clock.passes(0)  # it may be late at the end, too
os._exit(0)
"""


@pytest.mark.parametrize("passes, seen, doing", [
    ([99, 104, 9, 14, 9, 14], "abc", None),
    ([101], "", "training, waiting for data (a.png)"), ([99, 106], "", "training"),  # the first item
    ([99, 104, 11], "a", "training, waiting for data (a.png)"), ([99, 104, 9, 16], "a", "training"),  # and the others
    ([99, 104, 9, 14, 9, 16], "ab", "training")])
def test_the_first_item_has_longer_than_the_others_and_work_longer_than_waiting_so_that_the_rank_without_data_speaks_first(
        start, passes, seen, doing):
    process = start(EACH.format(passes=[*passes, 1e6]))
    out, err = process.communicate(timeout=LIMIT_S)
    message = f"train.py: rank 0 on host does not get on: starting, {doing}"
    assert ("".join(out.split()), process.returncode, err.splitlines()[-1:]) == (seen, 76 if doing else 0, [message] if doing else [])


def test_stop_after_is_a_reason_once_its_time_is_over(start):
    process = start("""
module.time = clock = Clock()
watchdog = Watchdog()
before = watchdog.wants_to_stop()
watchdog.stop_after(100)
clock.passes(99)
early = watchdog.wants_to_stop()
clock.passes(2)
told(before, early, watchdog.wants_to_stop(), watchdog.reason)
""")
    assert line_of(process) == "False False True --stop-after"


@pytest.mark.parametrize("environment, patience_s", [({}, 25), ({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "100"}, 95)])
def test_a_process_stuck_after_a_sigterm_says_where_before_torchrun_kills_it(start, environment, patience_s):
    process = start(f"""
module.time = clock = Clock()
watchdog = Watchdog()
watchdog.is_stoppable = False
watchdog.meet(Store(), 0, 2)
watchdog.expect("training", 1000)
told("ready")
until(lambda: watchdog.reason)
clock.passes({patience_s} - 1)
told("alive")
clock.passes(2)
until(lambda: False)
""", **environment)
    ready = line_of(process)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=LIMIT_S)
    assert (ready, out, process.returncode, err.endswith("does not get on: starting, training\n")) == ("ready", "alive\n", 76, True)


# --- peers


PEERS = """
import torch.distributed as dist

module.socket.gethostname = lambda: f"host-{{os.environ['RANK']}}"
module.BEAT_S = 0.25  # four of them: so long may a machine that has much to do pause a living peer

def be(rank):  # a rank that has met the others
    os.environ["RANK"] = str(rank)
    signal.alarm(60)
    end_with_parent(signal.SIGKILL)
    watchdog = Watchdog()
    watchdog.where = lambda: f"step {{7 + rank}}"
    watchdog.expect("evaluation", 1000)
    watchdog.meet(dist.FileStore("{store}", 3), rank, 3)
    return watchdog

def forked(rank):
    child = os.fork()
    if child == 0:
        watchdog = be(rank)
        if signal.sigwait([signal.SIGWINCH]):
            watchdog.expect("a collective", 0)
            time.sleep(1000)
    return child

signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGWINCH])
store = dist.FileStore("{store}", 3)
children = [forked(1), forked(2)]
watchdog = be(0)
until(lambda: store.check([f"alive/{{rank}}" for rank in range(3)]))
"""


def test_a_stopped_peer_is_silent_and_a_living_one_is_not(start, tmp_path):
    process = start(PEERS.format(store=tmp_path / "store") + """
told(watchdog.silent_peers())
os.kill(children[1], signal.SIGSTOP)
os.waitpid(children[1], os.WUNTRACED)
told(watchdog.silent_peers())
watchdog.expect("training", 0)
until(lambda: False)
""")
    out, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, out, err.splitlines()[-3:]) == (76, "[]\n[2]\n", [
        "train.py: rank 0 on host-0 does not get on: step 7, training",
        "  rank 1 on host-1: step 8, evaluation",
        "  rank 2 on host-2: step 9, evaluation, silent since then"])


def test_processes_that_are_stuck_together_do_not_call_each_other_silent(start, tmp_path):
    process = start(PEERS.format(store=tmp_path / "store") + """
os.kill(children[1], signal.SIGSTOP)
os.waitpid(children[1], os.WUNTRACED)
os.kill(children[0], signal.SIGWINCH)
watchdog.expect("a collective", 0)
until(lambda: False)
""")
    err = process.communicate(timeout=LIMIT_S)[1]
    assert {line for line in err.splitlines() if line.startswith("  rank")} == {
        "  rank 0 on host-0: step 7, a collective", "  rank 1 on host-1: step 8, a collective",
        "  rank 2 on host-2: step 9, evaluation, silent since then"}


def test_without_a_store_or_with_one_that_is_gone_no_peer_is_named_and_signals_still_arrive(start):
    process = start("""
class Gone(Store):
    is_gone = False
    def get(self, *words):
        if self.is_gone:
            raise RuntimeError("Connection reset by peer")
        return super().get(*words)
    set = check = get

watchdog = Watchdog()
alone = watchdog.silent_peers()
Gone.is_gone = True
watchdog.meet(Gone(), 0, 2)
told(alone, watchdog.silent_peers())
time.sleep(1000)
""")
    answer = line_of(process)
    process.send_signal(signal.SIGTERM)
    assert (answer, process.wait(LIMIT_S)) == ("[] []", 75)


TOLD = """
import json
from utils.errors import Exit, UserError

class Lost(RuntimeError):
    pass

module.socket.gethostname = lambda: "host"
watchdog = Watchdog()
Store.values["alive/1"] = Store.values["alive/2"] = '{"beat": 5, "host": "h", "state": "s"}'
watchdog.meet(Store(), 0, 3)
def what_becomes_of(error):
    Store.values.pop("left/0", None)
    try:
        with watchdog.telling_peers():
            raise error
    except Exception as other:
        said = Store.values.get("left/0")
        told(json.dumps([type(other).__name__, str(other), int(getattr(other, "code", -1)), said and json.loads(said)]))
"""


def test_what_ends_a_process_is_told_to_its_peers_and_raised_as_it_is(start):
    process = start(TOLD + "what_becomes_of(UserError('no such file', Exit.NO_INPUT)); what_becomes_of(KeyError('a bug'))")
    assert [json.loads(line_of(process)) for _ in range(2)] == [
        ["UserError", "no such file", 66, [66, "no such file"]], ["KeyError", "'a bug'", -1, [70, "'a bug'"]]]


def test_what_ended_a_peer_takes_the_place_of_having_lost_it(start):
    process = start(TOLD + """
Store.values["left/2"] = '[65, "cannot read a.png"]'
what_becomes_of(RuntimeError("Connection closed by peer"))
what_becomes_of(UserError("no such file", Exit.NO_INPUT))
""")
    assert [json.loads(line_of(process))[:3] for _ in range(2)] == [
        ["PeerError", "rank 2: cannot read a.png", 65], ["UserError", "no such file", 66]]


def test_a_peer_that_is_lost_without_a_word_is_named_if_it_is_silent(start):
    process = start(TOLD + """
class Beating(Store):  # rank 1 lives
    def get(self, name):
        if name == "alive/1":
            Beating.beat = getattr(Beating, "beat", 0) + 1
            return json.dumps({"beat": Beating.beat, "host": "h", "state": "s"})
        return super().get(name)
watchdog.meet(Beating(), 0, 3)
what_becomes_of(RuntimeError("Connection closed by peer"))
""")
    assert json.loads(line_of(process)) == [
        "RankError", "rank 0 on host lost its peers (Connection closed by peer); rank 2 shows no sign of life", 76, None]


@pytest.mark.parametrize("ending, code", [("until(lambda: False)", 75), ("watchdog.expect('training', 0); until(lambda: False)", 76)])
def test_a_process_that_the_watchdog_ends_tells_its_peers_why(start, ending, code):
    process = start(f"""
class Telling(Store):
    def set(self, name, value):
        if name == "left/1":
            told(value)
watchdog = Watchdog()
watchdog.meet(Telling(), 1, 2)
told("ready")
{ending}
""")
    ready = line_of(process)
    if code == 75:
        process.send_signal(signal.SIGTERM)
    found, message = json.loads(line_of(process))
    assert (ready, found, message.startswith("stopped (SIGTERM)" if code == 75 else "rank 1 on ")) == ("ready", code, True)


# --- the end of a parent


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
