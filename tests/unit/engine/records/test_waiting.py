"""engine/records/waiting.py: how many loading processes would end the wait."""

import pytest

from engine.records.waiting import workers_needed


@pytest.mark.parametrize("wait, workers, expected", [
    (0.5, 0, 1), (0.75, 0, 3), (0.5, 1, 2), (0.5, 4, 8), (0.21, 4, 6), (1.0, 1, 1000)])
def test_the_number_of_workers_follows_from_the_measured_rates(wait, workers, expected):
    """Half the time waiting with four: what they load in a second is computed in half of one, so twice as many."""
    assert workers_needed(wait, workers) == expected
