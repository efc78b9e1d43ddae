"""What happens between two steps: evaluations, saves and stops, where they are due."""

from dataclasses import replace
from typing import Any

from engine.log import EMA
from engine.nonfinite import judge_last_step
from engine.records import position
from engine.saving import save, wait_for_save
from engine.training import Training
from models.tasks.base import Task
from utils.rundir.checkpoint import Progress


def after_step(t: Training) -> bool:
    """Evaluate or save where that is due after this step. Returns whether to leave the epoch. Collective."""
    step = t.state.progress.step
    is_save_due = t.flags.save or t.checkpoints.is_due(step)
    if is_evaluation_due(t) or is_save_due or is_over(t):
        t.flags.wait()  # Collective: no rank may be ahead of a stop that another one knows of
        judge_last_step(t)  # Collective if the gradient was not finite.
    if t.flags.error:
        t.checkpoints.flush()  # Collective; raises the error of the last save on every rank
    if is_over(t) and step < t.total_steps:
        return True  # train() saves
    if is_evaluation_due(t):
        evaluate_and_save(t)  # Collective.
    elif is_save_due:
        save(t)  # Collective.
    return is_over(t)


def is_over(t: Training) -> bool:
    """Whether this start trains no further step: it was its last one, a stop is agreed, or the run stops early."""
    return t.flags.stop or t.state.progress.step >= t.last_step or has_stopped_early(t)


def has_stopped_early(t: Training) -> bool:
    """Whether the last evaluations brought no gain: --early-stop-patience."""
    patience = t.config.run.early_stop_patience
    return patience > 0 and (t.state.progress.without_gain or 0) >= patience


def is_finished(t: Training) -> bool:
    """Whether the run is at its end, evaluated; else this start ends before it."""
    progress = t.state.progress
    return progress.evaluated_step == progress.step and (progress.step == t.total_steps or has_stopped_early(t))


def is_evaluation_due(t: Training) -> bool:
    """Whether the run is at a position where an evaluation is due that has not been done."""
    progress, every = t.state.progress, t.config.record.eval_every
    is_boundary = progress.sample_offset == 0 if every == "epoch" else progress.step % every == 0
    return progress.evaluated_step < progress.step and (is_boundary or progress.step == t.total_steps)


def evaluate_and_save(t: Training) -> None:
    """Save; evaluate; keep the model if it is the best; save again. Collective.

    A stop abandons the evaluation: the next start does it first.
    """
    save(t, awaits_evaluation=True)  # Collective.
    # Collective. Nothing is lost, whatever ends the evaluation; and it forks while no thread writes.
    wait_for_save(t)
    values = evaluate(t)  # Collective.
    t.strategy.module.train()
    if values is None:
        return
    t.log.evaluation(position(t.state.progress, t.feed.plan.num_samples) | values)

    # the better of the weights and their average
    task, best = t.task, t.state.best
    found = {"value": values[task.best]}
    if EMA + task.best in values and is_better(task, values[EMA + task.best], found["value"]):
        found = {"value": values[EMA + task.best], "weights": "ema"}

    # state
    t.state.progress = after_evaluation(t, found["value"])
    is_best = not best or is_better(task, found["value"], best["value"])
    if is_best:
        t.state.best = {"step": t.state.progress.step, "metric": task.best, **found}
    save(t, is_best)  # Collective.


def evaluate(t: Training) -> dict[str, Any] | None:
    """The metrics of the weights, with --ema-decay also of their average; None if a stop was agreed. Collective."""
    values = t.evaluation.run()  # Collective.
    if values is None or not t.state.averages.values:
        return values
    with t.state.averages.swapped_in():
        averaged = t.evaluation.run()  # Collective.
    return averaged and values | {EMA + name: value for name, value in averaged.items() if isinstance(value, float)}


def is_better(task: Task, value: float, other: float, min_delta: float = 0.0) -> bool:
    """Whether `value` of the metric task.best is better than `other` by more than min_delta."""
    return value > other + min_delta if task.best_is_high else value < other - min_delta


def after_evaluation(t: Training, value: float) -> Progress:
    """The position after an evaluation that gave `value`."""
    progress = replace(t.state.progress, evaluated_step=t.state.progress.step)
    if not t.config.run.early_stop_patience:
        return progress
    if progress.gain is None or is_better(t.task, value, progress.gain, t.config.run.early_stop_min_delta):
        return replace(progress, gain=value, without_gain=0)
    return replace(progress, without_gain=progress.without_gain + 1)
