"""What the commands of ask/ have in common before torch is imported: arguments, signals, errors in them.

Tests: tests/end_to_end/test_command_line.py
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from engine.begin import begin_process
from utils.errors import Parser, exit_after

if TYPE_CHECKING:
    from utils.distributed.watchdog import Watchdog


def parser_of(name: str, about: str, *runs: str) -> Parser:
    """The parser of `python -m ask.NAME`, with its run directories and what says where it computes."""
    parser = Parser(f"ask.{name}", about)
    for run in runs:
        parser.add_argument(run.lower(), metavar=run, help="a run directory of train.py")
    parser.add_argument("--data", nargs=len(runs), metavar=("PATH",) * len(runs), default=[None] * len(runs),
                        help="where the data of each run are now; by default where they were")
    parser.add_argument("--device", metavar="NAME", help="cpu, cuda, ...; by default the run's")
    return parser


def begin(parser: Parser) -> tuple[argparse.Namespace, "Watchdog"]:
    """The arguments, and the watchdog, which signals go to. Exits: 0 after --help, 64 on invalid arguments."""
    return parser.parse_args(), begin_process(parser.name)


def answer(main: Callable[[argparse.Namespace, "Watchdog"], int], given: argparse.Namespace,
           watchdog: "Watchdog", parser: Parser) -> NoReturn:
    """Run `main`, and exit with its code, or with that of its error."""
    exit_after(partial(main, given, watchdog), parser.name, killed="ask again",
               out_of_memory="--device cpu computes the same steps in the host's memory, where bits may differ")
