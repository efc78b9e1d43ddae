"""What the tests of the watchdog's parts share."""

import time

import pytest


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still; the test adds to clock.now. A sleep adds to it, too."""
    class Clock:
        now = 1000.0

    def sleep(seconds):
        Clock.now += seconds

    monkeypatch.setattr(time, "monotonic", lambda: Clock.now)
    monkeypatch.setattr(time, "sleep", sleep)
    return Clock
