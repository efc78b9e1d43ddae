"""Folders of arrays in a cache: whole or absent, made by one process while others wait, mapped by all readers.

    make_folder(folder, write, open_arrays)                 # write(partial) ends with describe(partial, about, layout)
    about, arrays = open_arrays(folder)                     # None if there is none, or it is damaged
    arrays = kept_arrays(folder, lambda: {"labels": ...})   # both in one, for arrays that fit into memory

Processes that map one file share its memory, and load only what they read. A folder's name holds everything that
decides its content. So a folder is replaced only if it is damaged: another node may have mapped it.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from utils.files import make_folder, read_checked, write_checked

ABOUT = "about.json"
LARGE = 2**26  # bytes


def digest_of(*parts: Any) -> str:
    """A part of a folder's name: the digest of everything (JSON) that decides its content."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:20]


Kept = tuple[dict[str, Any], Mapping[str, np.ndarray]]  # JSON values about the arrays, and the arrays


def kept_arrays(folder: Path, make: Callable[[], Mapping[str, np.ndarray]]) -> Mapping[str, np.ndarray]:
    """The arrays of `folder`, where the first process writes make(). Kept in memory if that is impossible."""
    def write(partial: Path) -> None:
        arrays = make()
        for name, array in arrays.items():
            (partial / name).write_bytes(np.ascontiguousarray(array))
        describe(partial, {}, {name: (array.dtype, array.shape[1:]) for name, array in arrays.items()})

    with suppress(OSError):
        make_folder(folder, write, open_arrays)
    found = open_arrays(folder)
    return make() if found is None else found[1]


def describe(folder: Path, about: Mapping[str, Any], layout: Mapping[str, tuple[Any, tuple[int, ...]]]) -> None:
    """Write about.json: the JSON values `about`; and of each file the dtype, the shape of an entry, and the size."""
    arrays = {name: (np.dtype(dtype).str, entry, (folder / name).stat().st_size)
              for name, (dtype, entry) in layout.items()}
    write_checked(folder / ABOUT, {**about, "arrays": arrays})


def open_arrays(folder: Path) -> Kept | None:
    """`about` and the read-only arrays of a folder; None if there is none, or a file has the wrong size."""
    try:
        about, arrays = read_checked(folder / ABOUT), {}
        for name, (dtype, entry, size) in about["arrays"].items():
            if (folder / name).stat().st_size != size:
                return None
            flat = _mapped(str(folder / name), size) if size else np.zeros(0, np.uint8)
            arrays[name] = flat.view(dtype).reshape(-1, *entry)
        return about, arrays
    except (OSError, ValueError):
        return None


def _mapped(path: str, size: int) -> np.ndarray:
    """[size] uint8, read-only.

    torch keeps no descriptor, of which thousands of tar files would need too many. But it maps privately, and the
    kernel may count such a mapping as memory.
    """
    if size < LARGE:
        with suppress(RuntimeError):  # the kernel gives no mapping, or the file is gone: numpy says what it is
            flat = torch.from_file(path, size=size, dtype=torch.uint8).numpy()
            flat.flags.writeable = False
            return flat
    return np.memmap(path, np.uint8, "r")
