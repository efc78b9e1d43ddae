"""Run a script with the simulated accelerator, as `python SCRIPT` would run it. Under torchrun, too.

    python -m tests.harness.accelerator SCRIPT ARGUMENT...      with the repository's folder in PYTHONPATH
"""

import os
import runpy
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import accelerator

from tests.harness.accelerator.device import DEVICES, PROCESS, Device, report
from tests.harness.accelerator.operations import install


def find(device: torch.device | str | int | None = None) -> Device:
    index = device if isinstance(device, int) else torch.device(device or "sim").index
    return DEVICES[accelerator.current_device_index() if index is None else index]


kept, leave = install(), os._exit
os._exit = lambda code: leave(report() or code)
torch._register_device_module("sim", SimpleNamespace(  # torch.sim, as torch.cuda
    is_available=lambda: bool(DEVICES), is_initialized=lambda: True, _initialized=True, device=accelerator.device_index,
    _is_in_bad_fork=lambda: os.getpid() != PROCESS, _lazy_init=lambda: None,
    get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
    device_count=lambda: len(DEVICES), current_device=accelerator.current_device_index,
    set_device=lambda device: accelerator.set_device_index(find(device).index), synchronize=accelerator.synchronize,
    current_stream=accelerator.current_stream, Stream=torch.Stream, Event=partial(torch.Event, "sim"),
    manual_seed=lambda seed: find().seed(seed), manual_seed_all=lambda seed: [device.seed(seed) for device in DEVICES],
    get_rng_state=lambda device=None: find(device).random_state.clone(),
    set_rng_state=lambda state, device=None: setattr(find(device), "random_state", state.clone())))
torch.utils.generate_methods_for_privateuse1_backend()
dist.Backend.default_device_backend_map["sim"] = "gloo"
dist.Backend.backend_capability["gloo"].append("sim")
sys.argv, sys.path[0] = sys.argv[1:], str(Path(sys.argv[1]).resolve().parent)
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    if report(): sys.exit(1)
