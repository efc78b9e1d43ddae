"""train.py with a transport that flips a bit of the sums: CHANGED='{"step": 4, ...}' torchrun ... SETTINGS.

step: of the optimizer, counted from 1. on: the rank whose result is changed; null = all. at, bit: which. once: a file;
where it exists, nothing is changed.
"""

import json
import os
import sys
from functools import partial
from itertools import count
from pathlib import Path

from torch import Tensor

import extras
from data import demo
from tests.harness.transport import flip, plant
from train import main
from utils.distributed.watchdog import Watchdog
from utils.errors import exit_after
from utils.settings.command_line import parse_command_line

FAULT = json.loads(os.environ["CHANGED"])
numbers = count()  # of sums: the model is one bucket, and the first step is the warm-up


def change(sums: Tensor) -> None:
    """Flip the bit, if the time has come."""
    is_due = next(numbers) == FAULT["step"] and FAULT["on"] in (None, int(os.environ.get("RANK", 0)))
    if is_due and not ("once" in FAULT and Path(FAULT["once"]).exists()):
        flip(sums, FAULT["at"], FAULT["bit"])
        if "once" in FAULT:
            Path(FAULT["once"]).touch()


if __name__ == "__main__":
    watchdog = Watchdog()
    plant(lambda sums: None, change)
    exit_after(partial(main, parse_command_line(sys.argv[1:], demo.SETTINGS, extras.pages()), watchdog))
