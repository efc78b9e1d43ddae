"""A worker that crashes on rank 1 in the middle of the first three starts: torchrun --max-restarts=3 crash_and_meet.py FILE."""

import os
import sys
from pathlib import Path

import torch

from utils.distributed import World

restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
with World.from_env("cpu") as world:
    total = int(world.all_reduce_sum(torch.tensor([world.rank + 1])))
    if restart < 3 and world.rank == 1:
        os._exit(13)
    if restart < 3:
        world.gather(None)  # hangs or fails: rank 1 is gone
    starts = world.gather([restart, total])
    if world.is_main:
        Path(sys.argv[1]).write_text(repr(starts))
