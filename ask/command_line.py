"""What the commands of ask/ have in common before torch is imported: arguments, signals, errors in them."""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.begin import begin_process
from utils.errors import Parser

if TYPE_CHECKING:
    from utils.distributed.watchdog import Watchdog


def parser_of(name: str, about: str, *runs: str) -> Parser:
    """The parser of `python -m ask.NAME`, with its run directories and what says where it computes."""
    parser = Parser(f"python -m ask.{name}", description=about, allow_abbrev=False,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    for run in runs:
        parser.add_argument(run.lower(), metavar=run, help="a run directory of train.py")
    parser.add_argument("--data", metavar="PATH", help="where the run's data are now; by default where they were")
    parser.add_argument("--device", metavar="NAME", help="cpu, cuda, ...; by default the run's")
    return parser


def begin(parser: Parser, argv: Sequence[str]) -> tuple[argparse.Namespace, "Watchdog"]:
    """The arguments, and the watchdog, which signals go to. Exits: 0 after --help, 64 on invalid arguments."""
    given = parser.parse_args(argv)
    return given, begin_process()
