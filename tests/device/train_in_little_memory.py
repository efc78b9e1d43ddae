"""train.py where a CUDA device has 1 GiB for this process: what is above it fails as on a device that is full.

    train_in_little_memory.py SETTINGS of train.py
"""

import sys
from functools import partial

import torch

import extras
import train
from data import demo
from utils.distributed.watchdog import Watchdog
from utils.errors import exit_after
from utils.settings.command_line import parse_command_line

if __name__ == "__main__":
    watchdog = Watchdog()
    torch.cuda.set_per_process_memory_fraction(2**30 / torch.cuda.get_device_properties(0).total_memory, 0)
    exit_after(partial(train.main, parse_command_line(sys.argv[1:], demo.SETTINGS, extras.pages()), watchdog))
