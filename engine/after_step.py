"""What happens between two steps: evaluations, saves and stops, where they are due."""

from engine.best import update_best
from engine.records.log import EMA
from engine.records.steps import close_epoch, note_coverage
from engine.saving import save, wait_for_save
from engine.training import Training
from engine.wrong import end_if_wrong


def after_step(t: Training) -> bool:
    """Evaluate or save where that is due after this step. Returns whether to leave the epoch. Collective."""
    step = t.state.progress.step
    is_epoch_over = t.state.progress.sample_offset == 0
    if is_epoch_over or is_evaluation_due(t) or t.flags.save or t.checkpoints.is_due(step) or is_over(t):
        end_if_wrong(t, waits=True)  # Collective: no rank may be ahead of a stop that another one knows of
    is_save_due = t.flags.save or t.checkpoints.is_due(step)  # asked again: by the clock it still is
    if t.flags.error:
        t.checkpoints.flush()  # Collective; raises the error of the last save on every rank
    if is_epoch_over:
        close_epoch(t)  # Collective.
        if not is_evaluation_due(t):
            note_coverage(t, evaluated=None)  # Collective.
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
    with t.clock.on("evaluation"):
        values, averaged = t.evaluation.run(), {}  # Collective.
        if values is not None and t.state.averages.values:  # --ema-decay
            with t.state.averages.swapped_in():
                averaged = t.evaluation.run()  # Collective.
        t.strategy.module.train()
        if values is None or averaged is None:
            return
        of_average = {EMA + name: value for name, value in averaged.items() if isinstance(value, float)}
        record = t.state.progress.position(t.feed.plan.num_samples) | values | of_average
        t.extras.recorded(t, t.log.evaluation(record))
        if t.state.progress.sample_offset == 0:
            note_coverage(t, values["evaluated"])  # Collective.
        best = update_best(t, values, averaged)  # Collective.
    save(t, best)  # Collective.
