"""Peers: what the ranks of a run know of each other without a collective.

When one rank fails, the others merely lose a connection, or wait. So every rank writes a heartbeat, and the reason why
it ends, to the store that they met in; a rank that lost its peers reads it and reports the cause instead of the
consequence. No torch at module level.
"""

import json
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple

from utils.errors import Exit, PeerError, RankError, explain, is_shown_here, some

if TYPE_CHECKING:
    from torch.distributed import Store

BEAT_S = 0.5  # between two heartbeats
STORE_S = 2  # limit for an answer of the store, whose host may be gone
NOTHING = b"null"  # what is read before a rank writes: multi_get would wait for a key that does not exist


def prepare_store(store: "Store", world_size: int) -> None:
    """Create the keys that the ranks will write; on rank 0, before another rank may read them."""
    names = [f"{name}/{rank}" for name in ("alive", "left") for rank in range(world_size)]
    store.multi_set(names, [NOTHING.decode()] * len(names))


class Ending(NamedTuple):
    """How a process ends."""

    message: str
    code: int
    prints: bool = True  # this process prints the message
    is_shown: bool = False  # it has been printed, here or by a peer


class Peers:
    """The other ranks. state: returns what this rank is doing. store: None = there are no others."""

    def __init__(self, state: Callable[[], str], rank: int, world_size: int = 1, store: "Store | None" = None):
        self.rank = rank
        self._state, self._world_size, self._store, self._num_beats = state, world_size, store, 0
        self._unanswered: Future | None = None  # a question to the store that timed out

    def beat(self) -> None:
        """Write a heartbeat."""
        self._num_beats += 1
        self._write("alive", {"beat": self._num_beats, "host": socket.gethostname(), "state": self._state()})

    def leave(self, code: int, message: str, is_shown: bool) -> None:
        """Write why this process ends."""
        self._write("left", [code, message, is_shown])

    def silent(self) -> list[int]:
        """The ranks without a heartbeat for four intervals; takes as long. Empty if the store is gone."""
        before = self._beats()
        for _ in range(4):
            time.sleep(BEAT_S)
            self.beat()  # it may be the watchdog itself that waits here
        after = self._beats()
        return [rank for rank in before if rank != self.rank and after.get(rank) == before[rank]]

    def states(self) -> str:
        """A line for each peer: what it is doing, and whether it is silent. Takes as long as silent()."""
        silent, alive = self.silent(), self._read("alive")
        return "\n".join(
            f"  rank {rank} on {alive[rank]['host']}: {alive[rank]['state']}"
            f"{', no heartbeat since then' if rank in silent else ''}" for rank in sorted(set(alive) - {self.rank}))

    def cause_of(self, error: Exception) -> Exception:
        """What to raise for `error`. If it is the loss of a peer: why that peer ended, or which one is silent."""
        message, code = explain(error)
        if code != Exit.LOST_PEERS:
            self.leave(code, message, is_shown_here(error))
            return error
        silent = self.silent()  # takes a while: the rank that failed first has written why by then
        for rank, (code, reason, is_shown) in self._read("left").items():
            return PeerError(f"rank {rank}: {reason}", code, is_shown)
        return RankError(message + _silence(silent), code)

    def ending(self, reason: str, may_be_for_a_peer: bool) -> Ending:
        """How this process ends on a signal while there is nothing to save.

        may_be_for_a_peer: torchrun sent it, which also ends the other ranks when one has died.
        """
        silent = self.silent() if may_be_for_a_peer else []
        left, message = self._read("left"), f"stopped ({reason}); there was nothing to save"
        for rank, (code, why, is_shown) in left.items():
            if code != Exit.STOPPED:
                return Ending(f"rank {rank}: {why}", code, not is_shown and self.rank == 0, is_shown)
            if " to rank " in why:  # then torchrun's signal is a consequence, and no node comes or goes
                message = why
        if silent := [rank for rank in silent if rank not in left]:
            return Ending(f"rank {self.rank} lost its peers{_silence(silent)}; the same command continues the run",
                          Exit.LOST_PEERS)
        return Ending(message, Exit.STOPPED, prints=self.rank == 0)

    def _beats(self) -> dict[int, int]:
        return {rank: alive["beat"] for rank, alive in self._read("alive").items()}

    def _write(self, name: str, value: Any) -> None:
        self._ask(lambda store: store.set(f"{name}/{self.rank}", json.dumps(value)))

    def _read(self, name: str) -> dict[int, Any]:
        """What each rank, this one included, wrote under that name; empty if the store does not answer."""
        names = [f"{name}/{rank}" for rank in range(self._world_size)]
        found = self._ask(lambda store: store.multi_get(names)) or ()  # one request for any number of ranks
        return {rank: json.loads(value) for rank, value in enumerate(found) if value != NOTHING}

    def _ask(self, question: Callable[["Store"], Any]) -> Any:
        """The store's answer; None if there is none in time: torchrun is gone, or its host, or stopped for a while."""
        store, answer = self._store, Future()
        if store is None or (self._unanswered and not self._unanswered.done()):
            return None

        def ask() -> None:
            try:
                answer.set_result(question(store))
            except BaseException as error:
                answer.set_exception(error)

        threading.Thread(target=ask, daemon=True).start()  # even check() and get() ignore the store's own timeout
        try:
            return answer.result(STORE_S)
        except RuntimeError:  # the connection is lost; what follows from it is decided elsewhere
            self._store = None
        except TimeoutError:
            self._unanswered = answer
        return None


def _silence(ranks: list[int]) -> str:
    return f"; no heartbeat from rank {some(map(str, ranks))}" if ranks else ""
