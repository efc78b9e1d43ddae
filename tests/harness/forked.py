"""torchrun, its ranks and train.py in forks of a process that has imported what they import, to save that time.

The fork has the words, the environment, the folder, the session and the output that a process of its own would have.
It differs in what happens before a program's first line: libraries read OMP_NUM_THREADS, HF_HUB_OFFLINE and their like
when they are imported; all forks of a session share one seed of Python's hashes; /proc/PID/environ and cmdline are the
parent's. A test of these asks for real processes. A rank is a child of torchrun, as ever, and its name is rankN.
"""

import atexit
import ctypes
import io
import os
import runpy
import signal
import stat
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import connection, get_context, resource_tracker
from pathlib import Path

FORKS = get_context("forkserver")
# pytest: a fork imports the main module, too.
FORKS.set_forkserver_preload(["pytest", "tests.harness.preloaded", __name__])
_LOCK = threading.Lock()  # multiprocessing looks after all its processes whenever one starts, and not for two threads


class Forked:
    """What tests need of subprocess.Popen. program: torchrun_main or script_main."""

    def __init__(self, program: Callable[[list[str]], None], words: list[str], folder: Path,
                 environment: dict[str, str], out: Path, err: Path):
        self._process = FORKS.Process(target=_run, args=(program, words, folder, environment, out, err))
        with _LOCK:
            self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """Of a process that has ended: its exit code, or the negative number of the signal that ended it."""
        with _LOCK:
            return self._process.exitcode

    poll = returncode.fget

    def wait(self, timeout: float | None = None) -> int:
        """Its returncode, once it has ended. Raises subprocess.TimeoutExpired."""
        connection.wait([self._process.sentinel], timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a forked process", timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """A signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


def run_forked(script: str, *words: object, folder: Path, text: str = "") -> subprocess.CompletedProcess[str]:
    """A script of the project in a fork of this very process, with `text` as its standard input: its result.

    For tests that have imported what the script imports. `folder` gets the files in, out and err.
    """
    files = [folder / name for name in ("in", "out", "err")]
    files[0].write_text(text)
    arguments = [script, *map(str, words)]
    process = get_context("fork").Process(
        target=_run,
        args=(_uncaptured_main, arguments, Path(__file__).parents[2], dict(os.environ), *files[1:], files[0]))
    process.start()
    process.join()
    return subprocess.CompletedProcess(arguments, process.exitcode, *(file.read_text() for file in files[1:]))


def torchrun_main(words: list[str]) -> None:
    """torchrun with these words, whose ranks are processes of their own."""
    from torch.distributed.run import main

    main(words)


def forking_torchrun_main(words: list[str]) -> None:
    """torchrun with these words, whose ranks are forks of it."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    subprocess_handler.SubprocessHandler._popen = lambda handler, words, environment: ForkedRank(words, environment)
    torchrun_main(words)


class ForkedRank:
    """What torchrun needs of subprocess.Popen. words: python -u SCRIPT and its words.

    The ranks of a node begin together, when the last one is forked. Else the first one connects to torchrun's store, a
    thread of which looks up its name under a lock of the C library, and a rank that is forked meanwhile hangs there.
    """

    _gate = (-1, -1)  # a pipe, whose writing end torchrun then closes

    def __init__(self, words: tuple[str, ...], environment: dict[str, str]):
        sys.stdout.flush()
        sys.stderr.flush()
        if environment["LOCAL_RANK"] == "0":
            ForkedRank._gate = os.pipe()
        self.returncode, self.pid = None, os.fork()
        if self.pid == 0:
            _be_rank(list(words[2:]), environment, self._gate)
        if int(environment["LOCAL_RANK"]) + 1 == int(environment["LOCAL_WORLD_SIZE"]):
            for end in self._gate:
                os.close(end)

    def poll(self) -> int | None:
        """As Popen's."""
        if self.returncode is None:
            pid, state = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(state) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """As Popen's. Raises subprocess.TimeoutExpired."""
        deadline = time.monotonic() + (timeout or 0)
        while self.poll() is None:
            if timeout is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a rank", timeout)
            time.sleep(0.005)
        return self.returncode


def _be_rank(words: list[str], environment: dict[str, str], gate: tuple[int, int]) -> None:
    """The script, in a process that has nothing of torchrun but what is imported; it never returns."""
    code = 1
    try:
        os.setsid()
        atexit._clear()
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        os.close(gate[1])
        os.read(gate[0], 1)
        _close_files()
        resource_tracker._resource_tracker.__init__()  # else it would write to a file that has the number of its pipe
        os.environ.clear()
        os.environ.update(environment)
        ctypes.CDLL(None).prctl(15, f"rank{environment['RANK']}".encode())  # PR_SET_NAME of prctl(2)
        sys.stdout, sys.stderr = (io.TextIOWrapper(io.FileIO(number, "w"), errors=errors, write_through=True)
                                  for number, errors in ((1, "strict"), (2, "backslashreplace")))
        script_main(words)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()
        os._exit(code)


def _close_files() -> None:
    """Close all files but the first three. A pipe becomes /dev/null, so that nothing else gets its number.

    libuv, which torchrun's store uses, closes its pipe in every fork: without this, one of the rank's DataLoader, whose
    workers would wait for it for ever.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for number in {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, null}:
        with suppress(OSError):  # the one that listed them is closed
            if stat.S_ISFIFO(os.fstat(number).st_mode):
                os.dup2(null, number)
            else:
                os.close(number)
    os.close(null)


def script_main(words: list[str]) -> None:
    """A Python script, by its path, with these words."""
    sys.argv, sys.path[0] = words, str(Path(words[0]).resolve().parent)
    runpy.run_path(words[0], run_name="__main__")


def _uncaptured_main(words: list[str]) -> None:
    with open(0) as sys.stdin, open(1, "w") as sys.stdout, open(2, "w", buffering=1) as sys.stderr:
        script_main(words)  # pytest's own streams are objects in memory


def _run(program: Callable[[list[str]], None], words: list[str], folder: Path, environment: dict[str, str],
         out: Path, err: Path, given: str | Path = os.devnull) -> None:
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, path in ((0, given), (1, out), (2, err)):
        os.dup2(os.open(path, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.stdout.reconfigure(line_buffering=False)  # the parent's may be a terminal
    program(words)
