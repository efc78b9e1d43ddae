"""utils/distributed/watchdog.py: peers know of each other what they do and why they left, as long as there is a store."""

import json
import signal

import pytest

from tests.unit.utils.distributed.watchdog.conftest import LIMIT_S, TORCHRUN, late, line_of

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
    watchdog.enter("evaluation", 1000)
    watchdog.meet(dist.FileStore("{store}", 3), rank, 3)
    return watchdog

def forked(rank):
    child = os.fork()
    if child == 0:
        watchdog = be(rank)
        if signal.sigwait([signal.SIGWINCH]):
            watchdog.enter("a collective", 0)
            time.sleep(1000)
    return child

signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGWINCH])
store = dist.FileStore("{store}", 3)
module.prepare_store(store, 3)
children = [forked(1), forked(2)]
watchdog = be(0)
until(lambda: b"null" not in store.multi_get([f"alive/{{rank}}" for rank in range(3)]))
"""


def test_a_stopped_peer_is_silent_and_a_living_one_is_not(start, tmp_path):
    process = start(PEERS.format(store=tmp_path / "store") + """
told(watchdog.silent_peers())
os.kill(children[1], signal.SIGSTOP)
os.waitpid(children[1], os.WUNTRACED)
told(watchdog.silent_peers())
watchdog.enter("training", 0)
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
watchdog.enter("a collective", 0)
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
    set = multi_get = answer

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
    multi_get = answer
watchdog = Watchdog()
watchdog.meet(Mute(), 0, 2)
Mute.is_mute = True
watchdog.enter("training", 0)
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
    process = start(MUTE.replace("ANSWER", answer).replace("multi_get =", "set = multi_get ="))
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
module.prepare_store(store, 2)
watchdog = Watchdog()
watchdog.meet(store, 0, 2)
until(lambda: store.get("alive/0") != b"null")
os.kill(child, signal.SIGSTOP)
os.waitpid(child, os.WUNTRACED)
"""


def test_a_store_whose_host_does_not_answer_any_more_keeps_no_process_from_leaving(start, tmp_path):
    process = start(FROZEN + "watchdog.enter('training', 0); until(lambda: False)")
    err = process.communicate(timeout=LIMIT_S / 6)[1]
    assert (process.returncode, err.splitlines()[0], (tmp_path / "exit").read_text()) == (
        76, f"train.py: {late(0, 'starting, training')}", "76\n")


def test_a_process_that_loses_its_peers_and_the_stores_host_leaves_too(start):
    process = start(FROZEN + """
from utils.errors import exit_after
def work():
    watchdog.enter("training", 1000)
    with watchdog.telling_peers():
        raise RuntimeError("Connection closed by peer")
exit_after(work)
""")
    err = process.communicate(timeout=LIMIT_S / 6)[1]
    assert (process.returncode, err) == (76, "train.py: rank 0 on host lost its peers (Connection closed by peer)\n")


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
UNREADABLE, UNPRINTED = "rank 1: cannot read a.png", "rank 1: there is no file w.pth"
ONE_LEFT = "Peers.living = (2,); Store.values['left/1'] = json.dumps([{}, {!r}, {}])"
BECOMES = {
    "all live": ("", STOPPED, 75), "one is silent": ("Peers.living = (2,)", LOST, 76),
    "one left with an error": (ONE_LEFT.format(65, "cannot read a.png", True), UNREADABLE, 65),
    "one left with an error that it alone knew and did not print": (
        ONE_LEFT.format(66, "there is no file w.pth", False), UNPRINTED, 66),
    "one left with an error, and another one is silent": (
        ONE_LEFT.format(65, "cannot read a.png", True) + "; Peers.living = ()", UNREADABLE, 65),
    "one stopped": (ONE_LEFT.format(75, STOPPED.replace("TERM", "INT"), False), STOPPED, 75),
    "it alone": (ONE_LEFT.format(75, ALONE, False), ALONE, 75),
    "one stopped, and another one is silent": (
        ONE_LEFT.format(75, STOPPED, False).replace("1'", "2'").replace("(2,)", "()"), LOST, 76),
    "a second Ctrl-C ended one": (
        ONE_LEFT.format(130, "rank 1: a second Ctrl-C", True), "rank 1: rank 1: a second Ctrl-C", 130)}


@pytest.mark.parametrize("peers, message, code", BECOMES.values(), ids=BECOMES)
def test_a_sigterm_of_torchrun_with_nothing_to_save_has_the_code_of_what_became_of_the_peers(start, tmp_path, peers, message, code):
    process = start(AT_START.format(peers=peers, then=""), RANK="0", **TORCHRUN)
    line_of(process)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=LIMIT_S)
    state = "stopped" if code == 75 else "failed"
    is_told = message in (STOPPED, ALONE, LOST, UNPRINTED)  # a peer that left with an error has said so itself
    assert (out, err, process.returncode, (tmp_path / "exit").read_text()) == (
        f"at_end {state} {code} {message}\n", f"train.py: {message}\n" if is_told else "", code, f"{code}\n")


@pytest.mark.parametrize("peers, code, said", [
    ("", 75, ""), (ONE_LEFT.format(75, ALONE, False).replace("1'", "2'"), 75, ""),
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
    process = start(TOLD + "what_becomes_of(UserError('no such file', Exit.NO_INPUT));"
                    " what_becomes_of(KeyError('a bug'));"
                    " os.environ['RANK'] = '1'; what_becomes_of(UserError('no such file', Exit.NO_INPUT))")
    assert [json.loads(line_of(process)) for _ in range(3)] == [
        ["UserError", "no such file", 66, [66, "no such file", True]],
        ["KeyError", "'a bug'", -1, [70, "'a bug'", True]],
        ["UserError", "no such file", 66, [66, "no such file", False]]]


def test_what_ended_a_peer_takes_the_place_of_having_lost_it(start):
    process = start(TOLD + """
Store.values["left/2"] = '[65, "cannot read a.png", true]'
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


@pytest.mark.parametrize("ending, code", [("until(lambda: False)", 75), ("watchdog.enter('training', 0); until(lambda: False)", 76)])
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
    found, message, _ = json.loads(line_of(process))
    assert (ready, found, message.startswith("stopped (SIGTERM)" if code == 75 else "rank 1 on ")) == ("ready", code, True)


def test_whoever_leaves_with_76_writes_the_flight_record_first_and_names_it(start):
    process = start("""
module.socket.gethostname = lambda: "host"
watchdog = Watchdog()
watchdog.write_flight_record = lambda: told("written") or "run/flight-record/rank_0"
try:
    with watchdog.telling_peers():
        raise RuntimeError("Connection closed by peer")
except Exception as error:
    told(error)
watchdog.enter("training", 0)
until(lambda: False)
""")
    out, err = process.communicate(timeout=LIMIT_S)
    record = "; NCCL's flight record: run/flight-record/rank_0"
    assert (out.splitlines(), err.splitlines()[0], process.returncode) == (
        ["written", f"rank 0 on host lost its peers (Connection closed by peer){record}", "written"],
        f"train.py: {late(0, 'starting, training')}{record}", 76)


@pytest.mark.parametrize("record", ["fail", "threading.Event().wait"], ids=["a full disk", "a disk that hangs"])
def test_a_flight_record_that_cannot_be_written_keeps_no_process_from_leaving(start, record):
    process = start(f"""
errors.LAST_WORDS_S = 0.2
def fail():
    raise OSError(28, "No space left on device")
watchdog = Watchdog()
watchdog.write_flight_record = {record}
watchdog.enter("training", 0)
until(lambda: False)
""")
    err = process.communicate(timeout=LIMIT_S)[1]
    assert (process.returncode, "Traceback" in err, "flight record" in err) == (76, False, False)


def test_a_look_at_the_peers_is_one_question_to_the_store_of_any_number(start):
    process = start("""
class Counting(Store):
    asked = []
    def multi_get(self, names):
        self.asked.append(len(names))
        return [b"null"] * len(names)
    check = get = None
watchdog = Watchdog()
watchdog.meet(Counting(), 0, 1000)
watchdog._said("left")
watchdog.silent_peers()
told(Counting.asked)
os._exit(0)
""")
    assert line_of(process) == "[1000, 1000, 1000]"
