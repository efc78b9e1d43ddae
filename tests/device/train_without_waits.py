"""train.py where a step may make no call that torch knows to wait for CUDA.

    train_without_waits.py SETTINGS of train.py
"""

import sys
from functools import partial

import torch

import extras
import train
from data import demo
from engine import after_step, saving, wrong
from utils.distributed.watchdog import Watchdog
from utils.errors import exit_after
from utils.settings.command_line import parse_command_line


def with_mode(mode, work):
    """`work`, in that mode of torch's own check; it does not see events, for which a step may wait."""
    def call(*args, **options):
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode(mode)
        try:
            return work(*args, **options)
        finally:
            torch.cuda.set_sync_debug_mode(before)

    return call


if __name__ == "__main__":
    watchdog = Watchdog()
    train.train_one_epoch = with_mode("error", train.train_one_epoch)
    for module in (train, after_step, wrong):
        module.save = with_mode("default", saving.save)
    exit_after(partial(train.main, parse_command_line(sys.argv[1:], demo.SETTINGS, extras.pages()), watchdog))
