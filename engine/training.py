"""What the training loop works with, and the moments at which extras may look on. The loop itself: train.py."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from data.batch import GlobalBatch
from data.loader import BadSamples
from engine.evaluation import Evaluation
from engine.feed import Feed
from engine.records.log import Log, SilentLog
from engine.start import Start
from engine.step import Outcome
from utils.distributed.agreement import Agreement
from utils.errors import first_line
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
    extras: "Extras"
    total_steps: int  # of the run
    last_step: int  # of this start: total_steps, or earlier by --stop-after


class Extra:
    """Something that looks on at a training (extras/). Nothing in engine/ names one.

    It does nothing at any of these moments; a subclass defines those that it needs. It changes no state, order or
    course of the run. It may raise UserError where every rank raises it alike: asked, opened, summed, stepped.
    """

    def asked(self, start: Start) -> None:
        """Before anything is built: whether the settings allow what the extra does. Every rank; may be collective."""

    def opened(self, t: Training) -> None:
        """After the warm-up, before the first step of a start. Every rank; may be collective."""

    def began(self, t: Training) -> None:
        """After opened: what there is to show. Rank 0."""

    def summed(self, t: Training, batch: GlobalBatch, losses: Tensor) -> None:
        """The gradients of a step are summed, and not used yet. Every rank; may be collective.

        losses: [micro-batches of all ranks] float64, this rank's filled in.
        """

    def stepped(self, t: Training) -> None:
        """An optimizer step is done. Every rank; may be collective."""

    def recorded(self, record: Mapping[str, Any]) -> Iterable[str]:
        """Lines for the console about a record of metrics.jsonl that was just written. Rank 0."""
        return ()

    def exported(self, t: Training, step: int, values: Mapping[str, Any], folder: Path) -> None:
        """RUN/model was written into `folder`, which gets its name afterwards. Rank 0, in a thread.

        values: of the evaluation at `step`. README.md is the only file that may be written: the run's chain hashes all
        others.
        """

    def finished(self, t: Training) -> Mapping[str, str]:
        """For the closing lines of a finished run: {what it is: where it is}. Rank 0."""
        return {}

    def closed(self) -> None:
        """The start is over, maybe by an error, and maybe before `opened`. Every rank."""


class Extras:
    """Calls each extra at each moment. What goes wrong on rank 0 alone becomes a note: the run is whole without it."""

    def __init__(self, extras: Sequence[Extra]):
        self._extras, self._noted = extras, set[str]()

    def opened(self, t: Training) -> None:
        """Collective."""
        for extra in self._extras:
            extra.opened(t)
        if t.run.writes:
            self._each(t, "began", t)

    def summed(self, t: Training, batch: GlobalBatch, losses: Tensor) -> None:
        """Collective."""
        for extra in self._extras:
            extra.summed(t, batch, losses)

    def stepped(self, t: Training) -> None:
        """Collective."""
        for extra in self._extras:
            extra.stepped(t)

    def recorded(self, t: Training, record: Mapping[str, Any] | None) -> None:
        """Print what the extras say about a record. None: this rank writes none."""
        if record is not None:
            self._each(t, "recorded", record, read=lambda lines: [*map(t.log.note, lines)])

    def exported(self, t: Training, step: int, values: Mapping[str, Any], folder: Path) -> None:
        """Rank 0, in a thread."""
        self._each(t, "exported", t, step, values, folder)

    def finished(self, t: Training) -> dict[str, str]:
        """Rank 0."""
        places: dict[str, str] = {}
        self._each(t, "finished", t, read=places.update)
        return places

    def closed(self, t: Training) -> None:
        """Every rank."""
        self._each(t, "closed")

    def _each(self, t: Training, moment: str, *about: Any, read: Callable[[Any], Any] = lambda answer: None) -> None:
        """Call this moment of each extra, and read its answer; note each error once."""
        for extra in self._extras:
            try:
                read(getattr(extra, moment)(*about))
            except Exception as error:  # whatever it is
                name = type(extra).__module__.removesuffix(".extra").replace(".", "/")
                text = f"{name} failed ({type(error).__name__}: {first_line(error)}); the run is whole without it"
                if text not in self._noted:
                    t.log.note(text)
                self._noted.add(text)
