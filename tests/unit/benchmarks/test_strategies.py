"""benchmarks/strategies.py: what a round without the goal counts."""

from benchmarks.strategies import summary


def test_a_round_that_misses_the_goal_is_shown():
    assert summary([1.5, None, 3.5]) == "2.5 s (1.5 to 3.5) | 2 of 3"
    assert summary([None]) == "- | 0 of 1"
