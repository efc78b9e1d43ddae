"""Folders of arrays in a cache: whole or absent, made by one process while others wait, mapped by all readers.

    make_folder(folder, write)                              # write(partial) ends with describe(partial, about, layout)
    about, arrays = open_arrays(folder)                     # None if there is none, or it is damaged
    arrays = kept_arrays(folder, lambda: {"labels": ...})   # both in one, for arrays that fit into memory

Processes that map one file share its memory, and load only what they read. A folder's name holds everything that
decides its content. So a folder is replaced only if it is damaged: another node may have mapped it.
"""

import fcntl
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from utils.files import read_checked, sync, write_checked

ABOUT = "about.json"


def digest_of(*parts: Any) -> str:
    """A part of a folder's name: the digest of everything (JSON) that decides its content."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:20]


def make_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Make `folder` with write(partial), which fills the new folder `partial`; not if it is there and undamaged.

    It reaches the disk before it gets its name. Raises OSError if it cannot be written, and whatever `write` raises.
    """
    if open_arrays(folder) is not None:
        return
    with one_at_a_time(folder):
        if open_arrays(folder) is not None:  # another process made it meanwhile
            return
        partial = folder.with_name(f".{folder.name}.{uuid4().hex}")
        try:
            partial.mkdir(parents=True)
            write(partial)
            for path in (*partial.iterdir(), partial):
                sync(path)
            if open_arrays(folder) is None:
                shutil.rmtree(folder, ignore_errors=True)  # damaged
                partial.rename(folder)
                sync(folder.parent)
        except OSError:
            if open_arrays(folder) is None:  # else another process was first, and its arrays are the same
                raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def kept_arrays(folder: Path, make: Callable[[], Mapping[str, np.ndarray]]) -> Mapping[str, np.ndarray]:
    """The arrays of `folder`, where the first process writes make(). Kept in memory if that is impossible."""

    def write(partial: Path) -> None:
        arrays = make()
        for name, array in arrays.items():
            (partial / name).write_bytes(np.ascontiguousarray(array))
        describe(partial, {}, {name: (array.dtype, array.shape[1:]) for name, array in arrays.items()})

    with suppress(OSError):
        make_folder(folder, write)
    found = open_arrays(folder)
    return make() if found is None else found[1]


def describe(folder: Path, about: Mapping[str, Any], layout: Mapping[str, tuple[Any, tuple[int, ...]]]) -> None:
    """Write about.json: the JSON values `about`; and of each file the dtype, the shape of an entry, and the size."""
    arrays = {name: (np.dtype(dtype).str, entry, (folder / name).stat().st_size)
              for name, (dtype, entry) in layout.items()}
    write_checked(folder / ABOUT, {**about, "arrays": arrays})


def open_arrays(folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]] | None:
    """`about` and the read-only arrays of a folder; None if there is none, or a file has the wrong size."""
    try:
        about, arrays = read_checked(folder / ABOUT), {}
        for name, (dtype, entry, size) in about["arrays"].items():
            if (folder / name).stat().st_size != size:
                return None
            flat = np.memmap(folder / name, dtype, "r") if size else np.zeros(0, dtype)
            arrays[name] = flat.reshape(-1, *entry)
        return about, arrays
    except (OSError, ValueError):
        return None


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
