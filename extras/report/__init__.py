"""RUN/report.html at the end of a run: --report on|off."""

from typing import Literal

from utils.settings.option import OPERATIONAL, option, options


@options
class OPTIONS:
    """Records and checkpoints"""

    report: Literal["on", "off"] = option("on", "RUN/report.html at the end of the run", OPERATIONAL, kept=False,
                                          rare=True)
