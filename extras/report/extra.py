"""RUN/report.html at the end of a run.

Tests: extras/report/tests/test_launches.py
"""

from collections.abc import Mapping

from engine.training import Extra, Training
from extras.report import OPTIONS
from extras.report.page import write_report


class EXTRA(Extra):
    """The page of the run."""

    def finished(self, t: Training) -> Mapping[str, str]:
        """Where it is."""
        return {"its report": write_report(t.run.path)} if t.config.extra(OPTIONS).report == "on" else {}
