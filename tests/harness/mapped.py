"""Arrays that lie in files."""

from pathlib import Path

import numpy as np


def is_mapped(array: np.ndarray) -> bool:
    """Whether the array lies in a file that is mapped into memory."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, *_, path = line.split(maxsplit=5)
        begin, end = (int(address, 16) for address in addresses.split("-"))
        if begin <= array.ctypes.data < end:
            return path.startswith("/")
    return False
