"""utils/distributed/watchdog.py: a process that does not get on says where it is and leaves, whatever its console and disk do."""

import re
import signal

import pytest

from tests.unit.utils.distributed.watchdog.conftest import LIMIT_S, TORCHRUN, late, line_of


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
watchdog.enter("evaluation", 0.25, lambda: " (a/b.png is being read)")
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
watchdog.enter("training", 0)
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
    ("watchdog = Watchdog(); watchdog.meet(Peers(), 0, 3); watchdog.enter('training', 0)", 76),
    ("def fail(): raise KeyError\nwatchdog = Watchdog(); watchdog.where = fail", 70)],
    ids=["a stop", "a second Ctrl-C", "a deadline", "a bug in the watchdog"])
@pytest.mark.parametrize("end", TAKES_NO_MORE.values(), ids=TAKES_NO_MORE)
def test_a_console_that_takes_no_more_keeps_no_process_from_leaving(start, tmp_path, program, code, end):
    process = start(f"{end}\nos.dup2(writing, 1); os.dup2(writing, 2)\n{program}\nuntil(lambda: False)")
    assert (process.wait(LIMIT_S / 6), (tmp_path / "exit").read_text()) == (code, f"{code}\n")


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


@pytest.mark.parametrize("stoppable, code", [(True, 75), (False, 76)])
def test_a_status_that_cannot_be_written_keeps_no_process_from_leaving(start, stoppable, code):
    process = start(f"""
def fail(*words):
    raise OSError(28, "No space left on device")
watchdog = Watchdog()
watchdog.at_end, watchdog.is_stoppable = fail, {stoppable}
told("ready")
watchdog.enter("training", {"1000" if stoppable else "0"})
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
    watchdog.enter("saving", seconds)
    clock.passes(seconds - 1)
told("alive")
clock.passes(2)
until(lambda: False)
""")
    assert (line_of(process), process.wait(LIMIT_S)) == ("alive", 76)


def test_each_expectation_begins_anew(start):
    process = start("""
module.time, module.socket.gethostname = Clock(), lambda: "host"
clock, watchdog = module.time, Watchdog()
watchdog.enter("saving", 10)
for _ in range(5):
    clock.passes(9)
    watchdog.enter("saving", 10)
clock.passes(9)
told("alive")
clock.passes(2)
until(lambda: False)
""")
    out, err = process.communicate(timeout=LIMIT_S)
    assert (out, process.returncode, err.splitlines()[0]) == ("alive\n", 76, f"train.py: {late(10, 'starting, saving')}")


def test_where_nothing_is_expected_there_is_no_deadline(start):
    process = start("module.time = clock = Clock()\nWatchdog()\nclock.passes(1e9)\ntold('alive')\nos._exit(0)")
    assert (line_of(process), process.wait(LIMIT_S)) == ("alive", 0)


EACH = """
module.time, module.socket.gethostname = Clock(), lambda: "host"
clock, watchdog, passes = module.time, Watchdog(), iter({passes})
def items():
    for item in "abc":
        clock.passes(next(passes))  # until it comes
        yield item
for item in watchdog.watch(items(), "training", 100, 10, lambda: " (a.png)"):
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
watchdog.enter("training", 1000)
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


def test_a_process_that_is_to_end_has_so_long_for_each_thing_that_it_still_does(start):
    process = start(DRAINING.format(passes=[24, 24, 24], then="watchdog.enter('saving', 1000)", last=26), **TORCHRUN)
    line_of(process)
    process.send_signal(signal.SIGTERM)
    out = process.communicate(timeout=LIMIT_S)[0]
    assert (out, process.returncode) == ("alive\n", 76)


@pytest.mark.parametrize("then", ["pass", "watchdog.enter('saving', 1000, drains=False)"])
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
