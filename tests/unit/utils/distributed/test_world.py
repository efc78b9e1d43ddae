"""utils/distributed/world.py: what needs no second rank. (What ranks do together: tests/distributed.)"""

import torch.distributed as dist


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
