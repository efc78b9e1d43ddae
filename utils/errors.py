"""Exit codes, and the errors that carry them to the shell.

The codes are those of sysexits.h where it has one, so that schedulers and scripts can act on them.
"""

import errno
import os
import re
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from enum import IntEnum
from typing import NoReturn, TextIO

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)  # a wish to stop: exit code 75
LAST_WORDS_S = 5  # for a status file that cannot be written, a console that nobody reads


class Exit(IntEnum):
    """Exit codes of train.py; a script outside the project may depend on each."""

    DONE = 0
    USAGE = 64
    BAD_DATA = 65
    NO_INPUT = 66
    INTERNAL = 70
    HARDWARE = 71  # a device failed, or the system killed a part of the run
    CANNOT_CREATE = 73
    IO = 74
    STOPPED = 75  # stopped and saved: the same command continues
    LOST_PEERS = 76
    OTHER_RUN = 78  # the run directory belongs to other settings or is in use
    DIVERGED = 80
    NO_CHECKPOINT = 82  # checkpoints exist, and none loads


class UserError(ValueError):
    """Something the user can mend: what was found, the rule, a way out. Rank 0 prints it.

    Raised alike on every rank (World.everywhere does it).
    """

    def __init__(self, message: str, code: Exit = Exit.USAGE):
        super().__init__(message)
        self.code = code


class RankError(UserError):
    """A UserError that only this rank knows of (an unreadable sample, say), so this rank prints it."""


class PeerError(UserError):
    """An error of another rank. is_shown: that rank prints it; else rank 0 does."""

    def __init__(self, message: str, code: Exit, is_shown: bool = True):
        super().__init__(message, code)
        self.is_shown = is_shown


LAST_WORD = threading.Lock()  # taken, for good, by the thread that ends the process: it alone prints why


def is_shown_here(error: Exception) -> bool:
    """Whether this rank prints the error that ends it, so that one rank does."""
    if isinstance(error, RankError) or not isinstance(error, UserError):
        return True
    return os.environ.get("RANK", "0") == "0" and not (isinstance(error, PeerError) and error.is_shown)


def say(text: str, stream: TextIO | None = None) -> None:
    """Print a line, by default to standard error. A terminal that was closed, or a pipe, must end no run."""
    with suppress(OSError):
        (stream or sys.stderr).write(f"{text}\n")  # in one write: other ranks print too
        (stream or sys.stderr).flush()


def bounded(work: Callable[[], None]) -> None:
    """Do last work, or most of it: a disk that hangs, or a console that nobody reads any more, must not keep the process."""
    last = threading.Thread(target=work, daemon=True)
    last.start()
    last.join(LAST_WORDS_S)


def some(names: Iterable[str]) -> str:
    """A few of the names, for a message: "a, b, c, d, e and 7 more"."""
    names = list(names)
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") or "nothing"


# What no program can cause: the strings of cudaErrorDevicesUnavailable, ECCUncorrectable, NvlinkUncorrectable,
# Contained and HardwareStackError (libcudart 13; HIP has the same), and the driver's own words.
_BROKEN = re.compile(
    r"device\(s\) is/are busy or unavailable|uncorrectable ECC error|uncorrectable NVLink error"
    r"|over nvlink or a hardware error|hardware stack error|GPU is lost|fallen off the bus", re.I)
_LOST = r"Connection (closed|reset|refused) by \w+|Timed out waiting \w+|monitoredBarrier[^.\n]*"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device had no memory left: as torch says it, the driver, cuBLAS, cuDNN, NCCL. Torch is not imported here."""
    is_torchs = "OutOfMemoryError" in {kind.__name__ for kind in type(error).__mro__}
    return is_torchs or bool(re.search(r"error: out of memory|_ALLOC_FAILED|unable to find an engine|to \w+ calloc", str(error)))


def explain(
    error: Exception, out_of_memory: str = "use a smaller --micro-batch-size (the global batch stays) or --eval-batch-size",
    killed: str = "the same command continues; fewer --workers need less memory"
) -> tuple[str, Exit]:
    """An error in words for the user, and its exit code; INTERNAL for what should not happen.

    out_of_memory, killed: the ways out where memory ran out, and where a data loading process was killed.
    """
    names, text = {kind.__name__ for kind in type(error).__mro__}, str(error)
    first_line = next(iter(text.splitlines()), type(error).__name__)
    rank, host = os.environ.get("RANK", 0), socket.gethostname()
    if isinstance(error, UserError):
        return text, error.code
    if "DataLoader worker" in text and (found := re.search(r"pid(?:\(s\))? ([\d, ]+)", text)):
        is_full = "Bus error" in f"{text}{error.__cause__}"
        reason = "/dev/shm is full: docker run --ipc=host, or --shm-size" if is_full else "out of memory?"
        notes, code = "".join(getattr(error, "__notes__", [])), Exit.IO if is_full else Exit.HARDWARE
        return (f"a data loading process (pid {found[1].strip()}) of rank {rank} was killed ({reason});"
                f" {killed}{notes}"), code
    if "RuntimeError" in names and (found := _BROKEN.search(text)):  # torch.AcceleratorError, or one of NCCL
        line = next(line for line in text.splitlines() if found[0] in line).strip()
        return (f"device {os.environ.get('LOCAL_RANK', 0)} of {host} (rank {rank}) failed ({line});"
                " the same command continues, on a device that works"), Exit.HARDWARE
    if found := re.match(r"(\S+) does not have a deterministic implementation", text):
        return f"--deterministic: {found[1]} has no deterministic implementation; leave it out, or use another --model", Exit.USAGE
    if is_out_of_memory(error) or "can't allocate memory" in text or isinstance(error, MemoryError):
        return f"out of memory: {out_of_memory} ({first_line})", Exit.USAGE
    if "NCCL error" in text:
        found = re.search(r"Last error:\s*(.+)", text) or re.search(r"(nccl\w+: .+)", text)
        line = found[1].strip() if found else first_line
        if re.search("Duplicate GPU detected|no socket interface found", line):
            return (f"rank {rank} on {host}: NCCL: {line}: each process needs a GPU of its own that it can see (and"
                    " --nproc-per-node at most as many), and NCCL_SOCKET_IFNAME must name an interface that this host has"), Exit.USAGE
        return f"rank {rank} on {host} lost its peers (NCCL: {line})", Exit.LOST_PEERS
    is_of_backend = "RuntimeError" in names and re.search(rf"{_LOST}|gloo|nccl", text, re.I)
    if "DistError" in names or is_of_backend:
        found = re.search(_LOST, text, re.I)
        return f"rank {rank} on {host} lost its peers ({found[0] if found else first_line[:100]})", Exit.LOST_PEERS
    if isinstance(error, OSError):
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return f"{type(error).__name__}: {text}{'; make room, and the same command continues' if is_full else ''}", Exit.IO
    return text, Exit.INTERNAL


def begin_start() -> None:
    """Forget how torchrun's start before this one ended; on the first process of a node, as the first thing."""
    path = os.environ.get("LOCKSTEP_EXIT_FILE")
    if path and os.environ.get("LOCAL_RANK", "0") == "0":
        with suppress(OSError):
            os.unlink(path)


def exit_after(work: Callable[[], int]) -> NoReturn:
    """Run `work` and leave with its exit code; an error gets one message over all ranks, and the right code."""
    try:
        code, error = work(), None
    except Exception as caught:
        error = caught
        message, code = explain(error)
    LAST_WORD.acquire()
    record_exit(code)
    if error is not None and is_shown_here(error):
        text = "".join(traceback.format_exception(error)) if code == Exit.INTERNAL else f"train.py: {message}"
        bounded(lambda: say(text))
    bounded(_flush)
    # Not sys.exit: while the interpreter is taken down, gloo's threads abort the process now and then (torch 2.15: "terminate called
    # without an active exception", 1 of 10 starts of 4 processes), and after an error they may wait for peers that are gone.
    os._exit(int(code))


def _flush() -> None:
    with suppress(OSError):
        sys.stdout.flush()


def record_exit(code: int) -> None:
    """Tell launch.sh the code of the first process of this node to end abnormally (torchrun makes every failure 1)."""
    path = os.environ.get("LOCKSTEP_EXIT_FILE")
    if path and code:
        with suppress(OSError), open(path, "x") as file:  # another process of this node may have been first
            file.write(f"{int(code)}\n")
