"""A temporary folder that all ranks share, in the place of a run directory: a run that exists stays as it is.

Tests: tests/end_to_end/test_replay.py
"""

import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from utils.distributed.world import World
from utils.errors import Exit, UserError
from utils.files import wait_to_see


@contextmanager
def scratch_folder(world: World, parent: Path | None = None) -> Iterator[Path]:
    """A temporary folder for all ranks, which goes whatever ends this process. Collective. Raises UserError (73).

    parent: where it is made, a place that --run-dir names; None: TMPDIR.
    """
    folder = Path(world.on_rank_zero(lambda: tempfile.mkdtemp(prefix="lockstep-", dir=parent)))  # Collective.
    remover = None
    if world.is_main:  # it waits for the end of its input: this process's own end, even by a SIGKILL
        remover = subprocess.Popen(["sh", "-c", 'cat; rm -rf "$0"', folder], stdin=subprocess.PIPE,
                                   start_new_session=True)
    try:
        world.everywhere(lambda: require_seen(folder, "--run-dir" if parent else "TMPDIR"))  # Collective.
        yield folder
    finally:
        if remover:
            shutil.rmtree(folder, ignore_errors=True)
            remover.stdin.close()


def require_seen(folder: Path, named_by: str) -> None:
    """Raise UserError (73) if this node does not see a folder that rank 0 has made."""
    if not wait_to_see(folder.is_dir, folder):
        raise UserError(f"{socket.gethostname()} does not see {folder} of rank 0's node: on several nodes, {named_by}"
                        " must name a folder that all of them share", Exit.CANNOT_CREATE)
