"""Saves beside the training: the records and RUN/model first, then the checkpoint that refers to them."""

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from engine.training import Training


def save(t: "Training", is_best: bool = False, awaits_evaluation: bool = False) -> None:
    """Start to save; the training goes on while rank 0 writes. Collective.

    is_best: write RUN/model, too. awaits_evaluation: the save after it replaces this one.
    """

    def beside(weights: dict[str, Tensor]) -> None:
        t.log.flush()
        if is_best:
            t.run.replace_folder("model", lambda folder: t.task.save_model(weights, folder))

    t.watchdog.enter("saving", t.checkpoints.limit_s, drains=False)
    t.checkpoints.save(t.state, beside, awaits_evaluation)  # Collective.
    t.throughput.restart()


def wait_for_save(t: "Training") -> None:
    """Wait until what was saved is on disk. Collective. Raises UserError (74) on every rank if that failed."""
    t.watchdog.enter("waiting for the save", t.checkpoints.limit_s, drains=False)
    t.checkpoints.flush()  # Collective.
