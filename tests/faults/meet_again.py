"""Forked workers that meet and crash, start after start, on one store: meet_again.py STARTS PORT.

Prints the seconds that each start took. The store at PORT outlives the workers, as torchrun's does, and each start
finds what all before have left in it. With the imports of each start, under torchrun: restart.py.
"""

import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path

from utils.distributed.world import World


def meet_in_a_fork(rank: int, world_size: int, port: int, late_s: float, file: Path) -> int:
    """The process id of a worker that meets the others, writes when it was ready and when it met them, and crashes."""
    if child := os.fork():
        return child
    code = 1
    try:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank),
                          LOCAL_WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
                          TORCHELASTIC_USE_AGENT_STORE="True")
        time.sleep(late_s)
        ready = time.monotonic()
        told = World.from_env("cpu").gather(rank)
        stood = time.monotonic()
        if told == list(range(world_size)):
            file.write_text(f"{ready} {stood}")
            code = 13
    finally:
        os._exit(code)


draw, took_s = random.Random(0), []
with tempfile.TemporaryDirectory() as folder:
    for start in range(int(sys.argv[1])):
        world_size = draw.choice((2, 3, 4))
        late_s = [draw.choice((0, 0, draw.uniform(0, 0.2))) for _ in range(world_size)]
        files = [Path(folder) / f"{start}-{rank}" for rank in range(world_size)]
        workers = [meet_in_a_fork(rank, world_size, int(sys.argv[2]), late_s[rank], files[rank])
                   for rank in range(world_size)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) for worker in workers]
        if codes != [13] * world_size:
            sys.exit(f"start {start} on {world_size}: {codes}")
        times = [list(map(float, file.read_text().split())) for file in files]
        took_s.append(max(stood for _, stood in times) - max(ready for ready, _ in times))
print(json.dumps(took_s))
