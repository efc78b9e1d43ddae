"""Small files: a reader sees the old or the new content, and damage is detected. Folders of caches: whole or absent.

A node sees what another one wrote only after some time, if the file system caches names: see wait_to_see.
"""

import fcntl
import hashlib
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from utils.errors import Exit, UserError, say

# What systems keep beside a user's files, in lower case: file servers, Windows, macOS, Linux. The names of Jupyter's,
# Dropbox's and other programs' begin with a dot.
SYSTEM_NAMES = frozenset((
    "@eadir", "@recently-snapshot", "@recycle", "@sharebin", "@tmp", "#recycle", "#snapshot", "~snapshot",
    "$recycle.bin", "system volume information", "thumbs.db", "ehthumbs.db", "desktop.ini", "__macosx", "icon\r",
    "network trash folder", "temporary items", "lost+found", "__pycache__"))


def is_users(name: str) -> bool:
    """Whether a file or folder of this name is the user's own, and not one that a system or a program keeps."""
    return not name.startswith(".") and name.lower() not in SYSTEM_NAMES


# NFS trusts what it knows of a folder for up to 60 s (acdirmax), also that a name is not there.
CACHED_S = 65
QUIET_S = 5  # of waiting, before a line says so


def ask_server(path: Path) -> None:
    """Open the folders that `path` is in: then NFS asks the server what they hold (close-to-open)."""
    for folder in reversed(path.absolute().parents):
        with suppress(OSError), os.scandir(folder):
            pass


def wait_to_see(is_seen: Callable[[], bool], path: Path) -> bool:
    """Whether is_seen() within CACHED_S. `path`: what another node may just have written, renamed or removed.

    is_seen may raise OSError, which means no. After QUIET_S the first rank of a node says that it waits.
    """
    began, is_quiet = time.monotonic(), os.environ.get("LOCAL_RANK", "0") == "0"
    while True:
        with suppress(OSError):
            if is_seen():
                return True
        waited_s = time.monotonic() - began
        if waited_s > CACHED_S:
            return False
        if waited_s > QUIET_S and is_quiet:
            is_quiet = False
            say(f"{socket.gethostname()} does not see {path.absolute()} as another node wrote it; looking again for up"
                f" to {CACHED_S} s: a network file system may remember what was there before")
        ask_server(path)
        time.sleep(0.1)


def see_listed(path: Path) -> None:
    """If `path` is listed in its folder, wait until it is there."""
    with suppress(OSError):
        if path.name in os.listdir(path.parent):
            wait_to_see(path.exists, path)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from `path`; empty if there is none. Raises UserError (74)."""
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); restore it, or use another --run-dir or --fresh",
                        Exit.IO) from None


def lines_of(path: Path) -> list[bytes]:
    """The lines of a file; none if there is no file."""
    return path.read_bytes().splitlines() if path.exists() else []


def json_lines(path: Path, begin: int = 0) -> Iterator[Any]:
    """The values of a file with one in each line, but for a line that a kill cut off; none if there is no file.

    begin: the byte after which they are wanted; the line that it cuts is left out.
    """
    with suppress(FileNotFoundError, NotADirectoryError), path.open("rb") as file:
        if begin > 0:
            file.seek(begin - 1)
            file.readline()
        for line in file:
            with suppress(ValueError):
                yield json.loads(line)


def file_sha256(path: Path) -> str:
    """Of a file that may be larger than the memory."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def folder_digest(folder: Path) -> str:
    """sha256 of the names and contents of the files in `folder`."""
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def sync(path: Path) -> None:
    """fsync a file or folder: it must reach the disk before it is renamed into place."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, content: str | bytes, is_private: bool = False) -> None:
    """Write a small file so that a reader sees the old or the new content, never a part of it.

    is_private: its owner alone may read it; else the umask decides.
    """
    partial = path.with_name(f".tmp-{path.name}")
    try:
        with partial.open("wb") as file:
            if is_private:
                os.fchmod(file.fileno(), 0o600)
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def write_checked(path: Path, value: Any) -> None:
    """Write a JSON value with its checksum, so that damage is detected."""
    text = json.dumps(value)
    write_atomically(path, f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}")


def read_checked(path: Path) -> Any:
    """What write_checked wrote. Raises OSError, or ValueError if it is damaged."""
    digest, _, text = path.read_text().partition("\n")
    if hashlib.sha256(text.encode()).hexdigest() != digest:
        raise ValueError(f"{path} is damaged")
    return json.loads(text)


def make_folder(folder: Path, write: Callable[[Path], None], is_whole: Callable[[Path], object]) -> None:
    """Make `folder` with write(partial), which fills the new folder `partial`; not if is_whole(folder).

    One process works while others wait. The files directly in it reach the disk before it gets its name. Raises OSError
    if it cannot be written, and whatever `write` raises.
    """
    if is_whole(folder):
        return
    with one_at_a_time(folder):
        see_listed(folder)
        if is_whole(folder):  # another process made it meanwhile
            return
        partial = folder.with_name(f".{folder.name}.{uuid4().hex}")
        try:
            partial.mkdir(parents=True)
            write(partial)
            for path in (*partial.iterdir(), partial):
                sync(path)
            try:
                partial.rename(folder)
            except OSError:  # it is there: damaged, or another process was first
                see_listed(folder)
                if not is_whole(folder):
                    shutil.rmtree(folder, ignore_errors=True)
                    partial.rename(folder)
            sync(folder.parent)
        except OSError:
            if not is_whole(folder):  # else another process was first, and wrote the same
                raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def replace_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Make `folder` with write(partial), in place of one that is there. It stays as it is if `write` raises."""
    # write it
    partial, old = (folder.with_name(f"{prefix}{folder.name}") for prefix in (".tmp-", ".tmp-old-"))
    for leftover in (partial, old):
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        partial.mkdir()
        write(partial)
        for path in (*partial.rglob("*"), partial):
            sync(path)

        # put it in place of the old one
        if folder.exists():
            os.rename(folder, old)
        os.rename(partial, folder)
        sync(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """For work whose result `path` others can use: one process works, the others wait here and then look for `path`.

    A process that waited holds no lock: if the first one failed, all fail at once, not one after another. A process
    that dies blocks nobody. There is no lock if the cache cannot be written or its file system has none (lockf).
    """
    with ExitStack() as stack:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = path.with_name(f".{path.name}.lock")
            file = stack.enter_context(lock.open("a"))
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                stack.callback(_unlink, lock)  # while it is held
            except BlockingIOError:
                fcntl.lockf(file, fcntl.LOCK_EX)
                file.close()
        yield


def _unlink(path: Path) -> None:
    with suppress(OSError):
        path.unlink()


def cache_path() -> Path:
    """The folder of caches: $LOCKSTEP_CACHE, else $XDG_CACHE_HOME/lockstep, else ~/.cache/lockstep."""
    if folder := os.environ.get("LOCKSTEP_CACHE"):
        return Path(folder)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lockstep"
    except RuntimeError:  # no HOME, and this user is in no list of users
        raise UserError("this user has no home directory: give a folder for caches, LOCKSTEP_CACHE=FOLDER",
                        Exit.CANNOT_CREATE) from None
