"""utils/rundir/digests.py: what samples were when they were used, and which of them have changed."""

import hashlib

import pytest
import torch

from tests.unit.utils.rundir.conftest import build_state, save, train_step
from utils.rundir.checkpoint import SAMPLES
from utils.rundir.digests import UNKNOWN, Digests, differing, summary


def digest(content):
    return hashlib.sha256(str(content).encode()).digest()


@pytest.fixture
def digests():
    """Of nine samples; 1, 4 and 8 were used."""
    found = Digests(9, lambda index: f"{index}.png")
    found.add({index: digest(index) for index in (1, 8)})
    found.add({4: digest(4)})
    return found


@pytest.mark.parametrize("read, names", [
    ({}, []), ({4: digest(4), 1: digest(1)}, []), ({8: digest(1), 1: digest(8)}, ["8.png", "1.png"]),
    ({4: bytes([1]) + digest(4)[1:]}, ["4.png"]), ({4: digest(4)[:-1] + b"\0"}, ["4.png"]),
    ({0: digest("any")}, []), ({4: UNKNOWN}, [])])
def test_what_is_not_what_it_was_is_named(digests, read, names):
    """A sample that was not used yet may be any, and one that cannot be read is another's business."""
    assert digests.changed(read) == names


@pytest.mark.parametrize("most, expected", [(3, [1, 4, 8]), (128, [1, 4, 8]), (2, [1, 8]), (1, [1])])
def test_some_that_were_used_are_always_the_same_ones(digests, most, expected):
    assert digests.some_used(most) == expected


def test_of_none_that_was_used_there_are_none():
    assert Digests(9).some_used(128) == []


def test_a_later_start_knows_what_was_noted(digests, world):
    later, table = Digests(9, str), digests.joined(world)
    later.load(table)
    assert table.shape == (9, 32) and table[4].numpy().tobytes() == digest(4)
    assert later.changed({4: digest(8), 8: digest(8)}) == ["4"]
    assert differing(later.joined(world), table) == []
    later.add({4: digest("other"), 5: digest(5)})
    assert differing(later.joined(world), table) == [4]  # only one of them has used 5


class Others:
    """A world with another rank, which has noted `theirs` of the sample 4."""

    def __init__(self, theirs):
        self._theirs = theirs

    def all_reduce_or(self, rows):
        rows[4] |= torch.frombuffer(bytearray(self._theirs), dtype=torch.uint8)

    def gather(self, value):
        return [value, []]


def test_two_ranks_that_used_different_samples_of_one_name_end_the_run(digests):
    assert digests.joined(Others(UNKNOWN))[4].numpy().tobytes() == digest(4)
    with pytest.raises(Exception, match=r"4\.png is not the same on all nodes"):
        digests.joined(Others(digest("another file")))


def test_a_checkpoint_keeps_them_and_one_without_them_binds_from_then_on(world, checkpoints_of, folder):
    state = build_state(world)
    state.digests["train"] = Digests(9)
    train_step(state)
    state.digests["train"].add({3: digest(3)})
    save(checkpoints_of()[0], state)
    [saved] = folder.iterdir()

    other = build_state(world)
    other.digests["train"] = Digests(9)
    assert checkpoints_of(2)[0].restore(other)
    assert other.digests["train"].changed({3: digest(4)}) == ["3"] and other.noted_since == 0
    samples = other.samples()
    assert summary(samples) == {"since": 0, "train": hashlib.sha256(samples["train"].numpy().tobytes()).hexdigest()}

    weights, values, trainer = state.weights(), state.state_dict(), {"progress": {"step": 7}, "best": {}}
    older = build_state(world)
    older.digests["train"] = Digests(9)
    older.load(weights, values, trainer)  # of a version without samples.safetensors
    assert older.noted_since == 7 and older.digests["train"].some_used(9) == []
    assert (saved / SAMPLES).exists()


def test_what_was_added_last_is_forgotten(world):
    digests = Digests(3)
    digests.add({0: b"a" * 32})
    before = digests.joined(world).clone()
    digests.add({2: b"c" * 32, 1: b"b" * 32})
    digests.undo()
    assert digests.joined(world).equal(before)
