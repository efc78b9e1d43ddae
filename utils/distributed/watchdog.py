"""The watchdog of a process: it waits for signals, and for the main thread to get on, in threads of its own.

    watchdog = Watchdog()                                  # the first thing that a process does
    for batch in watchdog.watch(loader, "training", first_s=300, next_s=100): ...

SIGTERM, SIGINT (Ctrl-C), SIGUSR1 and SIGHUP are a wish to stop. They are blocked in every thread and every data loading process, so
that none of these ever meets one, and fetched here: the main thread may be stuck in a collective, where no handler would run.
A process that does not get on in time says where it is and where its peers are, and leaves with 76. No torch at module level.
"""

import ctypes
import faulthandler
import json
import os
import re
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from utils.errors import LAST_WORD, SIGNALS, Exit, PeerError, RankError, bounded, explain, is_shown_here, record_exit, say, some

BEAT_S = 0.5  # between two signs of life
STORE_S = 2  # for an answer of the store, whose host may be gone
MARGIN_S = 5  # so much later than a rank that gets no data do those give up that wait for it
NOTHING = b"null"  # what a rank said before it said anything: multi_get would wait for a key that is not there
_PR_SET_PDEATHSIG = 1  # prctl(2)


def prepare_store(store: Any, world_size: int) -> None:
    """Make room for what every rank will say; on rank 0, before another rank may ask."""
    names = [f"{name}/{rank}" for name in ("alive", "left") for rank in range(world_size)]
    store.multi_set(names, [NOTHING.decode()] * len(names))


class Watchdog:
    """See above. Its public attributes are set by the main thread."""

    def __init__(self) -> None:
        self.is_stoppable = True  # nothing would be lost: a signal ends the process at once. False = it sets `reason`
        self.at_end: Callable[[str, int, str], None] = lambda state, code, message: None  # told before the process is ended from here
        self.write_flight_record: Callable[[], str] = lambda: ""  # returns the file's name, if there is one
        self.where: Callable[[], str] = lambda: "starting"
        self.reason: str | None = None  # why this process wants to stop
        self._received: set[tuple[str, bool]] = set()  # names of signals, and whether torchrun passed them on
        self._doing, self._detail, self._limit_s, self._deadline = "", lambda: "", float("inf"), float("inf")
        self._began, self._stop_after_s = time.monotonic(), float("inf")
        self._rank, self._world_size, self._store, self._beat = int(os.environ.get("RANK", 0)), 1, None, 0
        self._unanswered: Future | None = None  # what the store was asked in vain
        # torchrun kills its workers 30 s (or so many) after it has told them to end; a process that is stuck says where before that.
        grace_s = float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 30))
        self._drain_s, self._is_draining, self._drains = max(grace_s / 2, grace_s - 5), False, True
        self._signals = {number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN}  # nohup
        signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)
        faulthandler.enable()  # a crash in C shows its stack
        self._torchrun = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        if self._torchrun:  # it may be killed: its workers stop then, as on a SIGTERM
            end_with_parent(signal.SIGTERM)
            if _is_orphan():  # it was killed before that
                os.kill(os.getpid(), signal.SIGTERM)
        for work in (self._listen, self._watch):
            threading.Thread(target=_for_ever, args=(work,), name="watchdog", daemon=True).start()

    def stop_after(self, seconds: float) -> None:
        """Want to stop so many seconds after the process began."""
        self._stop_after_s = seconds

    def wants_to_stop(self) -> bool:
        """Whether this process wants to stop: a signal came, or its time is over."""
        if self.reason is None and time.monotonic() - self._began > self._stop_after_s:
            self.reason = "--stop-after"
        return self.reason is not None

    def meet(self, store: Any, rank: int, world_size: int) -> None:
        """Tell the peers, through `store` (see prepare_store), what this process is doing; from now on."""
        self._rank, self._world_size, self._store = rank, world_size, store.clone()  # the caller's may be waiting for something

    def enter(self, doing: str, within_s: float, detail: Callable[[], str] = lambda: "", drains: bool = True) -> None:
        """The main thread got on; the next call will come within so many seconds. detail: more words on what it does.

        drains: False = once torchrun has told this process to end, it may still take as long (a save; torchrun may be patient).
        """
        self._doing, self._detail, self._limit_s, self._drains = doing, detail, within_s, drains
        if self._is_draining and self._drains:
            self._limit_s = min(self._limit_s, self._drain_s)
        self._deadline = time.monotonic() + self._limit_s

    def watch(self, items: Iterable[Any], doing: str, first_s: float, next_s: float, detail: Callable[[], str]) -> Iterator[Any]:
        """The items. Each may take so many seconds to come, and so many to be worked on. detail: what is being loaded."""
        iterator, limit_s = iter(items), first_s
        while True:
            self.enter(f"{doing}, waiting for data", limit_s, detail)
            try:
                item = next(iterator, None)
            except RuntimeError as error:  # a data loading process was killed, say
                error.add_note(detail())
                raise
            if item is None:
                return
            self.enter(doing, limit_s + MARGIN_S)
            yield item
            limit_s = next_s

    @contextmanager
    def telling_peers(self) -> Iterator[None]:
        """What ends this process is told to the peers; what ended a peer takes the place of having lost it."""
        try:
            yield
        except Exception as error:
            message, code = explain(error)
            if code != Exit.LOST_PEERS:
                self._say(f"left/{self._rank}", [code, message, is_shown_here(error)])
                raise
            silent = self.silent_peers()  # takes a while: the one that failed first has said so by then, and is the one that is reported
            for rank, (code, told, is_shown) in self._said("left").items():
                raise PeerError(f"rank {rank}: {told}", code, is_shown) from error
            raise RankError(message + _silence(silent) + self._flight_record(), code) from error

    def silent_peers(self) -> list[int]:
        """The ranks that show no sign of life for four beats; takes as long. Empty where the store is gone."""
        before = self._beats()
        for _ in range(4):
            time.sleep(BEAT_S)
            self._tell()  # it may be the watchdog itself that waits here
        after = self._beats()
        return [rank for rank in before if rank != self._rank and after.get(rank) == before[rank]]

    def _listen(self) -> None:
        found = signal.sigwaitinfo(self._signals)  # sigtimedwait gives garbage after a SIGCONT (Python 3.11)
        name, is_from_torchrun = signal.Signals(found.si_signo).name, found.si_pid in (0, self._torchrun)  # 0: the kernel, at its death
        # At a second Ctrl-C torchrun sends a SIGTERM. Else a repeated SIGTERM is ignored: schedulers send it twice.
        interrupts = {by_torchrun for received, by_torchrun in self._received if received == "SIGINT"}
        if (interrupts and name == "SIGINT") or (True in interrupts and name == "SIGTERM" and is_from_torchrun and self._torchrun):
            self._leave("failed", f"rank {self._rank}: a second Ctrl-C, leaving without saving", 130)
        self._received.add((name, is_from_torchrun))
        reason = name if is_from_torchrun or not self._torchrun else f"{name} to rank {self._rank}"
        if self.is_stoppable:
            self._stop_at_once(reason, name == "SIGTERM" and is_from_torchrun)
        if self.reason is None or is_from_torchrun or not self._torchrun:
            self.reason = reason
        if self._torchrun and is_from_torchrun:
            self._is_draining = True
            if self._drains:
                self._limit_s = min(self._limit_s, self._drain_s)
                self._deadline = min(self._deadline, time.monotonic() + self._drain_s)

    def _stop_at_once(self, reason: str, may_be_for_a_peer: bool) -> None:
        """End the process, unless the training began while the peers were listened to."""
        silent = self.silent_peers() if may_be_for_a_peer else []  # torchrun ends the others, too, when one has died
        left, message = self._said("left"), f"stopped ({reason}); there was nothing to save"
        for rank, (code, told, is_shown) in left.items():
            if code != Exit.STOPPED:
                shown = "" if is_shown or self._rank else None
                self._leave("failed", f"rank {rank}: {told}", code, shown, is_shown)
            if " to rank " in told:  # then torchrun's signal is but a consequence, and no sign of nodes that come or go
                message = told
        if silent := [rank for rank in silent if rank not in left]:
            self._leave("failed", f"rank {self._rank} lost its peers{_silence(silent)}", Exit.LOST_PEERS)
        if not self.is_stoppable:
            return
        self._leave("stopped", message, Exit.STOPPED, shown=None if self._rank == 0 else "")

    def _watch(self) -> None:
        time.sleep(BEAT_S)
        if time.monotonic() > self._deadline:
            self._time_out()
        self._tell()

    def _time_out(self) -> None:
        message = (f"rank {self._rank} on {socket.gethostname()} does not get on for {self._limit_s:g} s: {self._state()}"
                   f" (--start-timeout, --step-timeout and --section-timeout are the limits){self._flight_record()}")
        bounded(lambda: say(f"train.py: {message}\n{_stacks()}"))
        silent, told = self.silent_peers(), self._said("alive")
        states = [f"  rank {rank} on {told[rank]['host']}: {told[rank]['state']}{', silent since then' if rank in silent else ''}"
                  for rank in sorted(set(told) - {self._rank})]
        self._leave("failed", message, Exit.LOST_PEERS, shown="\n".join(states), is_shown=True)

    def _leave(self, state: str, message: str, code: int, shown: str | None = None, is_shown: bool = False) -> NoReturn:
        """End the process. shown: what is printed instead of the message. is_shown: the message has been printed."""
        LAST_WORD.acquire()
        self._say(f"left/{self._rank}", [code, message, is_shown or shown is None])
        record_exit(code)
        if text := f"train.py: {message}" if shown is None else shown:
            bounded(lambda: say(text))

        def end() -> None:
            with suppress(OSError):
                self.at_end(state, code, message)

        bounded(end)
        os._exit(code)

    def _flight_record(self) -> str:
        """Write it while there is time, before the process leaves with 76; words for the message."""
        found: list[str] = []

        def write() -> None:
            with suppress(OSError):
                found.append(self.write_flight_record())

        bounded(write)
        return "".join(f"; NCCL's flight record: {path}" for path in found if path)

    def _state(self) -> str:
        return f"{self.where()}, {self._doing}{self._detail()}"

    def _tell(self) -> None:
        self._beat += 1
        self._say(f"alive/{self._rank}", {"beat": self._beat, "host": socket.gethostname(), "state": self._state()})

    def _say(self, name: str, value: Any) -> None:
        self._ask(lambda store: store.set(name, json.dumps(value)))

    def _said(self, name: str) -> dict[int, Any]:
        """What the ranks, this one included, said under that name; nothing where the store does not answer."""
        names = [f"{name}/{rank}" for rank in range(self._world_size)]
        found = self._ask(lambda store: store.multi_get(names)) or ()  # one question, however many ranks ask it at once
        return {rank: json.loads(value) for rank, value in enumerate(found) if value != NOTHING}

    def _ask(self, question: Callable[[Any], Any]) -> Any:
        """The store's answer; None where it gives none in time: torchrun is gone, or its host, or stopped for a while."""
        store, answer = self._store, Future()
        if store is None or (self._unanswered and not self._unanswered.done()):
            return None

        def ask() -> None:
            try:
                answer.set_result(question(store))
            except BaseException as error:
                answer.set_exception(error)

        threading.Thread(target=ask, daemon=True).start()  # not even check() and get() keep to the store's own time-out
        try:
            return answer.result(STORE_S)
        except RuntimeError:  # the connection is lost; what to do is not decided here
            self._store = None
        except TimeoutError:
            self._unanswered = answer
        return None

    def _beats(self) -> dict[int, int]:
        return {rank: told["beat"] for rank, told in self._said("alive").items()}


def _for_ever(work: Callable[[], None]) -> NoReturn:
    try:
        while True:
            work()
    except BaseException:  # a process that nobody watches could be stopped by nothing but a SIGKILL
        record_exit(Exit.INTERNAL)
        text = traceback.format_exc()
        bounded(lambda: say(text))
        os._exit(Exit.INTERNAL)


def _stacks() -> str:
    """Where every thread is. Not straight to a console: faulthandler would hold the interpreter while that takes nothing."""
    file = os.memfd_create("stacks")
    faulthandler.dump_traceback(file, all_threads=True)
    return os.pread(file, 1 << 20, 0).decode(errors="replace")


def _silence(ranks: list[int]) -> str:
    return f"; rank {some(map(str, ranks))} shows no sign of life" if ranks else ""


def _is_orphan() -> bool:
    """Whether process 1 has inherited this one; in a container torchrun may be process 1 itself."""
    with open("/proc/1/cmdline", "rb") as file:
        return os.getppid() == 1 and not re.search(rb"python|torch", file.read())


def end_with_parent(number: int) -> None:
    """Have the kernel send this process signal `number` when its parent dies (Linux), or the thread of it that began this one."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number))
