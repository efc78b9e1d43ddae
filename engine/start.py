"""What one start of a run has before there is a model.

Tests: tests/unit/engine/test_resolve_precision.py
"""

from dataclasses import dataclass

from models.tasks.base import Task
from utils.distributed.watchdog import Watchdog
from utils.distributed.world import World
from utils.numerics.precision import Precision
from utils.rundir.run import Run
from utils.settings.config import Config


@dataclass(frozen=True)
class Start:
    """Training and evaluation are built from it."""

    config: Config
    world: World
    run: Run
    task: Task
    precision: Precision
    watchdog: Watchdog
