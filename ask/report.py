"""A run on one page, or several side by side: what RUN/report.html says at the end of a run, of runs in any state.

    python -m ask.report RUN                                    # writes report.html into the folder that you are in
    python -m ask.report RUN1 RUN2 RUN3 --output FILE.html

The page is one file: it needs no network, and you can send it. Nothing is computed again.

Tests: extras/report/tests/test_launches.py
"""

import argparse
import sys
from pathlib import Path

from ask.command_line import answer, begin
from utils.errors import Parser

PARSER = Parser("ask.report", __doc__)
PARSER.add_argument("runs", nargs="+", metavar="RUN", help="a run directory of train.py")
PARSER.add_argument("--output", metavar="FILE", default="report.html", help="the page; default: report.html")
PARSER.add_argument("--with-places", action="store_true", help="with the paths of data and weights")

if __name__ == "__main__":  # before torch is imported
    GIVEN, WATCHDOG = begin(PARSER)

from extras.report.page import page
from utils.distributed.watchdog import Watchdog
from utils.errors import say
from utils.output_files import open_output


def main(given: argparse.Namespace, watchdog: Watchdog) -> int:
    """Write the page. Returns the exit code."""
    text = page([Path(run) for run in given.runs], given.with_places)
    with open_output(given.output) as file:
        file.write(text)
    say(given.output, sys.stdout)
    return 0


if __name__ == "__main__":
    answer(main, GIVEN, WATCHDOG, PARSER)
