"""What the training loop works with. The loop itself: train.py; it is built in build.py."""

from collections.abc import Callable
from dataclasses import dataclass

from data.loader import BadSamples
from engine.evaluation import Evaluation
from engine.feed import Feed
from engine.records.log import Log, SilentLog
from engine.records.profile import Profile
from engine.start import Start
from engine.step import Outcome
from utils.distributed.agreement import Agreement
from utils.rundir.checkpoint import Checkpoints
from utils.rundir.clock import Clock
from utils.rundir.state import TrainState
from utils.strategies.base import Strategy


@dataclass(frozen=True, kw_only=True)
class Training(Start):
    """What the loop works with, one name for each concern. What a checkpoint saves is in `state`.

    Everything that a step touches is one of these names, or one of Start's.
    """

    log: Log | SilentLog
    strategy: Strategy
    state: TrainState
    schedule: Callable[[int], float]  # the learning rate of an optimizer step
    feed: Feed
    evaluation: Evaluation
    checkpoints: Checkpoints
    flags: Agreement  # what any rank raises and all act on: a stop, a save, its error, a bad sample, a wrong step
    outcome: Outcome  # what this rank saw of the last steps; all ranks judge them together, in wrong.py
    bad_samples: BadSamples
    clock: Clock
    profile: Profile
    total_steps: int  # of the run
    last_step: int  # of this start: total_steps, or earlier by --stop-after
