"""engine/memory.py: sizes that fit are found by trying. Devices whose memory is small: tests/device."""

import gc
import weakref

import pytest
import torch

from engine.memory import resolve_size
from utils.errors import UserError


class Room:
    """Attempts that fit up to a size."""

    def __init__(self, room: int, error: type[Exception] = torch.OutOfMemoryError):
        self.room, self.error, self.tried, self.held = room, error, [], []

    def __call__(self, size: int) -> None:
        self.tried.append(size)
        allocated = torch.zeros(size)
        self.held.append(weakref.ref(allocated))
        if size > self.room:
            raise self.error("out of memory. Tried to allocate 2.00 MiB\nmore")


class OneRank:
    """A World of one process on a device that is not the CPU; `peers`: what other ranks say."""

    device = torch.device("meta")

    def __init__(self, *peers: str):
        self.peers = peers

    def gather(self, value: str) -> list[str]:
        return [value, *self.peers]


@pytest.mark.parametrize("size, room, fit, tried", [
    (64, 64, 64, [64]), (64, 63, 32, [64, 32]), (48, 5, 3, [48, 24, 12, 6, 3]), (5, 1, 1, [5, 2, 1])])
def test_the_largest_fit_is_found_by_halving(size, room, fit, tried):
    attempt = Room(room)
    assert resolve_size(size, attempt, True, OneRank()) == fit and attempt.tried == tried


def test_an_attempt_that_fails_holds_no_memory_at_the_next():
    attempt = Room(8)
    gc.disable()
    try:
        resolve_size(32, attempt, True, OneRank())
        assert [held() is None for held in attempt.held] == [True] * 3
    finally:
        gc.enable()


def test_another_error_is_no_lack_of_memory():
    with pytest.raises(ZeroDivisionError):
        resolve_size(32, Room(8, ZeroDivisionError), True, OneRank())


def test_a_free_size_gives_way_and_a_given_one_is_refused():
    assert resolve_size(32, Room(9), True, OneRank()) == 8
    expected = r"micro-batches of 32 samples do not fit .* 2.00 MiB\); --micro-batch-size 8 fits"
    with pytest.raises(UserError, match=expected):
        resolve_size(32, Room(9), False, OneRank())


def test_a_size_that_fits_nowhere_is_refused_though_it_is_free():
    with pytest.raises(UserError, match="one sample does not fit: use a smaller --model"):
        resolve_size(4, Room(0), True, OneRank())


def test_a_rank_with_room_gives_way_to_one_without():
    attempt = Room(32)
    with pytest.raises(UserError, match=r"\(there: no room\)"):
        resolve_size(2, attempt, True, OneRank("", "there: no room"))
    assert attempt.tried == [2, 1]


def test_memory_of_the_cpu_is_not_tried_out():
    world = OneRank()
    world.device = torch.device("cpu")
    assert resolve_size(32, Room(0), False, world) == 32
