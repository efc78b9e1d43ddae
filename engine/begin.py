"""The first moments of a start, before torch is imported: --help, typing errors and finished runs answer in 0.3 s."""

from __future__ import annotations  # so that an older Python comes as far as the message

import os
import platform
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from utils.distributed.watchdog import Watchdog
    from utils.settings.config import Config


def begin(argv: Sequence[str], extras: Callable[[], Sequence[Any]]) -> tuple[Config, Watchdog]:
    """The settings of this start, and the watchdog, which signals go to from here on.

    extras: returns the pages of settings of what only watches a training. Exits: 0 after --help and where the run is
    finished, 64 and 66 on what the user got wrong.
    """
    watchdog = begin_process()
    from data import demo  # these need packages
    from utils.rundir.restart import finish_early
    from utils.settings.command_line import parse_command_line

    config = parse_command_line(argv, demo.SETTINGS, extras())
    finish_early(config)
    return config, watchdog


def begin_process(program: str = "train.py") -> Watchdog:
    """The watchdog of this process. Exits with 64 where the system or a package is not what the program needs.

    program: whose name stands before its messages.
    """
    _require_system()
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:  # it was closed (>&-), and the next file would get its number
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
            os.set_inheritable(descriptor, True)  # dup2 does it only if the two numbers differ
            setattr(sys, name, os.fdopen(descriptor, "w"))
    from utils.distributed.preflight import require_numbers, require_packages  # these need Linux and Python 3.11
    from utils.distributed.watchdog import Watchdog
    from utils.errors import escape_what_the_console_lacks, forget_exit_code

    escape_what_the_console_lacks()
    forget_exit_code()
    require_numbers(program)
    watchdog = Watchdog(program)
    require_packages()
    return watchdog


def _require_system() -> None:
    """Exit with 64 (Exit.USAGE, which cannot be imported everywhere) on another system, or where Python is too old.

    A node's first rank says so.
    """
    problem = ""
    if sys.version_info < (3, 11):  # noqa: UP036
        problem = f"this is Python {platform.python_version()}, and train.py needs 3.11 or newer: use another one"
    if sys.platform != "linux":
        problem = (f"this system is {sys.platform}, and train.py needs Linux: use a Linux machine, a container"
                   " (Dockerfile), or WSL 2 on Windows")
    if problem:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"train.py: {problem}", file=sys.stderr)
        raise SystemExit(64)
