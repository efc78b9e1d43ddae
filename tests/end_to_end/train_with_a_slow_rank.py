"""train.py on a machine whose rank 1 takes a second more for each micro-batch."""

import os
import sys
import time

import extras
import train
from data import demo
from utils.distributed.watchdog import Watchdog
from utils.errors import exit_after
from utils.settings.command_line import parse_command_line

original = train.forward


def slowly(*arguments):
    time.sleep(1.0 if os.environ["RANK"] == "1" else 0)
    return original(*arguments)


def work() -> int:
    """A whole run."""
    config = parse_command_line(sys.argv[1:], demo.SETTINGS, extras.pages())
    train.forward = slowly
    return train.main(config, Watchdog())


exit_after(work)
