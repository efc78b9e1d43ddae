"""A worker whose rank 1 crashes in each of the first three starts: torchrun --max-restarts=3 crash_and_meet.py FILE."""

import os
import sys
from pathlib import Path

import torch

from utils.distributed.world import World
from utils.errors import exit_after


def work() -> int:
    """Meet; crash, or gather [start, sum over ranks] and write it to FILE."""
    restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    with World.from_env("cpu") as world:
        total = int(world.all_reduce_sum(torch.tensor([world.rank + 1])))
        if restart < 3 and world.rank == 1:
            os._exit(13)
        starts = world.gather([restart, total])  # fails where rank 1 is gone
        if world.is_main:
            Path(sys.argv[1]).write_text(repr(starts))
    return 0


exit_after(work)
