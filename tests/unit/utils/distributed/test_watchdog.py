"""utils/distributed/watchdog.py: what needs a process of its own: real signals, real hangs, how a process leaves.

A Watchdog blocks the signals of its process for good. What the parts decide: test_signals.py, test_deadlines.py,
test_peers.py.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from utils.distributed.watchdog import FORKS
from utils.errors import SIGNALS

ROOT = Path(__file__).parents[4]
LIMIT_S = 60  # of one process
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none"}  # the test is the parent, as torchrun would be
NOTHING_TO_SAVE = "stopped (SIGTERM); there was nothing to save"
CONTINUES = "; the same command continues the run"
BEGINNING = f"""
import ctypes, json, os, signal, socket, sys, threading, time
from utils import errors
from utils.distributed import peers
from utils.distributed.signals import end_with_parent
from utils.distributed.watchdog import Watchdog

signal.alarm({LIMIT_S})  # whatever goes wrong: it ends, and the test with it (a child needs its own)
peers.BEAT_S, socket.gethostname = 0.01, lambda: "host"
tell = lambda *words: print(*words, flush=True)

class Store:  # of one process
    values = {{}}
    clone = lambda self: self
    set = lambda self, name, value: self.values.__setitem__(name, value)
    multi_get = lambda self, names: [self.values.get(name, "null").encode() for name in names]

def status(state, code, message):
    tell(f"status {{state}} {{int(code)}} {{message}}")

def watched(where="starting", status=status, store=None):
    watchdog = Watchdog()
    watchdog.watch_run(lambda: where, status).__enter__()
    if store:
        watchdog.meet(store, int(os.environ.get("RANK", 0)), 2)
    return watchdog

def until(is_so):
    while not is_so():
        time.sleep(0.001)

def forever():
    until(lambda: False)
"""


@pytest.fixture
def start(tmp_path):
    """start(program, **environment): a process that runs it; killed at the end. Its exit file is tmp_path / "exit"."""
    processes = []

    def started(program, **environment):
        inherited = {name: value for name, value in os.environ.items()
                     if name != "RANK" and not name.startswith("TORCHELASTIC")}
        own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "LOCKSTEP_EXIT_FILE": str(tmp_path / "exit")}
        processes.append(subprocess.Popen(
            [sys.executable, "-c", BEGINNING + program], cwd=ROOT, env=inherited | own | environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE))
        return processes[-1]

    yield started
    for process in processes:
        process.kill()
        process.communicate()


def late(limit_s, state, rank=0):
    """The message of a process that made no progress."""
    return (f"rank {rank} on host made no progress for {limit_s} s: {state}"
            f" (see --step-timeout{FORKS})")


def line_of(process):
    """The next line that it prints."""
    return process.stdout.readline().rstrip("\n")


def pause(process):
    """SIGSTOP and SIGCONT, with several heartbeats' time in both states."""
    for number in (signal.SIGSTOP, signal.SIGCONT):
        process.send_signal(number)
        if number == signal.SIGSTOP:
            os.waitpid(process.pid, os.WUNTRACED)
        time.sleep(0.03)


# --- signals

NOTED = """
watchdog = watched()
watchdog.save_on_stop()
tell("ready", watchdog.wants_to_stop())
known = None
while True:
    until(lambda: watchdog.reason != known)
    known = watchdog.reason
    tell(known, watchdog.wants_to_stop())
"""


def test_a_signal_becomes_the_reason_if_there_is_something_to_save(start):
    process, answers = start(NOTED), []
    for number in (None, *SIGNALS):
        if number is not None:
            process.send_signal(number)
        answers.append(line_of(process))
    assert answers == ["ready False", *(f"{signal.Signals(number).name} True" for number in SIGNALS)]


def test_after_a_pause_by_sigstop_signals_are_heard_as_before(start):
    process = start(NOTED)
    answers = [line_of(process)]
    numbers = [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP]
    for number in numbers:
        pause(process)
        process.send_signal(number)
        answers.append(line_of(process))
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    process.send_signal(signal.SIGTERM)  # while it is paused
    process.send_signal(signal.SIGCONT)
    answers.append(line_of(process))
    assert answers == ["ready False", *(f"{number.name} True" for number in numbers), "SIGTERM True"]


def test_after_a_pause_by_sigstop_a_deadline_holds_as_before(start):
    process = start("""
watchdog = watched()
watchdog.save_on_stop()
watchdog.enter("training", 1000)
tell("ready")
until(lambda: watchdog.reason)
watchdog.enter("saving", 0)
forever()
""")
    line_of(process)
    for _ in range(3):
        pause(process)
    process.send_signal(signal.SIGUSR1)
    err = process.communicate(timeout=LIMIT_S)[1]
    assert (process.returncode, late(0, "starting, saving") in err) == (76, True)


@pytest.mark.parametrize("second, environment", [(signal.SIGINT, {}), (signal.SIGTERM, TORCHRUN)])
def test_a_second_ctrl_c_exits_without_saving(start, tmp_path, second, environment):
    process = start(NOTED, RANK="3", **environment)
    line_of(process)
    process.send_signal(signal.SIGINT)
    first = line_of(process)
    process.send_signal(second)  # SIGTERM: so torchrun passes it on
    out, err = process.communicate(timeout=LIMIT_S)
    message = "rank 3: second Ctrl-C, exiting without saving"
    assert (first, out, err, process.returncode, (tmp_path / "exit").read_text()) == (
        "SIGINT True", f"status failed 130 {message}\n", f"train.py: {message}\n", 130, "130\n")


def test_a_signal_of_another_process_than_torchrun_is_recognised(start):
    process = start(NOTED, **TORCHRUN)
    answers = [line_of(process)]
    subprocess.run(["kill", "-INT", str(process.pid)], check=True)  # by a process that is not its parent
    answers.append(line_of(process))
    process.send_signal(signal.SIGTERM)
    assert [*answers, line_of(process)] == ["ready False", "SIGINT to rank 0 True", "SIGTERM True"]


WAYS_TO_BE_STUCK = {
    "a sleep": "time.sleep(1000)",
    "a lock": "lock = threading.Lock(); lock.acquire(); lock.acquire()",
    "a read": "os.read(os.pipe()[0], 1)",
    "a call in C that no handler would interrupt": "mutex = ctypes.create_string_buffer(64)\n"
        "for _ in range(2): ctypes.CDLL(None).pthread_mutex_lock(mutex)"}


@pytest.mark.parametrize("stuck", WAYS_TO_BE_STUCK.values(), ids=WAYS_TO_BE_STUCK)
def test_with_nothing_to_save_a_signal_ends_a_stuck_process(start, tmp_path, stuck):
    """Whatever its main thread does."""
    process = start(f"watched()\ntell('ready')\n{stuck}")
    ready = line_of(process)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=LIMIT_S)
    assert (ready, process.returncode, out, err, (tmp_path / "exit").read_text()) == (
        "ready", 75, f"status stopped 75 {NOTHING_TO_SAVE}\n", f"train.py: {NOTHING_TO_SAVE}\n", "75\n")


def test_a_training_that_began_while_peers_were_asked_is_saved(start):
    process = start("""
watchdog = watched()
watchdog._peers.silent = lambda: watchdog.save_on_stop() or []  # the first step begins meanwhile
tell("ready")
until(lambda: watchdog.reason)
tell(watchdog.reason)
""", **TORCHRUN)
    ready = line_of(process)
    process.send_signal(signal.SIGTERM)
    assert (ready, line_of(process)) == ("ready", "SIGTERM")


@pytest.mark.parametrize("number, sender, code, message", [
    (signal.SIGTERM, "torchrun", 76, f"rank 0 lost its peers; no heartbeat from rank 1{CONTINUES}"),
    (signal.SIGUSR1, "torchrun", 75, "stopped (SIGUSR1); there was nothing to save"),
    (signal.SIGTERM, "itself", 75, "stopped (SIGTERM to rank 0); there was nothing to save")])
def test_only_torchruns_sigterm_may_be_for_a_peer(start, number, sender, code, message):
    process = start("Store.values['alive/1'] = json.dumps({'beat': 5, 'host': 'h', 'state': 's'})\n"
                    "watched(store=Store())\ntell('ready')\n"
                    f"{f'os.kill(os.getpid(), {int(number)})' if sender == 'itself' else ''}\nforever()", **TORCHRUN)
    if sender == "torchrun":
        line_of(process)
        process.send_signal(number)
    out, err = process.communicate(timeout=LIMIT_S)
    assert (out.endswith(f"{code} {message}\n"), err, process.returncode) == (True, f"train.py: {message}\n", code)


def test_of_a_stop_with_nothing_to_save_only_rank_0_speaks(start):
    process = start("watched()\ntell('ready')\nforever()", RANK="1")
    line_of(process)
    process.send_signal(signal.SIGUSR1)
    assert (process.communicate(timeout=LIMIT_S)[1], process.returncode) == ("", 75)


def test_a_signal_that_was_ignored_stays_ignored(start):
    process = start("signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup\nwatched()\ntell('ready')\nforever()")
    line_of(process)
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)  # if both were pending, SIGHUP would be fetched first: the lower number
    assert process.communicate(timeout=LIMIT_S)[0] == f"status stopped 75 {NOTHING_TO_SAVE}\n"


def test_signals_are_blocked_in_every_thread_and_every_child(start):
    process = start("""
Watchdog()
def is_blocked():
    return set(errors.SIGNALS) <= signal.pthread_sigmask(signal.SIG_BLOCK, [])
found = []
thread = threading.Thread(target=lambda: found.append(is_blocked()))
thread.start()
thread.join()
child = os.fork()
if child == 0:
    os._exit(is_blocked())
tell(is_blocked(), found, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
""")
    assert line_of(process) == "True [True] 1"


# --- the end of the parent


def test_a_child_that_ends_with_its_parent_ends_when_that_is_killed(start):
    process = start("""
child = os.fork()
if child == 0:
    signal.alarm(60)
    end_with_parent(signal.SIGKILL)
    tell("ready")
    signal.pause()
os.waitpid(child, 0)
""")
    ready, began = line_of(process), time.monotonic()
    process.kill()
    rest = process.stdout.read()  # ends when the last process that could write does
    assert (ready, rest, time.monotonic() - began < LIMIT_S / 2) == ("ready", "", True)


@pytest.mark.parametrize("environment, says", [(TORCHRUN, f"status stopped 75 {NOTHING_TO_SAVE}\n"), ({}, "")])
def test_the_end_of_torchrun_is_a_sigterm_and_that_of_a_shell_nothing(start, environment, says):
    process = start("""
child = os.fork()
if child == 0:
    signal.alarm(60)
    parent = os.getppid()
    watched()
    tell("ready")
    until(lambda: os.getppid() != parent and "TORCHELASTIC_RUN_ID" not in os.environ)
    os._exit(0)
os.waitpid(child, 0)
""", **environment)
    ready = line_of(process)
    process.kill()
    assert (ready, process.stdout.read()) == ("ready", says)


# --- a missed deadline


def test_a_missed_deadline_is_76_with_all_stacks_and_the_state(start, tmp_path):
    process = start("""
def never_ends():
    time.sleep(1000)
def in_a_thread():
    tell("ready")
    time.sleep(1000)
watchdog = watched("step 7")
watchdog.enter("evaluation", 0.25, lambda: " (a/b.png is being read)")
threading.Thread(target=in_a_thread, daemon=True).start()
never_ends()
""", RANK="2")
    out, err = process.communicate(timeout=LIMIT_S)
    message = late(0.25, "step 7, evaluation (a/b.png is being read)", rank=2)
    assert (process.returncode, (tmp_path / "exit").read_text(), set(out.splitlines())) == (
        76, "76\n", {"ready", f"status failed 76 {message}"})
    assert err.startswith(f"train.py: {message}\n") and err.count(message) == 1
    assert "in never_ends\n" in err and "in in_a_thread\n" in err


DRAINING = """
watchdog = watched()
watchdog.save_on_stop()
watchdog.enter("training", 1000)
tell("ready")
{then}
until(lambda: watchdog.reason)
tell(watchdog._deadlines.limit_s)
"""


@pytest.mark.parametrize("number, grace_s, limit_s", [
    (signal.SIGTERM, None, 25), (signal.SIGINT, "100", 95), (signal.SIGUSR1, "6", 3)])
def test_a_signal_of_torchrun_leaves_less_time_than_torchrun_does(start, number, grace_s, limit_s):
    """A process that is stuck then says where, before torchrun kills it."""
    patience = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": grace_s} if grace_s else {}
    process = start(DRAINING.format(then=""), **TORCHRUN | patience)
    line_of(process)
    process.send_signal(number)
    assert float(line_of(process)) == limit_s


@pytest.mark.parametrize("then, environment", [
    ("os.kill(os.getpid(), signal.SIGTERM)", {}), ("os.kill(os.getpid(), signal.SIGTERM)", TORCHRUN), ("", {})],
    ids=["alone", "under torchrun, of another process", "of a parent that is not torchrun"])
def test_any_other_signal_shortens_no_limit(start, then, environment):
    process = start(DRAINING.format(then=then), **environment)
    line_of(process)
    if not then:
        process.send_signal(signal.SIGTERM)
    assert float(line_of(process)) == 1000


# --- leaving, whatever the console, the disk and the store do


def test_a_status_that_hangs_is_waited_for_a_while_and_no_longer(start, tmp_path):
    """The exit code is known before."""
    process = start("""
errors.LAST_WORDS_S = 0.2
def hang(*words):
    tell(open(os.environ["LOCKSTEP_EXIT_FILE"]).read().strip())
    threading.Event().wait()
watched(status=hang).enter("training", 0)
forever()
""")
    assert (process.communicate(timeout=LIMIT_S)[0], process.returncode) == ("76\n", 76)


def test_the_exit_code_is_known_before_the_message_is_printed(start):
    process = start("""
class Stream:
    flush = lambda self: None
    def write(self, text):
        tell(text.split()[0], open(os.environ["LOCKSTEP_EXIT_FILE"]).read().strip())
Watchdog()
sys.stderr = Stream()
tell("ready")
forever()
""")
    line_of(process)
    process.send_signal(signal.SIGTERM)
    assert (process.communicate(timeout=LIMIT_S)[0], process.returncode) == ("train.py: 75\n", 75)


TAKES_NO_MORE = {
    "a closed pipe": "reading, writing = os.pipe(); os.close(reading)",
    "a full disk": "writing = os.open('/dev/full', os.O_WRONLY)",
    "a full pipe that nobody reads": """
errors.LAST_WORDS_S, (reading, writing) = 0.1, os.pipe()
os.set_blocking(writing, False)
try:
    while os.write(writing, bytes(4096)): pass
except BlockingIOError:
    os.set_blocking(writing, True)"""}
ENDINGS = {
    "a stop": ("watched(); os.kill(os.getpid(), signal.SIGTERM)", 75),
    "a second Ctrl-C": ("watchdog = watched(); watchdog.save_on_stop()\nfor _ in range(2):"
                        " os.kill(os.getpid(), signal.SIGINT); until(lambda: watchdog.reason)", 130),
    "a deadline": ("Store.values['alive/1'] = json.dumps({'beat': 5, 'host': 'h', 'state': 's'})\n"
                   "watched(store=Store()).enter('training', 0)", 76),
    "a bug in the watchdog": ("watched()._where = None; forever()", 70)}


@pytest.mark.rows(4)
@pytest.mark.parametrize("program, code", ENDINGS.values(), ids=ENDINGS)
@pytest.mark.parametrize("end", TAKES_NO_MORE.values(), ids=TAKES_NO_MORE)
def test_a_console_that_takes_no_more_keeps_no_process(start, tmp_path, program, code, end):
    process = start(f"{end}\nos.dup2(writing, 1); os.dup2(writing, 2)\n{program}\nforever()")
    assert (process.wait(LIMIT_S / 2), (tmp_path / "exit").read_text()) == (code, f"{code}\n")


@pytest.mark.parametrize("bug", [
    "watchdog._where = fail", "Store.set = fail_at_leaving; os.kill(os.getpid(), signal.SIGTERM)"],
    ids=["in the thread that looks", "in the thread that listens"])
def test_a_bug_in_the_watchdog_is_70_with_a_traceback(start, tmp_path, bug):
    process = start(f"""
def fail():
    raise KeyError("a bug")
def fail_at_leaving(self, name, value):
    if name.startswith("left/"):
        fail()
watchdog = watched(store=Store())
{bug}
forever()
""")
    err = process.communicate(timeout=LIMIT_S)[1]
    assert (process.returncode, (tmp_path / "exit").read_text()) == (70, "70\n")
    assert "Traceback" in err and err.rstrip().endswith("\nKeyError: 'a bug'")


@pytest.mark.parametrize("then, code", [
    ("os.kill(os.getpid(), signal.SIGTERM)", 75), ("watchdog.enter('training', 0)", 76)])
def test_a_status_that_cannot_be_written_keeps_no_process(start, then, code):
    process = start(f"""
def fail(*words):
    raise OSError(28, "No space left on device")
watchdog = watched(status=fail)
{then}
forever()
""")
    assert process.wait(LIMIT_S) == code


# --- peers


@pytest.mark.parametrize("then, code, reason", [
    ("os.kill(os.getpid(), signal.SIGTERM)", 75, "stopped (SIGTERM)"),
    ("watchdog.enter('training', 0)", 76, "rank 1 on host made no")])
def test_a_process_that_the_watchdog_ends_writes_why(start, then, code, reason):
    process = start(f"""
class Telling(Store):
    def set(self, name, value):
        if name == "left/1":
            tell(value)
watchdog = watched(store=Telling())
{then}
forever()
""", RANK="1")
    found, message, _ = json.loads(line_of(process))
    assert (found, message.startswith(reason)) == (code, True)


def test_processes_that_are_stuck_together_name_who_is_silent(start, tmp_path):
    """A stopped process is silent; those that are stuck together, and that write their heartbeats, are not."""
    process = start("""
socket.gethostname = lambda: f"host-{os.environ['RANK']}"
peers.BEAT_S = 0.25  # four of them: a machine with much to do may pause a living peer for that long

class Folder:  # a store of several processes
    clone = lambda self: self
    def set(self, name, value):
        with open(f"{name[:5].strip('/')}-{os.environ['RANK']}.new", "w") as file:
            file.write(value)
        os.rename(file.name, name.replace("/", "-"))
    def multi_get(self, names):
        paths = [name.replace("/", "-") for name in names]
        return [open(path, "rb").read() if os.path.exists(path) else b"null" for path in paths]

def be(rank):
    os.environ["RANK"] = str(rank)
    signal.alarm(60)
    end_with_parent(signal.SIGKILL)
    watchdog = watched(f"step {7 + rank}", status=lambda *words: None)
    watchdog.enter("evaluation", 1000)
    watchdog.meet(Folder(), rank, 3)
    return watchdog

def forked(rank):
    child = os.fork()
    if child == 0:
        watchdog = be(rank)
        signal.sigwait([signal.SIGWINCH])
        watchdog.enter("a collective", 0)
        forever()
    return child

os.chdir(os.environ["FOLDER"])
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGWINCH])
children = [forked(rank) for rank in range(3)]  # which end with this process
until(lambda: b"null" not in Folder().multi_get([f"alive/{rank}" for rank in range(3)]))
os.kill(children[2], signal.SIGSTOP)
os.waitpid(children[2], os.WUNTRACED)
for child in children[:2]:
    os.kill(child, signal.SIGWINCH)
for child in children[:2]:
    os.waitpid(child, 0)  # each has said what it knows
""", FOLDER=str(tmp_path))
    err = process.communicate(timeout=LIMIT_S)[1]
    assert {line for line in err.splitlines() if line.startswith("  rank")} == {
        "  rank 0 on host-0: step 7, a collective", "  rank 1 on host-1: step 8, a collective",
        "  rank 2 on host-2: step 9, evaluation, no heartbeat since then"}


@pytest.mark.parametrize("answer", ["", "set = answer"], ids=["to a question", "to anything"])
def test_a_store_without_an_answer_keeps_no_process(start, tmp_path, answer):
    """And the message comes first."""
    process = start(f"""
peers.STORE_S = 0.3
class Mute(Store):
    def answer(self, *words):
        print("the store is asked", file=sys.stderr, flush=True)
        threading.Event().wait()
    multi_get = answer
    {answer}
watchdog = watched()
watchdog.enter("training", 0)
watchdog.meet(Mute(), 0, 2)
forever()
""")
    said = [line for line in process.communicate(timeout=LIMIT_S)[1].splitlines() if not answer or "asked" not in line]
    assert (said[0], process.returncode, (tmp_path / "exit").read_text()) == (
        f"train.py: {late(0, 'starting, training')}", 76, "76\n")


@pytest.mark.long
def test_a_store_whose_host_is_gone_keeps_no_process(start, tmp_path):
    process = start("""
import torch.distributed as dist
peers.STORE_S = 0.3
reading, writing = os.pipe()
child = os.fork()
if child == 0:
    signal.alarm(60)
    end_with_parent(signal.SIGKILL)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(writing, str(store.port).encode())
    time.sleep(1000)
store = dist.TCPStore("127.0.0.1", int(os.read(reading, 9)), is_master=False, wait_for_workers=False)
peers.prepare_store(store, 2)
watchdog = watched(store=store)
until(lambda: store.get("alive/0") != b"null")
os.kill(child, signal.SIGSTOP)
os.waitpid(child, os.WUNTRACED)
watchdog.enter("training", 0)
forever()
""")
    err = process.communicate(timeout=LIMIT_S)[1]
    assert (process.returncode, err.splitlines()[0], (tmp_path / "exit").read_text()) == (
        76, f"train.py: {late(0, 'starting, training')}", "76\n")
