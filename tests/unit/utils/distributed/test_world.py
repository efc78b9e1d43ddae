"""utils/distributed/world.py: what needs no second rank. (What ranks do together: tests/distributed.)"""

import pytest
import torch.distributed as dist

from utils.distributed.world import World, write_flight_record
from utils.errors import UserError


def test_an_interface_that_is_not_there_is_refused_on_one_machine_too(monkeypatch):
    """gloo would fail, in words that look like those of a lost peer."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth77")
    with pytest.raises(UserError, match=r"GLOO_SOCKET_IFNAME=eth77: .* has no network interface eth77; it has lo"):
        World.from_env("cpu")


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


def test_without_nccl_there_is_no_flight_record(world, tmp_path):
    assert (write_flight_record(tmp_path / "flight-record", 0), list(tmp_path.iterdir())) == ("", [])


def test_a_flight_record_is_what_torch_gives_in_a_file_of_this_rank(world, tmp_path, monkeypatch):
    """The call is torch's own, which gives an empty record here; that NCCL is the backend is played."""
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    written = write_flight_record(tmp_path / "flight-record", 3)
    assert written == str(tmp_path / "flight-record" / "rank_3")
    assert (tmp_path / "flight-record" / "rank_3").stat().st_size > 0
