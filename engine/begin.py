"""The first moments of a start, before torch is imported: --help, typing errors and finished runs answer in 0.3 s."""

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from utils.distributed.watchdog import Watchdog
    from utils.settings.config import Config


def begin(argv: Sequence[str]) -> tuple["Config", "Watchdog"]:
    """The settings of this start, and the watchdog, which signals go to from here on.

    Exits: 0 after --help and where the run is finished, 64 and 66 on what the user got wrong.
    """
    watchdog = begin_process()
    from data import demo  # these need packages
    from utils.rundir.restart import finish_early
    from utils.settings.command_line import parse_command_line

    config = parse_command_line(argv, demo.SETTINGS)
    finish_early(config)
    return config, watchdog


def begin_process(program: str = "train.py") -> "Watchdog":
    """The watchdog of this process. Exits with 64 where the system or a package is not what the program needs.

    program: whose name stands before its messages.
    """
    _require_linux()
    from utils.distributed.preflight import require_packages  # these need Linux
    from utils.distributed.watchdog import Watchdog
    from utils.errors import forget_exit_code

    forget_exit_code()
    watchdog = Watchdog(program)
    require_packages()
    return watchdog


def _require_linux() -> None:
    """Exit with 64 (Exit.USAGE, which cannot be imported everywhere) on another system. A node's first rank says so."""
    if sys.platform != "linux":
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"train.py: this system is {sys.platform}, and train.py needs Linux: use a Linux machine, a container"
                  " (Dockerfile), or WSL 2 on Windows", file=sys.stderr)
        raise SystemExit(64)
