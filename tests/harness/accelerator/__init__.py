"""A simulated accelerator, device type "sim", for tests of device code where there is no GPU.

Results are the CPU's, bit for bit, by the ways that a GPU takes. What a GPU forbids fails; what comes late there comes
late here, every time. $SIMULATED_ACCELERATOR is a JSON object of settings:

    devices: 4      memory: bytes of each, null      report: folder of rank-N.json (waits, operations, peak, copies)
    fails, hangs, shrinks: {rank: 0, device: the current one, operation: the first, once: a file that remembers it};
        shrinks has besides: memory, bytes of each from then on
    flips: {rank: 0, device: the current one, operation: the first, every: 0, only: a pattern of names, bit: 20}: a bit
        flips in the result of that operation, or of the first after it that makes numbers; once, or from there on in
        every k-th that does, and whose name fits; report has their names
    generator: 0, the CPU's; any other number makes the random numbers of a seed differ from the CPU's
"""

import shutil
from importlib.util import find_spec
from pathlib import Path


def missing() -> str:
    """Why there can be none here; "" where there can."""
    header = Path(find_spec("torch").origin).with_name("include") / "ATen/detail/PrivateUse1HooksInterface.h"
    return "no C++ compiler (g++)" if not shutil.which("g++") else "" if header.exists() else f"torch has no {header}"
