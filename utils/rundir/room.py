"""Room on the disk and in shared memory: warn at the start, before it runs out."""

import shutil
import socket
from pathlib import Path

from utils.distributed.world import World
from utils.rundir.run import Run

SHARED_MEMORY = Path("/dev/shm")
PREFETCH = 2  # items that a data loading process keeps ready (torch's default); it works on one more
GB = 1e9


def warn_of_room(run_bytes: int, item_bytes: int, workers: int, run: Run, world: World) -> None:
    """Warn of a disk or a shared memory that may be too small. Collective.

    run_bytes: Checkpoints.most_bytes. item_bytes: what a data loading process returns at a time. workers: such
    processes of each rank.
    """
    found = []

    # disk: room that is free, or that the run has taken already
    if world.is_main:
        have = shutil.disk_usage(run.path).free
        have += sum(file.stat().st_size for file in run.path.glob("checkpoints/*/*"))
        if have < run_bytes:
            found.append(f"{run.path} has room for {have / GB:.3g} GB, but its checkpoints and RUN/model may take"
                         f" {run_bytes / GB:.3g} GB: use a smaller --keep, or --run-dir on another disk")

    # shared memory of each node
    needed = workers * (PREFETCH + 1) * item_bytes * world.local_world_size
    if world.local_rank == 0 and SHARED_MEMORY.exists() and (free := shutil.disk_usage(SHARED_MEMORY).free) < needed:
        found.append(f"{SHARED_MEMORY} has {free / GB:.3g} GB free, and {world.local_world_size} x {workers} data"
                     f" loading processes may take {needed / GB:.3g} GB: use docker run --ipc=host (or"
                     " --shm-size), or fewer --workers")

    for host, findings in world.gather([socket.gethostname(), found]):  # Collective.
        for finding in findings:
            run.note(f"warning: {host}: {finding}")
