"""Room on the disk: warn at the start, before it runs out."""

import shutil
import socket

from utils.rundir.run import Run

GB = 1e9


def warn_of_room(run_bytes: int, run: Run) -> None:
    """Warn of a disk that may be too small, on rank 0. run_bytes: Checkpoints.most_bytes."""
    if not run.writes:
        return
    have = shutil.disk_usage(run.path).free  # and what the run has taken already
    have += sum(file.stat().st_size for file in run.path.glob("checkpoints/*/*"))
    if have < run_bytes:
        run.note(f"warning: {socket.gethostname()}: {run.path} has room for {have / GB:.3g} GB, but its checkpoints and"
                 f" RUN/model may take {run_bytes / GB:.3g} GB: use a smaller --keep, or --run-dir on another disk")
