"""The first moments of a process, before torch is imported: signals, packages, settings, a finished run.

--help, typing errors and finished runs answer in 0.3 s.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from utils.distributed.preflight import require_packages
from utils.distributed.watchdog import Watchdog
from utils.errors import begin_start

if TYPE_CHECKING:
    from utils.settings.config import Config


def begin(argv: Sequence[str]) -> tuple["Config", Watchdog]:
    """The settings of this start, and the watchdog, which signals go to from here on.

    Exits: 0 after --help and where the run is finished, 64 and 66 on what the user got wrong.
    """
    begin_start()
    watchdog = Watchdog()
    require_packages()
    from data import demo  # these need packages
    from utils.rundir.restart import finish_early
    from utils.settings.command_line import parse_command_line

    config = parse_command_line(argv, demo.SETTINGS)
    finish_early(config)
    return config, watchdog
