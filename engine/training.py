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
    flags: Agreement  # what one rank tells all others: to stop, to save, that a sample cannot be read
    outcome: Outcome  # of the last step: whether its gradient was finite, and its sum arrived as it was sent
    bad_samples: BadSamples
    clock: Clock
    profile: Profile
    total_steps: int  # of the run
    last_step: int  # of this start: total_steps, or earlier by --stop-after
