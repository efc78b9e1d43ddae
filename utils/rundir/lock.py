"""The lock of a run directory: one start at a time writes there. A start that fails early leaves the place as it was.

lockf, because data loading processes would inherit a flock. The system releases it however a process ends.
"""

import errno
import fcntl
import os
import shutil
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from utils.distributed.preflight import words_about_tasks
from utils.errors import Exit, UserError

LOCK_WAIT_S = 15  # a preempted start may need a moment to exit
# Lustre that is mounted without flock; NFS without its lock daemon
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


class RunLock:
    """Held from acquire() to close(), or to the end of the process."""

    def __init__(self) -> None:
        self._file: TextIO | None = None
        self._empty: Path | None = None  # the run directory, if there was nothing in it
        self._made: list[Path] = []  # folders made for it, the innermost first
        self._old: Path | None = None  # where the run that was found is now

    @property
    def is_held(self) -> bool:
        """Whether this process holds it."""
        return self._file is not None

    def acquire(self, path: Path, note: Callable[[str], None] = lambda text: None, flag: str = "--run-dir") -> None:
        """Create the directory if needed, and lock it. Raises UserError (78) if another process keeps the lock.

        flag: what gives another directory, for the message.
        """
        deadline = time.monotonic() + LOCK_WAIT_S
        while True:
            # open the file; it may be moved away or removed at any moment
            made = [folder for folder in (path, *path.parents) if not folder.exists()]
            try:
                path.mkdir(parents=True, exist_ok=True)
                is_empty = {file.name for file in path.iterdir()} <= {".lock"}
                file = (path / ".lock").open("a+")
            except FileNotFoundError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
                continue

            # try to lock it
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(file.fileno()), os.stat(file.name)):  # else a --fresh has just moved it
                    break
            except (BlockingIOError, FileNotFoundError):
                if time.monotonic() > deadline:
                    file.seek(0)
                    tasks = words_about_tasks()
                    raise UserError(f"{path} is in use by {file.read().strip() or 'another process'}; wait, stop it, or"
                                    f" use another {flag}{'; ' * bool(tasks)}{tasks}", Exit.OTHER_RUN) from None
                time.sleep(0.1)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                note(f"warning: the file system of {path} has no locks ({error.strerror}): make sure that no second"
                     " start writes there")
                break
            file.close()

        # say who holds it
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()} since {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC\n")
        file.flush()
        self._file, self._made, self._empty = file, made, path if is_empty else None

    def move_away(self, path: Path, old: Path) -> None:
        """Move the locked run directory to `old`, and lock a new one in its place."""
        old.parent.mkdir(exist_ok=True)
        os.rename(path, old)
        self.acquire(path)
        self._old = old

    def discard(self, note: Callable[[str], None] = lambda text: None) -> bool:
        """Leave the place as it was found: nothing, an empty folder, or the run that was moved away.

        False, and nothing happens, if there was a run that stayed.
        """
        if self._file is None or self._empty is None:
            return False
        last = "auto.json", ".lock"  # a directory without the first is not a run's; the second keeps others out
        for path in sorted(self._empty.iterdir(), key=lambda path: (path.name in last, path.name == ".lock")):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        with suppress(OSError):  # somebody else put something there meanwhile
            for folder in self._made:
                folder.rmdir()
            if self._old is not None:
                self._old.rename(self._empty)
                note(f"the old run is back in {self._empty}")
                self._old.parent.rmdir()
        self._empty = None
        return True

    def close(self) -> None:
        """Release the lock."""
        if self._file is not None:
            self._file.close()


def is_locked(path: Path) -> bool:
    """Whether a process trains in the run directory `path`; False where that cannot be asked. Changes nothing."""
    try:
        with (path / ".lock").open() as file:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False
