"""What the training loop works with. The loop itself: train.py; it is built in build.py."""

from collections.abc import Callable
from dataclasses import dataclass

from data.loader import BadSamples
from engine.attempts import Attempts
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
    """What the loop works with; one name for each concern. All that a run is stands in `state`.

    A reader of train.py needs this list alone, and that of Start: all that a step touches is reached from here by name.
    """

    log: Log | SilentLog
    strategy: Strategy
    state: TrainState
    schedule: Callable[[int], float]  # the learning rate of an optimizer step
    feed: Feed
    evaluation: Evaluation
    checkpoints: Checkpoints
    flags: Agreement
    outcome: Outcome
    bad_samples: BadSamples
    attempts: Attempts
    clock: Clock
    profile: Profile
    total_steps: int  # of the run
    last_step: int  # of this start: total_steps, or earlier by --stop-after
