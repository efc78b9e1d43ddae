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

from tests.harness.accelerator.device import DEVICES, PROCESS, report
from tests.harness.accelerator.operations import install

Place = torch.device | str | int | None


def index_of(device: Place = None) -> int:
    index = device if isinstance(device, int) else torch.device(device or "sim").index
    return accelerator.current_device_index() if index is None else index


def set_rng_state(state: torch.Tensor, device: Place = None) -> None:
    DEVICES[index_of(device)].random_state = state.clone()


def manual_seed(seed: int, device: Place = None) -> None:
    set_rng_state(torch.Generator().manual_seed(seed).get_state(), device)


kept, leave = install(), os._exit
os._exit = lambda code: leave(report() or code)
torch._register_device_module("sim", SimpleNamespace(  # torch.sim, as torch.cuda
    is_available=lambda: True, is_initialized=lambda: True, _is_in_bad_fork=lambda: os.getpid() != PROCESS,
    _lazy_init=lambda: None, get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16], current_device=index_of,
    device_count=lambda: len(DEVICES), set_device=lambda device: accelerator.set_device_index(index_of(device)),
    synchronize=accelerator.synchronize, current_stream=accelerator.current_stream, Stream=torch.Stream,
    Event=partial(torch.Event, "sim"), get_rng_state=lambda device=None: DEVICES[index_of(device)].random_state.clone(),
    set_rng_state=set_rng_state, manual_seed=manual_seed,
    manual_seed_all=lambda seed: [manual_seed(seed, index) for index in range(len(DEVICES))]))
torch.utils.generate_methods_for_privateuse1_backend()
dist.Backend.default_device_backend_map["sim"] = "gloo"
dist.Backend.backend_capability["gloo"].append("sim")
sys.argv, sys.path[0] = sys.argv[1:], str(Path(sys.argv[1]).resolve().parent)
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    if report(): sys.exit(1)
