"""Signals that ask this process to stop.

A Python handler runs in the main thread alone, and that may be stuck in a collective; and a signal to the whole process
group would kill the data loading processes first. So SIGTERM, SIGINT (Ctrl-C), SIGUSR1 and SIGHUP are blocked in every
thread and every child, and one thread fetches them. No torch at module level.
"""

import ctypes
import os
import re
import signal
import time
from contextlib import suppress
from typing import NamedTuple

from utils.errors import SIGNALS

_PR_SET_PDEATHSIG = 1  # prctl(2)


class Received(NamedTuple):
    """A signal that came."""

    name: str
    reason: str  # to stop; names the rank if the signal was sent to it alone
    is_from_torchrun: bool
    is_second_interrupt: bool  # a second Ctrl-C


class Signals:
    """Whether this process wants to stop, and why. torchrun: its process id, if it is the parent."""

    def __init__(self, rank: int, torchrun: int | None):
        self.reason: str | None = None  # to stop
        self._rank, self._torchrun = rank, torchrun
        self._interrupts: set[bool] = set()  # for each Ctrl-C, whether torchrun passed it on
        self._began, self._stop_after_s = time.monotonic(), float("inf")
        self._numbers = {number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN}  # nohup

    def block(self) -> None:
        """Leave the signals to wait(). Before any other thread exists: threads and children inherit it."""
        signal.pthread_sigmask(signal.SIG_BLOCK, self._numbers)
        if self._torchrun:  # if it is killed, its workers stop as on a SIGTERM
            end_with_parent(signal.SIGTERM)
            if _is_orphan():  # it was killed before that call
                os.kill(os.getpid(), signal.SIGTERM)

    def wait(self) -> Received:
        """The next signal."""
        found = signal.sigwaitinfo(self._numbers)  # sigtimedwait returns garbage after a SIGCONT (Python 3.11)
        return self.receive(found.si_signo, found.si_pid)

    def receive(self, number: int, sender: int) -> Received:
        """Classify signal `number` from process `sender`; 0 is the kernel, when torchrun dies."""
        name, is_from_torchrun = signal.Signals(number).name, sender in (0, self._torchrun)
        # At a second Ctrl-C torchrun sends SIGTERM. Any other repeated SIGTERM is ignored: schedulers send it twice.
        is_second = bool(name == "SIGINT" and self._interrupts) or (
            name == "SIGTERM" and is_from_torchrun and self._torchrun is not None and True in self._interrupts)
        if name == "SIGINT":
            self._interrupts.add(is_from_torchrun)
        is_for_all = is_from_torchrun or not self._torchrun
        return Received(name, name if is_for_all else f"{name} to rank {self._rank}", is_from_torchrun, is_second)

    def accept(self, received: Received) -> None:
        """Want to stop. A signal of torchrun replaces an earlier reason."""
        if self.reason is None or received.is_from_torchrun or not self._torchrun:
            self.reason = received.reason

    def stop_after(self, seconds: float, from_now: bool = False) -> None:
        """Want to stop this long after the process began, or from now on."""
        self._stop_after_s = seconds + (time.monotonic() - self._began if from_now else 0)

    def wants_to_stop(self) -> bool:
        """Whether this process wants to stop: a signal came, or its time is over."""
        if self.reason is None and time.monotonic() - self._began > self._stop_after_s:
            self.reason = "--stop-after"
        return self.reason is not None


def _is_orphan() -> bool:
    """Whether process 1 has inherited this one; in a container torchrun may be process 1 itself."""
    if os.getppid() != 1:
        return False
    with suppress(OSError), open("/proc/1/cmdline", "rb") as file:  # proc(5), hidepid: /proc may lack others' processes
        return not re.search(rb"python|torch", file.read())
    return True


def end_with_parent(number: int) -> None:
    """Have the kernel send this process signal `number` when its parent, or the parent's thread that forked it, ends.

    Linux only.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number))


def end_with_torchrun() -> None:
    """End this process with its torchrun, however that ends. For a command that has no watchdog."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent(signal.SIGKILL)
        if _is_orphan():
            os.kill(os.getpid(), signal.SIGKILL)


def end_worker_with(parent: int, worker: int) -> None:
    """End this data loading process with its parent, which may have ended already. For a DataLoader's worker_init_fn.

    parent: a process id. worker: the number of this process.
    """
    end_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
