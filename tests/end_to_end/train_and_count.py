"""train.py with a dataset that writes down what is read.

RUN/../RUN-rank-R.json: [[split, epoch, index], ...]. Needs --workers 0.
"""

import json
import sys

import extras
from data import demo
from data.images.folder import ImageFolder
from train import main
from utils.distributed.watchdog import Watchdog
from utils.errors import exit_after
from utils.rundir.identity import run_path
from utils.settings.command_line import parse_command_line

read: list[tuple[int, int, int]] = []
original = ImageFolder.__getitem__


def noted(self, item):
    """Read the sample, and write down which one of how many it was, unless it is for a picture in TensorBoard."""
    frame = sys._getframe()
    while frame and not frame.f_code.co_filename.endswith("first_batch/extra.py"):
        frame = frame.f_back
    if frame is None:
        read.append((len(self), int(item[0]), int(item[1])))
    return original(self, item)


def work() -> int:
    """A whole run."""
    import os

    config = parse_command_line(sys.argv[1:], demo.SETTINGS, extras.pages())
    ImageFolder.__getitem__ = noted
    code = main(config, Watchdog())
    path = run_path(config)
    path.with_name(f"{path.name}-rank-{os.environ['RANK']}.json").write_text(json.dumps(read))
    return code


exit_after(work)
