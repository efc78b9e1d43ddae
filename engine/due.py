"""What is due between two steps: decided in one place, by the position and by flags that all ranks have exchanged.

Tests: tests/unit/engine/test_after_step.py
"""

from typing import NamedTuple

from engine.training import Training


class Due(NamedTuple):
    """What the run awaits where it is; the same on every rank."""

    evaluate: bool  # an evaluation that has not been done; what is saved before it is marked as such
    save: bool  # a checkpoint; by the clock it stays due until there is one
    stop: bool  # this start trains no further step: it was its last one, a stop is agreed, or the run stops early


def what_is_due(t: Training) -> Due:
    """What is due at the run's position, as far as flags have been exchanged."""
    progress, every = t.state.progress, t.config.record.eval_every
    is_boundary = progress.sample_offset == 0 if every == "epoch" else progress.step % every == 0
    return Due(
        evaluate=progress.evaluated_step < progress.step and (is_boundary or progress.step == t.total_steps),
        save=t.flags.save or t.checkpoints.is_due(progress.step),
        stop=t.flags.stop or progress.step >= t.last_step or has_stopped_early(t))


def has_stopped_early(t: Training) -> bool:
    """Whether the last evaluations brought no gain: --early-stop-patience."""
    patience = t.config.run.early_stop_patience
    return patience > 0 and (t.state.progress.without_gain or 0) >= patience


def is_finished(t: Training) -> bool:
    """Whether the run is at its end, evaluated; else this start ends before it."""
    progress = t.state.progress
    return progress.evaluated_step == progress.step and (progress.step == t.total_steps or has_stopped_early(t))
