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

from tests.harness.accelerator.device import DEVICES, PROCESS, report
from tests.harness.accelerator.operations import install


def index_of(device: torch.device | str | int | None = None) -> int:
    """The current one's, where `device` names none."""
    index = device if isinstance(device, int) else torch.device(device or "sim").index
    return torch.accelerator.current_device_index() if index is None else index


def set_rng_state(state: torch.Tensor, device: torch.device | str | int | None = None) -> None:
    DEVICES[index_of(device)].random_state = state.clone()


def manual_seed_all(seed: int) -> None:
    for index in range(len(DEVICES)):
        set_rng_state(torch.Generator().manual_seed(seed).get_state(), index)


kept, leave = install(), os._exit
os._exit = lambda code: leave(report() or code)
torch._register_device_module("sim", SimpleNamespace(  # torch.sim, as torch.cuda
    is_available=lambda: True, is_initialized=lambda: True, device_count=lambda: len(DEVICES), current_device=index_of,
    set_device=lambda device: torch.accelerator.set_device_index(index_of(device)), set_rng_state=set_rng_state,
    get_rng_state=lambda device=None: DEVICES[index_of(device)].random_state.clone(), manual_seed_all=manual_seed_all,
    manual_seed=lambda seed: set_rng_state(torch.Generator().manual_seed(seed).get_state()),
    synchronize=torch.accelerator.synchronize, current_stream=torch.accelerator.current_stream, Stream=torch.Stream,
    Event=partial(torch.Event, "sim"), get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
    _lazy_init=lambda: None, _is_in_bad_fork=lambda: os.getpid() != PROCESS))
torch.utils.generate_methods_for_privateuse1_backend()
dist.Backend.default_device_backend_map["sim"] = "gloo"
dist.Backend.backend_capability["gloo"].append("sim")
sys.argv, sys.path[0] = sys.argv[1:], str(Path(sys.argv[1]).resolve().parent)
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    if report():
        sys.exit(1)
