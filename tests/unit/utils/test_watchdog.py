"""utils/watchdog.py: signals arrive whatever the main thread does, and a process that does not get on says so and leaves.

All of it in processes of their own: a Watchdog blocks the signals of its process for good.
"""

import json
import os
import re
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
import ctypes, json, os, signal, sys, threading, time
from types import SimpleNamespace
from utils import errors, watchdog as module
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

class Peers(Store):  # ranks 1 and 2; of these, the `living` ones show a sign of life whenever one looks
    beats, living = {{1: 5, 2: 5}}, (1, 2)

    def get(self, name):
        kind, rank = name.split("/")
        if kind == "left" or int(rank) not in self.beats:
            return super().get(name)
        self.beats[int(rank)] += int(rank) in self.living
        return json.dumps({{"beat": self.beats[int(rank)], "host": "h", "state": "s"}})

    def check(self, names):
        return names[0] in ("alive/1", "alive/2") or super().check(names)

def told_at_end(state, code, message):
    told(f"at_end {{state}} {{int(code)}} {{message}}")

def until(is_so):
    while not is_so():
        time.sleep(0.001)
"""
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none"}  # the test is the parent, as torchrun would be


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


def late(limit_s, state, rank=0, host="host"):
    """What a process says that did not get on."""
    return (f"rank {rank} on {host} does not get on for {limit_s} s: {state}"
            " (--start-timeout, --step-timeout and --section-timeout are the limits)")


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
watchdog.expect("training", 1000)
told("ready")
until(lambda: watchdog.reason)
watchdog.expect("saving", 0)
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
watchdog.expect("evaluation", 0.25, lambda: " (a/b.png is being read)")
threading.Thread(target=in_a_thread, daemon=True).start()
never_ends()
""", RANK="2")
    out, err = process.communicate(timeout=LIMIT_S)
    message = late(0.25, "step 7, evaluation (a/b.png is being read)", rank=2)
    assert (process.returncode, (tmp_path / "exit").read_text(), set(out.splitlines())) == (
        76, "76\n", {"ready", f"at_end failed 76 {message}"})
    assert err.startswith(f"train.py: {message}\n") and err.count(message) == 1
    assert "in never_ends\n" in err and "in in_a_thread\n" in err


def test_what_is_told_at_the_end_is_waited_for_a_while_and_no_longer_and_the_exit_code_is_known_before(start, tmp_path):
    process = start("""
errors.LAST_WORDS_S = 0.2
def hang(*words):
    told(open(os.environ["LOCKSTEP_EXIT_FILE"]).read().strip())
    threading.Event().wait()
watchdog = Watchdog()
watchdog.at_end = hang
watchdog.expect("training", 0)
time.sleep(1000)
""")
    assert (process.communicate(timeout=LIMIT_S)[0], process.returncode) == ("76\n", 76)


def test_the_exit_code_is_known_before_anything_is_said(start):
    process = start("""
class Stream:
    write = lambda self, text: told(text.split()[0], open(os.environ["LOCKSTEP_EXIT_FILE"]).read().strip()) if text.strip() else None
    flush = lambda self: None
Watchdog()
sys.stderr = Stream()
told("ready")
time.sleep(1000)
""")
    line_of(process)
    process.send_signal(signal.SIGTERM)
    assert (process.communicate(timeout=LIMIT_S)[0], process.returncode) == ("train.py: 75\n", 75)


TAKES_NO_MORE = {
    "a closed pipe": "reading, writing = os.pipe(); os.close(reading)", "a full disk": "writing = os.open('/dev/full', os.O_WRONLY)",
    "a full pipe that nobody reads": """
errors.LAST_WORDS_S, (reading, writing) = 0.2, os.pipe()
os.set_blocking(writing, False)
try:
    while os.write(writing, bytes(4096)): pass
except BlockingIOError:
    os.set_blocking(writing, True)"""}


@pytest.mark.parametrize("program, code", [
    ("Watchdog(); os.kill(os.getpid(), signal.SIGTERM)", 75),
    ("watchdog = Watchdog(); watchdog.is_stoppable = False\n"
     "for _ in range(2): os.kill(os.getpid(), signal.SIGINT); until(lambda: watchdog.reason)", 130),
    ("watchdog = Watchdog(); watchdog.meet(Peers(), 0, 3); watchdog.expect('training', 0)", 76),
    ("def fail(): raise KeyError\nwatchdog = Watchdog(); watchdog.where = fail", 70)],
    ids=["a stop", "a second Ctrl-C", "a deadline", "a bug in the watchdog"])
@pytest.mark.parametrize("end", TAKES_NO_MORE.values(), ids=TAKES_NO_MORE)
def test_a_console_that_takes_no_more_keeps_no_process_from_leaving(start, tmp_path, program, code, end):
    process = start(f"{end}\nos.dup2(writing, 1); os.dup2(writing, 2)\n{program}\nuntil(lambda: False)")
    assert (process.wait(LIMIT_S / 6), (tmp_path / "exit").read_text()) == (code, f"{code}\n")


# --- a bug in the watchdog


@pytest.mark.parametrize("bug", ["watchdog.where = fail", "Store.set = fail_at_leaving; os.kill(os.getpid(), signal.SIGTERM)"],
                         ids=["in the thread that watches", "in the thread that listens"])
def test_an_exception_in_a_thread_of_the_watchdog_ends_the_process_with_70_and_a_traceback(start, tmp_path, bug):
    process = start(f"""
def fail():
    raise KeyError("a bug")
def fail_at_leaving(self, name, value):
    if name.startswith("left/"):
        fail()
watchdog = Watchdog()
watchdog.meet(Store(), 0, 2)
{bug}
until(lambda: False)
""")
    err = process.communicate(timeout=LIMIT_S)[1]
    assert (process.returncode, (tmp_path / "exit").read_text()) == (70, "70\n")
    assert "Traceback" in err and err.rstrip().endswith("\nKeyError: 'a bug'")


# --- more deadlines


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


def test_each_sign_that_it_got_on_begins_the_expectation_anew(start):
    process = start("""
module.time, module.socket.gethostname = Clock(), lambda: "host"
clock, watchdog = module.time, Watchdog()
watchdog.expect("saving", 10)
for _ in range(5):
    clock.passes(9)
    watchdog.got_on()
clock.passes(9)
told("alive")
clock.passes(2)
until(lambda: False)
""")
    out, err = process.communicate(timeout=LIMIT_S)
    assert (out, process.returncode, err.splitlines()[0]) == ("alive\n", 76, f"train.py: {late(10, 'starting, saving')}")


def test_where_nothing_was_expected_getting_on_sets_no_deadline(start):
    process = start("module.time = clock = Clock()\nWatchdog().got_on()\nclock.passes(1e9)\ntold('alive')\nos._exit(0)")
    assert (line_of(process), process.wait(LIMIT_S)) == ("alive", 0)


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


@pytest.mark.parametrize("passes, seen, limit_s, doing", [
    ([99, 104, 9, 14, 9, 14], "abc", None, None),
    ([101], "", 100, "training, waiting for data (a.png)"), ([99, 106], "", 105, "training"),  # the first item
    ([99, 104, 11], "a", 10, "training, waiting for data (a.png)"), ([99, 104, 9, 16], "a", 15, "training"),  # and the others
    ([99, 104, 9, 14, 9, 16], "ab", 15, "training")])
def test_the_first_item_has_longer_than_the_others_and_work_longer_than_waiting_so_that_the_rank_without_data_speaks_first(
        start, passes, seen, limit_s, doing):
    process = start(EACH.format(passes=[*passes, 1e6]))
    out, err = process.communicate(timeout=LIMIT_S)
    message = f"train.py: {late(limit_s, f'starting, {doing}')}"
    assert ("".join(out.split()), process.returncode, err.splitlines()[:1]) == (seen, 76 if doing else 0, [message] if doing else [])


def test_an_error_of_the_items_says_what_was_being_loaded(start):
    process = start("""
def items():
    yield "a"
    raise RuntimeError("killed")
try:
    list(Watchdog().each(items(), "training", 1000, 1000, lambda: " (a.png)"))
except RuntimeError as error:
    told(error, error.__notes__)
""")
    assert line_of(process) == "killed [' (a.png)']"


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


# The SIGHUP that the process sends to itself afterwards is not from torchrun; once it has been received, all that the signal before
# it leads to has been done.
DRAINING = """
module.time, module.socket.gethostname = Clock(), lambda: "host"
clock, watchdog = module.time, Watchdog()
watchdog.is_stoppable = False
watchdog.meet(Store(), 0, 2)
watchdog.expect("training", 1000)
told("ready")
until(lambda: watchdog.reason)
os.kill(os.getpid(), signal.SIGHUP)
until(lambda: ("SIGHUP", False) in watchdog._received)
for seconds in {passes}:
    clock.passes(seconds)
    {then}
told("alive")
clock.passes({last})
until(lambda: False)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
@pytest.mark.parametrize("environment, patience_s", [
    (TORCHRUN, 25), (TORCHRUN | {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "100"}, 95), (TORCHRUN | {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "6"}, 3)])
def test_a_process_stuck_after_a_signal_of_torchrun_says_where_before_torchrun_kills_it(start, number, environment, patience_s):
    process = start(DRAINING.format(passes=[patience_s - 1], then="pass", last=2), **environment)
    ready = line_of(process)
    process.send_signal(number)
    out, err = process.communicate(timeout=LIMIT_S)
    assert (ready, out, process.returncode) == ("ready", "alive\n", 76)
    assert re.match(r"train.py: rank 0 on host does not get on for \d+ s: starting, training \(", err)


@pytest.mark.parametrize("then", ["watchdog.expect('saving', 1000)", "watchdog.got_on()"])
def test_a_process_that_is_to_end_has_so_long_for_each_thing_that_it_still_does(start, then):
    process = start(DRAINING.format(passes=[24, 24, 24], then=then, last=26), **TORCHRUN)
    line_of(process)
    process.send_signal(signal.SIGTERM)
    out = process.communicate(timeout=LIMIT_S)[0]
    assert (out, process.returncode) == ("alive\n", 76)


@pytest.mark.parametrize("then", ["pass", "watchdog.expect('saving', 1000, drains=False)", "watchdog.got_on()"])
def test_a_save_may_take_as_long_as_before_when_the_process_is_to_end(start, then):
    program = DRAINING.replace('expect("training", 1000)', 'expect("saving", 1000, drains=False)')
    process = start(program.format(passes=[900], then=then, last=1002), **TORCHRUN)
    line_of(process)
    process.send_signal(signal.SIGTERM)
    out = process.communicate(timeout=LIMIT_S)[0]
    assert (out, process.returncode) == ("alive\n", 76)


@pytest.mark.parametrize("environment", [{}, TORCHRUN])
def test_after_a_signal_that_is_not_from_torchrun_there_is_as_much_time_as_before(start, environment):
    process = start(DRAINING.format(passes=[999], then="pass", last=2).replace(
        "until(lambda: watchdog.reason)", "os.kill(os.getpid(), signal.SIGTERM); until(lambda: watchdog.reason)"), **environment)
    out, err = process.communicate(timeout=LIMIT_S)
    assert (out, process.returncode, err.splitlines()[0]) == ("ready\nalive\n", 76, f"train.py: {late(1000, 'starting, training')}")


def test_without_torchrun_a_signal_of_the_parent_shortens_nothing(start):
    process = start(DRAINING.format(passes=[999], then="pass", last=2))
    line_of(process)
    process.send_signal(signal.SIGTERM)
    assert (process.communicate(timeout=LIMIT_S)[0], process.returncode) == ("alive\n", 76)


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
    said = err.splitlines()
    assert (process.returncode, out, said[0], said[-2:]) == (76, "[]\n[2]\n", f"train.py: {late(0, 'step 7, training', host='host-0')}", [
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


@pytest.mark.parametrize("answer, is_asked_again", [
    ("raise RuntimeError('Connection reset by peer')", False), ("Ailing.is_well.wait()", True)], ids=["lost", "late"])
def test_a_store_that_is_lost_is_asked_no_more_and_one_that_is_late_by_one_thread_until_it_has_answered(start, answer, is_asked_again):
    process = start(f"""
module.STORE_S = 0.1
class Ailing(Store):
    asked, is_well = [], threading.Event()
    def answer(self, *words):
        self.asked.append(words)
        {answer}
    set = check = get = answer

def beats(number):
    enough = len(begun) + number
    until(lambda: len(begun) >= enough)

begun, watchdog = [], Watchdog()
watchdog.where = lambda: begun.append(0) or "at a beat"
alone = watchdog.silent_peers()
watchdog.meet(Ailing(), 0, 2)
until(lambda: Ailing.asked)
beats(10)
told(alone, watchdog.silent_peers(), len(Ailing.asked))
Ailing.is_well.set()
until(lambda: threading.active_count() == 3)  # the watchdog's two and this one: nobody asks
beats(3)
told(len(Ailing.asked) > 1)
time.sleep(1000)
""")
    answers = [line_of(process), line_of(process)]
    process.send_signal(signal.SIGTERM)
    assert (answers, process.wait(LIMIT_S)) == (["[] [] 1", str(is_asked_again)], 75)


GETS_NO_ANSWER = {"an error": "raise RuntimeError('wait timeout after 2000ms')", "an error after a while":
                  "time.sleep(0.3); raise RuntimeError('Connection reset by peer')", "nothing, ever": "threading.Event().wait()"}


MUTE = """
module.STORE_S, module.socket.gethostname = 0.3, lambda: "host"
class Mute(Store):
    is_mute = False
    def answer(self, *words):
        if self.is_mute:
            print("the store is asked", file=sys.stderr, flush=True)
            ANSWER
    check = get = answer
watchdog = Watchdog()
watchdog.meet(Mute(), 0, 2)
Mute.is_mute = True
watchdog.expect("training", 0)
until(lambda: False)
"""


@pytest.mark.parametrize("answer", GETS_NO_ANSWER.values(), ids=GETS_NO_ANSWER)
def test_where_the_store_gives_no_answer_the_message_comes_first_and_the_process_leaves_all_the_same(start, tmp_path, answer):
    process = start(MUTE.replace("ANSWER", answer))
    said = process.communicate(timeout=LIMIT_S / 6)[1].splitlines()
    assert (said[0], "the store is asked" in said[1:], process.returncode, (tmp_path / "exit").read_text()) == (
        f"train.py: {late(0, 'starting, training')}", True, 76, "76\n")


@pytest.mark.parametrize("answer", GETS_NO_ANSWER.values(), ids=GETS_NO_ANSWER)
def test_a_store_that_takes_nothing_either_keeps_no_process_from_leaving(start, answer):
    process = start(MUTE.replace("ANSWER", answer).replace("check = get", "set = check = get"))
    err = process.communicate(timeout=LIMIT_S / 6)[1]
    assert (process.returncode, f"train.py: {late(0, 'starting, training')}\n" in err) == (76, True)


FROZEN = """
import torch.distributed as dist
module.STORE_S, module.socket.gethostname = 0.3, lambda: "host"
reading, writing = os.pipe()
child = os.fork()
if child == 0:
    signal.alarm(60)
    end_with_parent(signal.SIGKILL)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(writing, str(store.port).encode())
    time.sleep(1000)
store = dist.TCPStore("127.0.0.1", int(os.read(reading, 9)), is_master=False, wait_for_workers=False)
watchdog = Watchdog()
watchdog.meet(store, 0, 2)
until(lambda: store.check(["alive/0"]))
os.kill(child, signal.SIGSTOP)
os.waitpid(child, os.WUNTRACED)
"""


def test_a_store_whose_host_does_not_answer_any_more_keeps_no_process_from_leaving(start, tmp_path):
    process = start(FROZEN + "watchdog.expect('training', 0); until(lambda: False)")
    err = process.communicate(timeout=LIMIT_S / 6)[1]
    assert (process.returncode, err.splitlines()[0], (tmp_path / "exit").read_text()) == (
        76, f"train.py: {late(0, 'starting, training')}", "76\n")


def test_a_process_that_loses_its_peers_and_the_stores_host_leaves_too(start):
    process = start(FROZEN + """
from utils.errors import exit_after
def work():
    watchdog.expect("training", 1000)
    with watchdog.telling_peers():
        raise RuntimeError("Connection closed by peer")
exit_after(work)
""")
    err = process.communicate(timeout=LIMIT_S / 6)[1]
    assert (process.returncode, err) == (76, "train.py: rank 0 on host lost its peers (Connection closed by peer)\n")


# --- a SIGTERM of torchrun before there is anything to save: a stop, or a peer has died


AT_START = """
module.socket.gethostname = lambda: "host"
watchdog = Watchdog()
watchdog.at_end = told_at_end
{peers}
watchdog.meet(Peers(), int(os.environ["RANK"]), 3)
told("ready")
{then}
time.sleep(1000)
"""
STOPPED = "stopped (SIGTERM); there was nothing to save"
ALONE = "stopped (SIGUSR1 to rank 1); there was nothing to save"
LOST = "rank 0 lost its peers; rank 1 shows no sign of life"
UNREADABLE = "rank 1: cannot read a.png"
ONE_LEFT = "Peers.living = (2,); Store.values['left/1'] = json.dumps([{}, {!r}])"
BECOMES = {
    "all live": ("", STOPPED, 75), "one is silent": ("Peers.living = (2,)", LOST, 76),
    "one left with an error": (ONE_LEFT.format(65, "cannot read a.png"), UNREADABLE, 65),
    "one left with an error, and another one is silent": (
        ONE_LEFT.format(65, "cannot read a.png") + "; Peers.living = ()", UNREADABLE, 65),
    "one stopped": (ONE_LEFT.format(75, STOPPED.replace("TERM", "INT")), STOPPED, 75), "it alone": (ONE_LEFT.format(75, ALONE), ALONE, 75),
    "one stopped, and another one is silent": (
        ONE_LEFT.format(75, STOPPED).replace("1'", "2'").replace("(2,)", "()"), LOST, 76),
    "a second Ctrl-C ended one": (ONE_LEFT.format(130, "rank 1: a second Ctrl-C"), "rank 1: rank 1: a second Ctrl-C", 130)}


@pytest.mark.parametrize("peers, message, code", BECOMES.values(), ids=BECOMES)
def test_a_sigterm_of_torchrun_with_nothing_to_save_has_the_code_of_what_became_of_the_peers(start, tmp_path, peers, message, code):
    process = start(AT_START.format(peers=peers, then=""), RANK="0", **TORCHRUN)
    line_of(process)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=LIMIT_S)
    state = "stopped" if code == 75 else "failed"
    is_told = message in (STOPPED, ALONE, LOST)  # a peer that left with an error has said so itself
    assert (out, err, process.returncode, (tmp_path / "exit").read_text()) == (
        f"at_end {state} {code} {message}\n", f"train.py: {message}\n" if is_told else "", code, f"{code}\n")


@pytest.mark.parametrize("peers, code, said", [
    ("", 75, ""), (ONE_LEFT.format(75, ALONE).replace("1'", "2'"), 75, ""),
    ("Peers.living = (1,)", 76, "train.py: rank 1 lost its peers; rank 2 shows no sign of life\n")])
def test_that_a_peer_is_silent_is_said_by_each_that_lost_it_and_a_stop_by_rank_0_alone(start, peers, code, said):
    process = start(AT_START.format(peers=peers, then=""), RANK="1", **TORCHRUN)
    line_of(process)
    process.send_signal(signal.SIGTERM)
    assert (process.communicate(timeout=LIMIT_S)[1], process.returncode) == (said, code)


@pytest.mark.parametrize("number, then, environment, reason", [
    (signal.SIGTERM, "", {}, "SIGTERM"), (signal.SIGUSR1, "", TORCHRUN, "SIGUSR1"),
    (None, "os.kill(os.getpid(), signal.SIGTERM)", TORCHRUN, "SIGTERM to rank 0")])
def test_any_other_signal_with_nothing_to_save_is_a_stop_whatever_the_peers_do(start, number, then, environment, reason):
    process = start(AT_START.format(peers="Peers.living = ()", then=then), RANK="0", **environment)
    line_of(process)
    if number:
        process.send_signal(number)
    assert (process.communicate(timeout=LIMIT_S)[0], process.returncode) == (
        f"at_end stopped 75 stopped ({reason}); there was nothing to save\n", 75)


TOLD = """
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
