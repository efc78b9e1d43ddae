"""Saves beside the training: the records, RUN/model and RUN/eval first, then the checkpoint that refers to them."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from engine.due import what_is_due
from engine.records.evaluation_files import write_evaluation
from engine.training import Training
from utils.rundir.snapshot import Beside


def save(t: Training, best: Mapping[str, Any] | None = None) -> None:
    """Start to save; the training goes on while rank 0 writes. Collective.

    best: the values of this step's evaluation if it is the best so far: write RUN/model and RUN/eval, too.
    """
    step = t.state.progress.step

    def write(weights: dict[str, Tensor]) -> None:
        t.log.flush()
        if best:
            t.run.replace_folder("model", partial(write_model, weights))
        if best and "rows" in best:
            t.run.replace_folder("eval", partial(write_evaluation, t.task, step, best))

    def write_model(weights: dict[str, Tensor], folder: Path) -> None:
        t.task.save_model(weights, folder)
        t.extras.exported(t, step, best, folder)

    beside = Beside(t.log.written(), write, has_model=bool(best))
    t.watchdog.enter("saving", t.checkpoints.limit_s, drains=False)
    with t.clock.on("checkpoints"):
        t.checkpoints.save(t.state, beside, awaits_evaluation=what_is_due(t).evaluate)  # Collective.


def wait_for_save(t: Training) -> None:
    """Wait until what was saved is on disk. Collective. Raises UserError (74) on every rank if that failed."""
    t.watchdog.enter("waiting for the save", t.checkpoints.limit_s, drains=False)
    with t.clock.on("checkpoints"):
        t.checkpoints.flush()  # Collective.
