"""The watchdog of a process: it ends a process that is stuck, and says where it was stuck.

One rank that hangs makes all the others hang, and none of them can say why: their main threads wait in a collective,
where neither a signal handler nor a timeout of Python's runs. So two threads of their own wait for signals and for
missed deadlines, ask the peers, and end the process: 75 on a signal with nothing to save, 76 after a missed deadline.

    watchdog = Watchdog()                                  # the first thing that a process does
    for batch in watchdog.watch(loader, "training", first_s=300, next_s=100, detail=...): ...

No torch at module level.
"""

import faulthandler
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

from utils.distributed import peers
from utils.distributed.deadlines import Deadlines
from utils.distributed.peers import Ending, Peers
from utils.distributed.signals import Signals
from utils.errors import LAST_WORD, Exit, bounded, record_exit, say

if TYPE_CHECKING:
    from torch.distributed import Store

# CPython 3.11 may hang in a fork (3 of 1,188 starts of data loading processes did)
FORKS = "; Python 3.11 may hang as a data loading process begins: try 3.12" * (sys.version_info < (3, 12))


class Watchdog:
    """Signals, deadlines and peers of this process. Its public methods are called by the main thread."""

    def __init__(self, program: str = "train.py") -> None:
        self._program = program  # whose words these are
        rank = int(os.environ.get("RANK", 0))
        self._torchrun = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        # torchrun kills its workers 30 s, or this time, after SIGTERM; one that is stuck says where before that.
        grace_s = float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 30))
        self._signals, self._deadlines = Signals(rank, self._torchrun), Deadlines(max(grace_s / 2, grace_s - 5))
        self._peers = Peers(self._state, rank)
        self._has_work_to_save = False
        self._where: Callable[[], str] = lambda: "starting"
        self._write_status: Callable[[str, int, str], None] = lambda state, code, message: None
        self.enter, self.watch = self._deadlines.enter, self._deadlines.watch
        self.stop_after, self.wants_to_stop = self._signals.stop_after, self._signals.wants_to_stop
        self._signals.block()
        faulthandler.enable()  # a crash in C prints its stack
        for work in (self._listen, self._look):
            threading.Thread(target=_for_ever, args=(work,), name="watchdog", daemon=True).start()

    @property
    def reason(self) -> str | None:
        """Why this process wants to stop."""
        return self._signals.reason

    def meet(self, store: "Store", rank: int, world_size: int) -> None:
        """From now on exchange heartbeats with the peers through `store` (see prepare_store)."""
        self._peers = Peers(self._state, rank, world_size, store.clone())  # the caller's may be busy waiting

    @contextmanager
    def watch_run(self, where: Callable[[], str], write_status: Callable[[str, int, str], None]) -> Iterator[None]:
        """While the run is open. An error is passed on to the peers; the loss of a peer becomes what ended that peer.

        where: the position, for messages. write_status(state, code, message): called before the watchdog ends the
        process.
        """
        self._where, self._write_status = where, write_status
        try:
            yield
        except Exception as error:
            if (cause := self._peers.cause_of(error)) is error:
                raise
            raise cause from error

    def save_on_stop(self) -> None:
        """From now on a signal sets `reason`, and the main thread saves; before, it ends the process at once."""
        self._has_work_to_save = True

    def _listen(self) -> None:
        received = self._signals.wait()
        if received.is_second_interrupt:
            self._leave(Ending(f"rank {self._peers.rank}: second Ctrl-C, exiting without saving", 130))
        if not self._has_work_to_save:
            ending = self._peers.ending(received.reason, received.name == "SIGTERM" and received.is_from_torchrun)
            if ending.code != Exit.STOPPED or not self._has_work_to_save:  # training may have begun meanwhile
                self._leave(ending)
        if self._torchrun and received.is_from_torchrun:
            self._deadlines.drain()
        self._signals.accept(received)

    def _look(self) -> None:
        time.sleep(peers.BEAT_S)
        if self._deadlines.is_missed():
            self._time_out()
        self._peers.beat()

    def _time_out(self) -> None:
        message = (f"rank {self._peers.rank} on {socket.gethostname()} made no progress for"
                   f" {self._deadlines.limit_s:g} s: {self._state()} (see --step-timeout{FORKS})")
        bounded(lambda: say(f"{self._program}: {message}\n{_stacks()}"))
        if states := self._peers.states():
            bounded(lambda: say(states))
        self._leave(Ending(message, Exit.LOST_PEERS, prints=False, is_shown=True))

    def _leave(self, ending: Ending) -> NoReturn:
        """End the process."""
        LAST_WORD.acquire()
        self._peers.leave(ending.code, ending.message, ending.prints or ending.is_shown)
        record_exit(ending.code)
        if ending.prints:
            bounded(lambda: say(f"{self._program}: {ending.message}"))
        state = "stopped" if ending.code == Exit.STOPPED else "failed"
        bounded(lambda: self._write_status(state, ending.code, ending.message))
        os._exit(ending.code)

    def _state(self) -> str:
        return f"{self._where()}, {self._deadlines}"


def _for_ever(work: Callable[[], None]) -> NoReturn:
    try:
        while True:
            work()
    except BaseException:  # only SIGKILL could stop a process whose watchdog has died
        record_exit(Exit.INTERNAL)
        text = traceback.format_exc()
        bounded(lambda: say(text))
        os._exit(Exit.INTERNAL)


def _stacks() -> str:
    """The stack of every thread. Not written straight to the console: if that blocks, faulthandler holds the GIL."""
    file = os.memfd_create("stacks")
    faulthandler.dump_traceback(file, all_threads=True)
    return os.pread(file, 1 << 20, 0).decode(errors="replace")
