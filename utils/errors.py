"""Exit codes, and the errors that carry them to the shell.

The codes are those of sysexits.h where it has one, so that schedulers and scripts can act on them.
"""

import errno
import io
import os
import re
import signal
import socket
import sys
import threading
import traceback
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable
from contextlib import suppress
from enum import IntEnum
from typing import NoReturn, TextIO

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)  # requests to stop: exit code 75
LAST_WORDS_S = 5  # limit for last work: a disk may hang, and a console may not be read


class Exit(IntEnum):
    """Exit codes of train.py; a script outside the project may depend on each."""

    DONE = 0
    USAGE = 64
    BAD_DATA = 65
    NO_INPUT = 66
    INTERNAL = 70
    HARDWARE = 71  # a device failed, a sum changed on its way, or the system killed a data loading process
    CANNOT_CREATE = 73
    IO = 74
    STOPPED = 75  # stopped and saved: the same command continues
    LOST_PEERS = 76
    OTHER_RUN = 78  # the run directory was created with different settings, is in use, or is another program's
    DIVERGED = 80
    NO_CHECKPOINT = 82  # checkpoints exist, but none loads
    DIFFERS = 83  # ask.verify: a run is not what its directory says


class UserError(ValueError):
    """An error that the user can correct: what was found, the rule, a way out. Rank 0 prints it.

    Raised alike on every rank (World.everywhere does it).
    """

    def __init__(self, message: str, code: Exit = Exit.USAGE):
        super().__init__(message)
        self.code = code


class RankError(UserError):
    """A UserError that only this rank has (an unreadable sample, say), so this rank prints it."""


class PeerError(UserError):
    """An error of another rank. is_shown: that rank prints it; otherwise rank 0 does."""

    def __init__(self, message: str, code: Exit, is_shown: bool = True):
        super().__init__(message, code)
        self.is_shown = is_shown


LAST_WORD = threading.Lock()  # taken for good by the thread that ends the process: it alone prints why


def is_shown_here(error: Exception) -> bool:
    """Whether this rank prints the error that ends it, so that one rank does."""
    if isinstance(error, RankError) or not isinstance(error, UserError):
        return True
    return os.environ.get("RANK", "0") == "0" and not (isinstance(error, PeerError) and error.is_shown)


def say(text: str, stream: TextIO | None = None) -> None:
    """Print a line, by default to standard error. A closed terminal or pipe must not end a run."""
    with suppress(OSError):
        (stream or sys.stderr).write(f"{text}\n")  # in one write: other ranks print too
        (stream or sys.stderr).flush()


def escape_what_the_console_lacks() -> None:
    """From here on a character that standard output's encoding does not have is printed as \\xe9; it is no error."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # standard error does so by itself


def bounded(work: Callable[[], None]) -> None:
    """Do last work, but only wait LAST_WORDS_S for it: a disk that hangs must not keep the process from ending.

    An OSError of `work` is ignored.
    """

    def quietly() -> None:
        with suppress(OSError):
            work()

    last = threading.Thread(target=quietly, daemon=True)
    last.start()
    last.join(LAST_WORDS_S)


def some(names: Iterable[str]) -> str:
    """A few of the names that are not empty, for a message: "a, b, c, d, e and 7 more"."""
    names = [*filter(None, names)]
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") or "nothing"


def counted(number: int, noun: str) -> str:
    """"1 step", "2 steps", "0 classes"."""
    ending = "es" if noun.endswith(("s", "x", "ch")) else "s"
    return f"{number} {noun}{'' if number == 1 else ending}"


# Errors that no program can cause: the strings of cudaErrorDevicesUnavailable, ECCUncorrectable, NvlinkUncorrectable,
# Contained and HardwareStackError (libcudart 13; HIP has the same), and the driver's own words.
_BROKEN = re.compile(
    r"device\(s\) is/are busy or unavailable|uncorrectable ECC error|uncorrectable NVLink error"
    r"|over nvlink or a hardware error|hardware stack error|GPU is lost|fallen off the bus", re.I)
_LOST = r"Connection (closed|reset|refused) by \w+|Timed out waiting \w+|monitoredBarrier[^.\n]*"


def rounded(value: float | None) -> str:
    """A figure for people: four decimals, six digits where it is large; None: of a record, where it was not finite."""
    return "not finite" if value is None else f"{value:.4f}" if abs(value) < 1e6 else f"{value:.6g}"


def first_line(error: BaseException) -> str:
    """The first line of a library's error, for a message; the error's name if it says nothing."""
    return next(iter(str(error).splitlines()), "")[:200] or type(error).__name__


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device had no memory left, in the words of torch, the driver, cuBLAS, cuDNN or NCCL. No torch here."""
    words = r"error: out of memory|_ALLOC_FAILED|unable to find an engine|to \w+ calloc"
    is_of_torch = "OutOfMemoryError" in {kind.__name__ for kind in type(error).__mro__}
    return is_of_torch or bool(re.search(words, str(error)))


def memory_words(error: BaseException) -> str:
    """The first line of an error that is_out_of_memory, and what else may have caused it."""
    is_cudnn = "unable to find an engine" in str(error)  # its words also where it cannot compute something at all
    return first_line(error) + "; or cuDNN cannot compute it in this --precision: try --precision fp32" * is_cudnn


def explain(error: Exception,
            out_of_memory: str = "use a smaller --micro-batch-size (the global batch stays) or --eval-batch-size",
            killed: str = "the same command continues the run; fewer --workers need less memory") -> tuple[str, Exit]:
    """The message and the exit code of an error; INTERNAL for one that should not happen.

    out_of_memory, killed: the ways out if memory ran out, and if a data loading process was killed.
    """
    names, text = {kind.__name__ for kind in type(error).__mro__}, str(error)
    rank, host = os.environ.get("RANK", 0), socket.gethostname()

    # the user's
    if isinstance(error, UserError):
        return text, error.code

    # the host's and the device's
    way_out = "/dev/shm is full: use docker run --ipc=host (or --shm-size), or fewer --workers"
    if "allocate shared memory(shm)" in text or "unable to resize file" in text:
        reason = "it is larger than ulimit -f allows; raise this limit" if "File too large" in text else way_out
        return f"a data loading process of rank {rank} on {host} has no room for a batch: {reason}", Exit.IO
    if "DataLoader worker" in text and (found := re.search(r"pid(?:\(s\))? ([\d, ]+)", text)):
        is_full = "Bus error" in f"{text}{error.__cause__}"
        reason = way_out if is_full else "probably out of memory"
        notes, code = "".join(getattr(error, "__notes__", [])), Exit.IO if is_full else Exit.HARDWARE
        return f"data loading process {found[1].strip()} of rank {rank} was killed ({reason}); {killed}{notes}", code
    if "RuntimeError" in names and (found := _BROKEN.search(text)):  # torch.AcceleratorError, or one of NCCL
        line = next(line for line in text.splitlines() if found[0] in line).strip()
        return (f"device {os.environ.get('LOCAL_RANK', 0)} of {host} (rank {rank}) failed ({line});"
                " the same command continues the run on a device that works"), Exit.HARDWARE
    if found := re.match(r"(\S+) does not have a deterministic implementation", text):
        return (f"--deterministic: {found[1]} has no deterministic implementation; leave --deterministic out, or use"
                " another --model"), Exit.USAGE
    if is_out_of_memory(error) or "can't allocate memory" in text or isinstance(error, MemoryError):
        return f"out of memory: {out_of_memory} (rank {rank} on {host}: {memory_words(error)})", Exit.USAGE

    # the peers'
    if "NCCL error" in text:
        found = re.search(r"Last error:\s*(.+)", text) or re.search(r"(nccl\w+: .+)", text)
        line = found[1].strip() if found else text.splitlines()[0]
        if re.search("Duplicate GPU detected|no socket interface found", line):
            return (f"rank {rank} on {host}: NCCL: {line}: each process needs a GPU of its own (--nproc-per-node must"
                    " not exceed the number of visible GPUs), and NCCL_SOCKET_IFNAME must name an interface of this"
                    " host"), Exit.USAGE
        return f"rank {rank} on {host} lost its peers (NCCL: {line})", Exit.LOST_PEERS
    is_of_backend = "RuntimeError" in names and not text.startswith("Caught ") and re.search(  # ... in a data loader
        rf"{_LOST}|\b(ProcessGroup)?(gloo\b|nccl)", text, re.I)
    if "DistError" in names or is_of_backend:
        found = re.search(_LOST, text, re.I)
        reason = found[0] if found else first_line(error)[:100]
        return f"rank {rank} on {host} lost its peers ({reason}); the same command continues the run", Exit.LOST_PEERS

    # the disk's
    if isinstance(error, OSError):
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        way_out = "; free some space, and the same command continues the run" if is_full else ""
        return f"{type(error).__name__}: {text}{way_out}", Exit.IO
    return text, Exit.INTERNAL


def forget_exit_code() -> None:
    """Remove the exit code that the start before this one left; the first process of a node calls it first of all."""
    path = os.environ.get("LOCKSTEP_EXIT_FILE")
    if path and os.environ.get("LOCAL_RANK", "0") == "0":
        with suppress(OSError):
            open(f"{path}.begun", "w").close()  # launch.sh says how long it waits for other machines
            os.unlink(path)


def leave(message: str, code: int, stream: TextIO | None = None) -> NoReturn:
    """End a start that has no ranks yet: exit with `code`, and the first process of the node says why.

    stream: see say.
    """
    if os.environ.get("LOCAL_RANK", "0") == "0":
        say(message, stream)
    record_exit(code)
    raise SystemExit(int(code))


class Parser(ArgumentParser):
    """argparse's, for `python -m MODULE`: --help has the module's docstring, and nothing is abbreviated.

    Invalid arguments exit with 64, which is 2 there. name: of the command, before its messages.
    """

    def __init__(self, module: str, about: str | None, **given: str):
        super().__init__(f"python -m {module}", description=(about or "").partition("\n\nTests: ")[0],
                         allow_abbrev=False, formatter_class=RawDescriptionHelpFormatter, **given)
        self.name = module.rpartition(".")[2]

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, on the first process of a node, and exit with 64."""
        leave(f"{self.format_usage()}{self.name}: {message}", Exit.USAGE)


def exit_after(work: Callable[[], int], program: str = "train.py", **ways_out: str) -> NoReturn:
    """Run `work` and exit with its code, or with that of its error, which is printed by one rank.

    ways_out: see explain.
    """
    escape_what_the_console_lacks()
    try:
        code, error = work(), None
    except KeyboardInterrupt:  # Ctrl-C, where no watchdog takes signals
        code, error = 128 + signal.SIGINT, None
    except Exception as caught:
        # torch's handler raises wherever the main thread is when a loading process dies: it would end these words, too
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        error = caught
        message, code = explain(error, **ways_out)
    LAST_WORD.acquire()
    record_exit(code)
    if error is not None and is_shown_here(error):
        text = "".join(traceback.format_exception(error)) if code == Exit.INTERNAL else f"{program}: {message}"
        bounded(lambda: say(text))
    bounded(lambda: sys.stdout and sys.stdout.flush())  # None if it was closed
    # Not sys.exit: while the interpreter shuts down, gloo's threads abort the process now and then (torch 2.15:
    # "terminate called without an active exception", 1 of 10 starts of 4 processes), and after an error they may wait
    # for peers that are gone.
    os._exit(int(code))


def record_exit(code: int) -> None:
    """Write the code for launch.sh, if this process is the first of its node to fail (torchrun always exits with 1)."""
    path = os.environ.get("LOCKSTEP_EXIT_FILE")
    if path and code:
        with suppress(OSError), open(path, "x") as file:  # fails if another process of this node was first
            file.write(f"{int(code)}\n")
