"""The watchdog of a process: one thread that waits for signals, and for the main thread to get on.

    watchdog = Watchdog()                                  # the first thing that a process does
    for batch in watchdog.each(loader, "training", first_s=300, next_s=100): ...

SIGTERM, SIGINT (Ctrl-C), SIGUSR1 and SIGHUP are a wish to stop. They are blocked in every thread and every data loading process, so
that none of these ever meets one, and fetched here: the main thread may be stuck in a collective, where no handler would run.
A process that does not get on in time says where it is and where its peers are, and leaves with 76. No torch at module level.
"""

import ctypes
import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

from utils.errors import Exit, record_exit

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
BEAT_S = 0.5  # between two signs of life
_PR_SET_PDEATHSIG = 1  # prctl(2)


class Watchdog:
    """See above. Its public attributes are set by the main thread."""

    def __init__(self) -> None:
        self.is_stoppable = True  # nothing would be lost: a signal ends the process at once. False = it sets `reason`
        self.at_end: Callable[[str, Exit, str], None] = lambda state, code, message: None  # told before the process is ended from here
        self.where: Callable[[], str] = lambda: "starting"
        self.reason: str | None = None  # why this process wants to stop
        self._doing, self._detail, self._deadline = "", lambda: "", float("inf")
        self._began, self._stop_after_s = time.monotonic(), float("inf")
        self._rank, self._world_size, self._store, self._beat = int(os.environ.get("RANK", 0)), 1, None, 0
        # torchrun kills its workers 30 s (or so many) after a SIGTERM; a process that is stuck says where before that.
        self._drain_s = float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 30)) - 5
        self._signals = {number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN}  # nohup
        signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)
        faulthandler.enable()  # a crash in C shows its stack
        if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun, which may be killed: its workers stop then, as on a SIGTERM
            end_with_parent(signal.SIGTERM)
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def stop_after(self, seconds: float) -> None:
        """Want to stop so many seconds after the process began."""
        self._stop_after_s = seconds

    def wants_to_stop(self) -> bool:
        """Whether this process wants to stop: a signal came, or its time is over."""
        if self.reason is None and time.monotonic() - self._began > self._stop_after_s:
            self.reason = "--stop-after"
        return self.reason is not None

    def meet(self, store: Any, rank: int, world_size: int) -> None:
        """Tell the peers, through `store`, what this process is doing; from now on."""
        self._rank, self._world_size, self._store = rank, world_size, store.clone()  # a store is not for two threads

    def expect(self, doing: str, within_s: float, detail: Callable[[], str] = lambda: "") -> None:
        """The main thread got on; the next call will come within so many seconds. detail: more words on what it does."""
        self._doing, self._detail, self._deadline = doing, detail, time.monotonic() + within_s

    def each(self, items: Iterable[Any], doing: str, first_s: float, next_s: float, detail: Callable[[], str]) -> Iterator[Any]:
        """The items. Each may take so many seconds to come, and so many to be worked on. detail: what is being loaded."""
        iterator, limit_s = iter(items), first_s
        while True:
            self.expect(f"{doing}, waiting for data", limit_s, detail)
            item = next(iterator, None)
            if item is None:
                return
            self.expect(doing, limit_s)
            yield item
            limit_s = next_s

    def silent_peers(self) -> list[int]:
        """The ranks that show no sign of life for four beats; takes as long. Empty where the store is gone."""
        before = self._beats()
        time.sleep(4 * BEAT_S)
        after = self._beats()
        return [rank for rank in before if rank != self._rank and after.get(rank) == before[rank]]

    def _watch(self) -> None:
        while True:
            found = signal.sigtimedwait(self._signals, BEAT_S)
            if found is not None:
                self._receive(signal.Signals(found.si_signo).name)
            elif time.monotonic() > self._deadline:
                self._time_out()
            self._tell()

    def _receive(self, name: str) -> None:
        if name == "SIGINT" and self.reason == "SIGINT":  # a repeated SIGTERM is ignored: schedulers send it twice
            self._leave(f"rank {self._rank}: a second Ctrl-C, leaving without saving", 130)
        self.reason = name
        if self.is_stoppable:
            message = f"stopped ({name}); there was nothing to save"
            self.at_end("stopped", Exit.STOPPED, message)
            self._leave(message if self._rank == 0 else "", Exit.STOPPED)
        if name == "SIGTERM" and self._world_size > 1:
            self._deadline = min(self._deadline, time.monotonic() + self._drain_s)

    def _time_out(self) -> None:
        message = f"rank {self._rank} on {socket.gethostname()} does not get on: {self._state()}"
        silent, told = self.silent_peers(), self._told()
        peers = [f"  rank {rank} on {told[rank]['host']}: {told[rank]['state']}{', silent since then' if rank in silent else ''}"
                 for rank in sorted(told) if rank != self._rank]
        self.at_end("failed", Exit.LOST_PEERS, message)
        faulthandler.dump_traceback(all_threads=True)
        self._leave("\n".join([message, *peers]), Exit.LOST_PEERS)

    def _leave(self, message: str, code: int) -> NoReturn:
        if message:
            print(f"train.py: {message}", file=sys.stderr, flush=True)
        record_exit(code)
        os._exit(code)

    def _state(self) -> str:
        return f"{self.where()}, {self._doing}{self._detail()}"

    def _tell(self) -> None:
        if self._store is None:
            return
        self._beat += 1
        told = json.dumps({"beat": self._beat, "host": socket.gethostname(), "state": self._state()})
        try:
            self._store.set(f"alive/{self._rank}", told)
        except RuntimeError:  # torchrun is gone, and the store with it: what to do is not for this thread to decide
            self._store = None

    def _told(self) -> dict[int, dict[str, Any]]:
        store, names = self._store, {rank: f"alive/{rank}" for rank in range(self._world_size)}
        try:
            return {rank: json.loads(store.get(name)) for rank, name in names.items() if store.check([name])} if store else {}
        except RuntimeError:
            return {}

    def _beats(self) -> dict[int, int]:
        return {rank: told["beat"] for rank, told in self._told().items()}


def end_with_parent(number: int) -> None:
    """Have the kernel send this process signal `number` when its parent dies (Linux)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number))
