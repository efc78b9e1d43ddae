"""train.py where all processes of a node share one accelerator; they meet over gloo: NCCL gives each process a device.

    torchrun --nproc-per-node=2 tests/device/train_on_one_device.py SETTINGS of train.py
"""

import os
import sys
from functools import partial

import torch
import torch.distributed as dist

import extras
import train
from data import demo
from utils.distributed import world
from utils.distributed.watchdog import Watchdog
from utils.errors import exit_after
from utils.hardware import vendor
from utils.settings.command_line import parse_command_line

if __name__ == "__main__":
    watchdog = Watchdog()
    kind = torch.accelerator.current_accelerator().type
    dist.Backend.default_device_backend_map[kind] = "gloo"
    torch.accelerator.device_count = lambda: int(os.environ["LOCAL_WORLD_SIZE"])
    vendor.require_code = lambda *given: None
    world.devices_of = lambda kind, *given: (torch.device(kind, 0),)
    exit_after(partial(train.main, parse_command_line(sys.argv[1:], demo.SETTINGS, extras.pages()), watchdog))
