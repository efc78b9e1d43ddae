import pytest

from utils.rundir.coverage import Coverage


@pytest.mark.parametrize(("indices", "expected"), [([], 0), ([0], 1), ([7, 8, 15, 16], 4), ([3, 3, 3], 1),
                                                   (range(17), 17)])
def test_different_samples_are_counted_once(world, indices, expected):
    coverage = Coverage(17)
    coverage.add(indices)
    assert coverage.count(world) == expected


def test_another_epoch_begins_with_none(world):
    coverage = Coverage(9)
    coverage.add(range(9), epoch=0)
    coverage.add([8], epoch=1)
    assert coverage.count(world) == 1


def test_a_resumed_epoch_counts_what_came_before(world):
    before, after = Coverage(9), Coverage(9)
    before.add([0, 1, 8], epoch=4)
    after.load(before.state_dict(world))
    after.add([2, 3], epoch=4)
    assert after.count(world) == 5


def test_what_was_added_last_is_forgotten_also_across_epochs(world):
    coverage = Coverage(9)
    coverage.add(range(9), epoch=0)
    coverage.add([8], epoch=1)
    coverage.undo()
    assert (coverage.count(world), coverage.state_dict(world)["epoch"]) == (9, 0)
