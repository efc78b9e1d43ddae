"""utils/distributed/world.py: what needs no second rank. (What ranks do together: tests/distributed.)"""

import os
import subprocess
import sys
from pathlib import Path

import torch.distributed as dist

from utils.errors import Exit

ROOT = Path(__file__).parents[4]


def test_an_interface_that_is_not_there_is_refused_on_one_machine_too():
    """gloo would fail, in words that look like those of a lost peer. In a process of its own: this one has a group."""
    program = "from utils.distributed.world import World\nfrom utils.errors import exit_after\n"
    done = subprocess.run([sys.executable, "-c", program + "exit_after(lambda: World.from_env('cpu'))"], cwd=ROOT,
                          env=os.environ | {"GLOO_SOCKET_IFNAME": "eth77"}, capture_output=True, text=True)
    assert (done.returncode, "has no network interface eth77; it has lo" in done.stderr) == (Exit.USAGE, True)


def test_ranks_wait_for_each_other_for_a_section_or_hours(world, monkeypatch):
    """Hours for work on all the data; longer than a section for many bytes."""
    limits, barrier = [], dist.monitored_barrier
    monkeypatch.setattr(dist, "monitored_barrier", lambda group, timeout, **options: (
        limits.append(timeout.total_seconds()), barrier(group, timeout=timeout, **options)))
    for wait in (world.everywhere, world.on_rank_zero, lambda work: world.on_rank_zero(work, num_bytes=10**9),
                 lambda work: world.everywhere(work, takes_long=True),
                 lambda work: world.on_rank_zero(work, per_node=True)):
        wait(lambda: None)
    assert limits == [300, 300, 400, 12 * 3600, 12 * 3600]
