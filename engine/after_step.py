"""What happens between two steps: evaluations, saves and stops, where they are due."""

from engine.best import update_best
from engine.due import what_is_due
from engine.records.log import EMA
from engine.records.steps import close_epoch, note_coverage
from engine.saving import save, wait_for_save
from engine.training import Training
from engine.wrong import end_if_wrong


def after_step(t: Training) -> bool:
    """Evaluate, save or stop where that is due after this step. Returns whether to leave the epoch. Collective."""
    is_epoch_over = t.state.progress.sample_offset == 0
    if is_epoch_over or any(what_is_due(t)):
        end_if_wrong(t, waits=True)  # Collective: no rank may be ahead of a stop that another one knows of
    due = what_is_due(t)  # by the flags of this step
    if t.flags.error:
        t.checkpoints.flush()  # Collective; raises the error of the last save on every rank
    if is_epoch_over:
        close_epoch(t)  # Collective.
        if not due.evaluate:
            note_coverage(t, evaluated=None)  # Collective.
    if due.stop and t.state.progress.step < t.total_steps:
        return True  # train() saves, and the next start evaluates
    if due.evaluate:
        evaluate_and_save(t)  # Collective.
        return what_is_due(t).stop  # early, or as agreed in the evaluation
    if due.save:
        save(t)  # Collective.
    return due.stop


def evaluate_and_save(t: Training) -> None:
    """Save; evaluate; keep the model if it is the best; save again. Collective.

    A stop abandons the evaluation: the next start does it first.
    """
    save(t)  # Collective.
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
        if t.state.progress.step and t.state.progress.sample_offset == 0:
            note_coverage(t, values["evaluated"])  # Collective.
        best = update_best(t, values, averaged)  # Collective.
    save(t, best)  # Collective.
