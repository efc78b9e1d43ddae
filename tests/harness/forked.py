"""torchrun in a fork of a process that has imported it: the same program without the seconds that its imports take.

torchrun's workers are processes of their own as ever. A fork keeps its parent's /proc/PID/environ.
"""

import os
import signal
import subprocess
from multiprocessing import get_context
from pathlib import Path

FORKS = get_context("forkserver")
# pytest: a fork imports the main module, too.
FORKS.set_forkserver_preload(["pytest", "torch.distributed.run", __name__])


class ForkedTorchrun:
    """What tests need of subprocess.Popen."""

    def __init__(self, words: list[str], folder: Path, environment: dict[str, str], out: Path, err: Path):
        self._process = FORKS.Process(target=_run, args=(words, folder, environment, out, err))
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """Of a process that has ended: its exit code, or the negative number of the signal that ended it."""
        return self._process.exitcode

    poll = returncode.fget

    def wait(self, timeout: float | None = None) -> int:
        """Its returncode, once it has ended. Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("torchrun", timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """A signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


def _run(words: list[str], folder: Path, environment: dict[str, str], out: Path, err: Path) -> None:
    from torch.distributed.run import main

    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    main(words)
