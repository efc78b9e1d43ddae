"""train.py with a sampler that leaves sample 5 of the training set out."""

import sys
from dataclasses import replace

import extras
from data import demo
from data.sampler import ElasticDistributedSampler
from train import main
from utils.distributed.watchdog import Watchdog
from utils.errors import exit_after
from utils.settings.command_line import parse_command_line

original = ElasticDistributedSampler.micro_batch


def without(self, *position):
    """The micro-batch, with another sample of it in the place of sample 5."""
    wanted = original(self, *position)
    other = next(index for index in wanted.indices if index != 5)
    return replace(wanted, indices=tuple(other if index == 5 else index for index in wanted.indices))


def work() -> int:
    """A whole run."""
    config = parse_command_line(sys.argv[1:], demo.SETTINGS, extras.pages())
    ElasticDistributedSampler.micro_batch = without
    return main(config, Watchdog())


exit_after(work)
