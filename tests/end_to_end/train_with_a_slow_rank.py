"""train.py on a machine whose rank 1 takes a second more for each micro-batch."""

import os
import sys
import time

import train
from data import demo
from utils.distributed.watchdog import Watchdog
from utils.errors import exit_after
from utils.settings.command_line import parse_command_line

original = train.seed_micro_batch


def slowly(*arguments):
    """What the loop calls before each forward."""
    time.sleep(1.0 if os.environ["RANK"] == "1" else 0)
    original(*arguments)


def work() -> int:
    """A whole run."""
    config = parse_command_line(sys.argv[1:], demo.SETTINGS)
    train.seed_micro_batch = slowly
    return train.main(config, Watchdog())


exit_after(work)
