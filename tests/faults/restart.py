"""A rank that meets the others and crashes, start after start: torchrun --max-restarts=N restart.py FILE N.

Every rank appends a line to FILE once the group stands: start, rank, when its imports were done, when the group stood.
"""

import os
import random
import sys
import time

import torch

from utils.distributed.world import World

imported = time.monotonic()  # the same clock for all processes of a machine
restart, last = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(sys.argv[2])
with World.from_env("cpu") as world:
    assert int(world.all_reduce_sum(torch.tensor([world.rank + 1]))) == world.world_size * (world.world_size + 1) // 2
    stood = time.monotonic()
    with open(sys.argv[1], "a") as file:
        file.write(f"{restart} {world.rank} {imported} {stood}\n")
    world.all_reduce_sum(torch.zeros(1))  # everyone has written
    if restart < last and world.rank == random.Random(restart).randrange(world.world_size):
        os._exit(13)
    if restart < last:
        time.sleep(60)  # until torchrun ends it
os._exit(0)
