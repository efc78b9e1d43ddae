"""A simulated accelerator: four devices of the type "sim", for tests of device code where there is no GPU.

Results are the CPU's, bit for bit, by the ways that a GPU takes; what a GPU forbids fails, and what it does late comes
late, every time (operations.py, device.py). $SIMULATED_ACCELERATOR is a JSON object, all of it optional:

    devices: 4         memory: bytes of each       report: a folder for rank-N.json: waits, operations, peak bytes, copies
    fails, hangs: {rank, device, operation, once}: from the n-th operation of a rank's (current) device on; once: a path
"""

import shutil
from importlib.util import find_spec
from pathlib import Path


def missing() -> str:
    """Why there can be none here; "" where there can."""
    [torch] = find_spec("torch").submodule_search_locations
    header = Path(torch, "include/ATen/detail/PrivateUse1HooksInterface.h")
    return "no C++ compiler (g++)" if not shutil.which("g++") else "" if header.exists() else f"torch without {header}"
