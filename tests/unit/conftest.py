"""What unit tests share: one process is a process group of one, as in a run without torchrun."""

import os
from contextlib import nullcontext
from functools import cache

import pytest


def pytest_pycollect_makemodule() -> None:
    """Called before a file of this folder is imported. The process that gives files to others imports none."""
    prepare()


@cache
def prepare() -> None:
    """What holds for all files; once."""
    import hypothesis
    import torch

    # Shared machines pause; every run draws anew.
    hypothesis.settings.register_profile("lockstep", deadline=None, database=None, max_examples=30)
    hypothesis.settings.load_profile("lockstep")
    torch.set_num_threads(1)  # tensors here are small


def pytest_itemcollected(item: pytest.Item) -> None:
    """Called for tests of this folder alone."""
    item.add_marker("unit")


@pytest.fixture(scope="session")
def world():
    """A real World of one process on the CPU. One per session, because a process has one process group at a time."""
    import torch.distributed as dist

    from utils.distributed.world import World

    from_env = World.from_env

    def of_a_fork() -> None:  # which has no threads of the group, and makes its own
        World.from_env, dist.group.WORLD = from_env, None

    with from_env("cpu") as world:
        os.environ.pop("GLOO_SOCKET_IFNAME", None)  # which it sets; launches of other tests inherit what is here
        World.from_env = lambda device: nullcontext(world)  # models.predict, in tests that call it in this process
        os.register_at_fork(after_in_child=of_a_fork)
        yield world
