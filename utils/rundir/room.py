"""Room on the disk and in shared memory, looked at before it runs out."""

import shutil
import socket
from collections.abc import Callable
from pathlib import Path

from utils.distributed.world import World

SHARED_MEMORY = Path("/dev/shm")
PREFETCH = 2  # items that a data loading process keeps ready (torch's default); one more is on its way
STATES = 3  # times the weights: a checkpoint with Adam's two averages
GB = 1e9


def warn_of_room(run: Path, weight_bytes: int, keep: int, item_bytes: int, workers: int, world: World, note: Callable[[str], None]) -> None:
    """Tell of a disk or a shared memory that may not do. Collective.

    run: where checkpoints go; so many stay. item_bytes: what a data loading process hands over at a time; workers: of each rank.
    """
    found = []
    if world.is_main:
        have = shutil.disk_usage(run).free + sum(file.stat().st_size for file in run.glob("checkpoints/*/*"))
        if have < (needed := ((keep + 1) * STATES + 1) * weight_bytes):  # one being written; RUN/model
            found.append(f"{run} has room for {have / GB:.3g} GB, and {keep} checkpoints, one more and RUN/model may take"
                         f" {needed / GB:.3g}: use a smaller --keep, or --run-dir on another disk")
    needed = workers * (PREFETCH + 1) * item_bytes * world.local_world_size
    if world.local_rank == 0 and SHARED_MEMORY.exists() and (free := shutil.disk_usage(SHARED_MEMORY).free) < needed:
        found.append(f"{SHARED_MEMORY} has {free / GB:.3g} GB free, and {world.local_world_size} x {workers} data loading processes may"
                     f" take {needed / GB:.3g}: docker run --ipc=host (or --shm-size), or --workers 0")
    for host, told in world.gather([socket.gethostname(), found]):
        for finding in told:
            note(f"warning: {host}: {finding}")
