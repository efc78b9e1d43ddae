"""A simulated accelerator, device type "sim": device code is tested where there is no GPU.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

SOURCE = Path(__file__).with_name("device.cpp")
_kept: list[object] = []


def missing() -> str:
    """Why there can be no such device here; "" where there can."""
    import torch

    if not shutil.which("g++"):
        return "no C++ compiler (g++)"
    hooks = Path(torch.__file__).parent / "include/ATen/detail/PrivateUse1HooksInterface.h"
    return "" if hooks.exists() else f"torch {torch.__version__} has no {hooks.name}"


def build() -> Path:
    """The library made of device.cpp by g++ (half a minute), kept for this torch and this source in the folder for temporary files."""
    import torch

    root, source = Path(torch.__file__).parent, SOURCE.read_bytes()
    name = f"lockstep-sim-{os.getuid()}-{torch.__version__}-{hashlib.sha256(source).hexdigest()[:16]}.so"
    library = Path(tempfile.gettempdir(), name)
    if not library.exists():
        partial = library.with_suffix(f".{os.getpid()}")
        subprocess.run(["g++", "-O0", "-fPIC", "-shared", "-std=c++20", f"-I{root}/include", str(SOURCE), "-o", str(partial),
                        f"-L{root}/lib", "-lc10", "-ltorch_cpu"], check=True)
        partial.replace(library)
    return library


def register() -> Callable[[], int]:
    """Make "sim" the accelerator of this process, for good."""
    import torch
    import torch.distributed as dist

    path = str(build())
    torch.ops.load_library(path)
    library = ctypes.CDLL(path)
    library.sim_peak.restype = ctypes.c_int64
    torch.utils.rename_privateuse1_backend("sim")
    from tests.harness.accelerator import device, operations, torch_sim

    settings = device.SETTINGS
    library.sim_begin(settings.get("devices", 4), ctypes.c_int64(settings.get("memory") or 2**62))
    torch._register_device_module("sim", torch_sim)
    torch.utils.generate_methods_for_privateuse1_backend()
    devices = operations.DEVICES
    devices += [device.Device(index, torch_sim.current_device, library.sim_hang) for index in range(settings.get("devices", 4))]
    own = torch.library.Library("sim", "IMPL")
    own.impl("issued", lambda index: devices[index].issued(), "CompositeExplicitAutograd")
    own.impl("wait", lambda index, place, kind: devices[index].wait(place, kind), "CompositeExplicitAutograd")
    own.impl("query", lambda index, place: devices[index].query(place), "CompositeExplicitAutograd")
    _kept.extend([own, *operations.install()])
    dist.Backend.default_device_backend_map["sim"] = "gloo"
    dist.Backend.backend_capability["gloo"].append("sim")


def finish() -> None:
    pass
