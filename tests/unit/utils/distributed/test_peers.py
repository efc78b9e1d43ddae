"""utils/distributed/peers.py: ranks know what their peers do and why they left, as long as there is a store."""

import json
import socket
import threading

import pytest

from utils.distributed import peers as module
from utils.distributed.peers import Ending, Peers, prepare_store
from utils.errors import Exit, PeerError, RankError, UserError


class Store:
    """The part of torch.distributed.Store that one process needs. The `living` ranks beat whenever one looks."""

    def __init__(self, world_size=3, living=()):
        self.values, self.living, self.num_looks = {}, living, 0
        prepare_store(self, world_size)
        for rank in range(1, world_size):
            self.beat(rank)

    def beat(self, rank):
        self.set(f"alive/{rank}", json.dumps({"beat": self.num_looks, "host": f"host-{rank}", "state": f"step {rank}"}))

    def set(self, name, value):
        self.values[name] = value

    def multi_set(self, names, values):
        self.values.update(zip(names, values, strict=True))

    def multi_get(self, names):
        self.num_looks += 1
        for rank in self.living:
            self.beat(rank)
        return [self.values[name].encode() for name in names]

    def left(self, rank, code, message, is_shown):
        """Has the rank leave."""
        self.set(f"left/{rank}", json.dumps([code, message, is_shown]))


def peers_of(store, rank=0, world_size=3):
    return Peers(lambda: "step 7, training", rank, world_size, store)


@pytest.fixture(autouse=True)
def fixed(monkeypatch, clock):
    """The host's name; nobody sleeps."""
    monkeypatch.setattr(socket, "gethostname", lambda: "host")
    monkeypatch.delenv("RANK", raising=False)


# --- heartbeats


def test_a_heartbeat_says_where_a_rank_is_and_differs_from_the_last():
    store = Store()
    peers, found = peers_of(store), []
    for _ in range(2):
        peers.beat()
        found.append(json.loads(store.values["alive/0"]))
    assert found == [{"beat": beat, "host": "host", "state": "step 7, training"} for beat in (1, 2)]


def test_who_does_not_beat_is_silent_after_four_intervals(clock):
    began = clock.now
    assert (peers_of(Store(living=(1,))).silent(), clock.now - began) == ([2], 4 * module.BEAT_S)


def test_who_listens_beats_meanwhile():
    """So processes that are stuck together do not call each other silent."""
    store = Store()
    peers_of(store).silent()
    assert json.loads(store.values["alive/0"])["beat"] == 4


def test_a_rank_that_has_not_come_yet_is_not_silent():
    store = Store()
    store.values["alive/2"] = "null"
    assert peers_of(store).silent() == [1]


def test_the_states_of_the_peers_say_who_is_silent():
    assert peers_of(Store(living=(1,))).states() == (
        "  rank 1 on host-1: step 1\n  rank 2 on host-2: step 2, no heartbeat since then")


def test_alone_there_are_no_peers():
    alone = Peers(lambda: "", 0)
    alone.beat()
    alone.leave(75, "stopped", True)
    assert (alone.silent(), alone.states()) == ([], "")


def test_a_look_at_any_number_of_peers_is_one_request():
    store, asked = Store(1000), []
    look = store.multi_get
    store.multi_get = lambda names: asked.append(len(names)) or look(names)
    peers_of(store, world_size=1000).silent()
    assert asked == [1000, 1000]


# --- a store that does not answer


def test_a_store_that_is_lost_is_asked_no_more():
    asked = []

    def fail(*question):
        asked.append(question)
        raise RuntimeError("Connection reset by peer")

    store = Store()
    store.set = store.multi_get = fail
    peers = peers_of(store)
    peers.beat()
    peers.beat()
    assert (peers.silent(), peers.states(), len(asked)) == ([], "", 1)


def test_a_store_that_is_late_is_asked_by_one_thread_until_it_answers(monkeypatch):
    monkeypatch.setattr(module, "STORE_S", 0.05)
    store, asked, is_well = Store(), [], threading.Event()
    store.set = lambda *question: asked.append(question) or is_well.wait()
    peers = peers_of(store)
    for _ in range(5):
        peers.beat()
    late = len(asked)
    is_well.set()
    peers._unanswered.result(10)
    peers.beat()
    assert (late, len(asked)) == (1, 2)


@pytest.mark.parametrize("answer", [
    lambda: threading.Event().wait(), lambda: (_ for _ in ()).throw(RuntimeError("wait timeout after 2000ms"))],
    ids=["nothing, ever", "an error"])
def test_without_the_store_the_loss_of_peers_is_reported_all_the_same(monkeypatch, answer):
    monkeypatch.setattr(module, "STORE_S", 0.05)
    store = Store()
    store.set = store.multi_get = lambda *question: answer()
    cause = peers_of(store).cause_of(RuntimeError("Connection closed by peer"))
    assert str(cause) == "rank 0 on host lost its peers (Connection closed by peer); the same command continues the run"


# --- an error


def cause(error, store):
    """What becomes of it: kind, message, code; and what was written of it."""
    store.values["left/0"] = "null"
    found = peers_of(store).cause_of(error)
    return type(found), str(found), getattr(found, "code", None), json.loads(store.values["left/0"])


@pytest.mark.parametrize("rank, error, left", [
    ("0", UserError("no such file", Exit.NO_INPUT), [66, "no such file", True]),
    ("1", UserError("no such file", Exit.NO_INPUT), [66, "no such file", False]),  # rank 0 prints it
    ("0", KeyError("a bug"), [70, "'a bug'", True])])
def test_an_error_is_passed_on_to_the_peers_and_raised_as_it_is(monkeypatch, rank, error, left):
    monkeypatch.setenv("RANK", rank)
    store = Store()
    assert peers_of(store).cause_of(error) is error
    assert json.loads(store.values["left/0"]) == left


def test_what_ended_a_peer_takes_the_place_of_having_lost_it():
    store = Store()
    store.left(2, 65, "cannot read a.png", True)
    assert cause(RuntimeError("Connection closed by peer"), store) == (
        PeerError, "rank 2: cannot read a.png", Exit.BAD_DATA, None)
    assert cause(UserError("no such file", Exit.NO_INPUT), store)[:3] == (UserError, "no such file", Exit.NO_INPUT)


def test_a_lost_peer_that_wrote_nothing_is_named_if_it_is_silent():
    assert cause(RuntimeError("Connection closed by peer"), Store(living=(1,))) == (
        RankError, "rank 0 on host lost its peers (Connection closed by peer); the same command continues the run;"
        " no heartbeat from rank 2",
        Exit.LOST_PEERS, None)


# --- a signal, and nothing to save

STOPPED = "stopped (SIGTERM); there was nothing to save"
ALONE = "stopped (SIGUSR1 to rank 1); there was nothing to save"
LOST = "rank 0 lost its peers; no heartbeat from rank 1; the same command continues the run"
SECOND = "rank 1: second Ctrl-C"


@pytest.mark.parametrize("living, left, expected", [
    ((1, 2), (), Ending(STOPPED, 75)),
    ((2,), (), Ending(LOST, 76)),
    ((2,), (1, 65, "cannot read a.png", True), Ending("rank 1: cannot read a.png", 65, False, True)),
    ((2,), (1, 66, "no file w.pth", False), Ending("rank 1: no file w.pth", 66, True, False)),  # rank 1 did not print
    ((), (1, 65, "cannot read a.png", True), Ending("rank 1: cannot read a.png", 65, False, True)),  # 2 is silent, too
    ((2,), (1, 75, STOPPED.replace("TERM", "INT"), False), Ending(STOPPED, 75)),
    ((2,), (1, 75, ALONE, False), Ending(ALONE, 75)),
    ((), (2, 75, STOPPED, False), Ending(LOST, 76)),  # 1 is silent
    ((2,), (1, 130, SECOND, True), Ending(f"rank 1: {SECOND}", 130, False, True))])
def test_torchruns_sigterm_has_the_code_of_what_became_of_the_peers(living, left, expected):
    store = Store(living=living)
    if left:
        store.left(*left)
    assert peers_of(store).ending("SIGTERM", may_be_for_a_peer=True) == expected


@pytest.mark.parametrize("living, left, expected", [
    ((0, 2), (), Ending(STOPPED, 75, False)), ((0, 2), (2, 75, ALONE, False), Ending(ALONE, 75, False)),
    ((0, 2), (2, 66, "no file w.pth", False), Ending("rank 2: no file w.pth", 66, False, False)),
    ((0,), (), Ending("rank 1 lost its peers; no heartbeat from rank 2; the same command continues the run", 76))])
def test_each_rank_prints_that_it_lost_a_peer_and_rank_0_alone_a_stop(living, left, expected):
    store = Store(living=living)
    if left:
        store.left(*left)
    assert peers_of(store, rank=1).ending("SIGTERM", may_be_for_a_peer=True) == expected


@pytest.mark.parametrize("reason", ["SIGTERM", "SIGUSR1", "SIGTERM to rank 0"])
def test_any_other_signal_is_a_stop_whatever_the_peers_do(reason, clock):
    began = clock.now
    ending = peers_of(Store()).ending(reason, may_be_for_a_peer=False)
    assert (ending, clock.now) == (Ending(f"stopped ({reason}); there was nothing to save", 75), began)
