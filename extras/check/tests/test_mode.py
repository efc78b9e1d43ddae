"""mode.py: what a moment of training says of all of it."""

import pytest

from extras.check.mode import speeds

pytestmark = pytest.mark.unit


def test_figures_are_means_over_time_not_over_steps():
    """Nine steps of 100 samples in 0.1 s, and one of 10 in 9.1 s, 9 s of which it waits for data: 910 samples in 10 s.
    """
    steps = [{"samples": 100 * step, "samples_per_s": 1000.0, "data_wait": 0.0} for step in range(1, 10)]
    steps.append({"samples": 910, "samples_per_s": 10 / 9.1, "data_wait": 9 / 9.1})
    assert speeds(steps) == pytest.approx([91, 0.9, 0])
