"""What is written down of a training: a record every --log-every steps, the summary.

Tests: tests/end_to_end/test_timings.py
"""

import shlex
from functools import partial

import torch

from data.batch import GlobalBatch
from engine.records.log import figure, records
from engine.training import Training
from engine.wrong import end_if_wrong
from utils.errors import Exit, counted, rounded
from utils.hardware.devices import Arriving
from utils.rundir.run import command


def log_step(t: Training, batch: GlobalBatch, losses: torch.Tensor, grad_norm: torch.Tensor) -> None:
    """Count the step, and write a train record where one is due. Collective.

    losses: [micro-batches of all ranks] float64, zeros for those of other ranks. grad_norm: scalar.
    """
    step = t.state.progress.step
    t.clock.step(batch.num_samples, batch.num_tokens)
    with t.clock.on("logging"):  # no part of the next step
        t.extras.stepped(t)  # Collective.
    t.log.advance(step)
    t.state.coverage.add(batch.counted, batch.epoch)
    t.bad_samples.note(batch.counted)
    if step in (1, t.total_steps) or step % t.config.record.log_every == 0:
        _record_step(t, losses, grad_norm)  # Collective.


def _record_step(t: Training, losses: torch.Tensor, grad_norm: torch.Tensor) -> None:
    """One train record: figures of the step over all ranks, which depend on the position alone; timings. Collective."""
    losses, grad_norm = Arriving(losses, grad_norm).wait()  # one wait for the device
    end_if_wrong(t, waits=True)  # Collective.
    times = torch.zeros(t.world.world_size, 3, dtype=torch.float64)
    times[t.world.rank] = torch.tensor(t.clock.times(), dtype=torch.float64)
    # One rank owns each row, and the others hold zeros: the losses are added in the order of the micro-batches.
    sums = t.world.all_reduce_sum(torch.cat([losses, times.flatten()]))  # Collective.
    by_index, by_rank = sums[:len(losses)].tolist(), sums[len(losses):].view_as(times).tolist()
    figures = {"loss": sum(by_index), "grad_norm": float(grad_norm), "lr": t.schedule(t.state.progress.step - 1)}
    timings = t.clock.record(by_rank)
    with t.clock.on("logging"):
        t.extras.recorded(t, t.log.train(t.state.progress.position(t.feed.plan.num_samples) | figures | timings))


def close_epoch(t: Training) -> None:
    """The record of a finished epoch: how many different samples reached a backward in it. Collective."""
    count = t.state.coverage.count(t.world)  # Collective.
    t.state.samples()  # Collective: from here on all ranks know what the samples were.
    figures = {"trained": count} | t.clock.shares()
    t.extras.recorded(t, t.log.epoch(t.state.progress.position(t.feed.plan.num_samples) | figures))


def note_coverage(t: Training, evaluated: int | None) -> None:
    """One line about an epoch that left samples out, and about the last one. evaluated: at its end. Collective."""
    count, num_samples, num_in_set = t.state.coverage.count(t.world), len(t.task.train_set), len(t.task.eval_set)
    text = f"epoch {t.state.progress.epoch}: trained on {count} of {counted(num_samples, 'sample')}"
    if evaluated is not None:
        text += f", evaluated {evaluated} of {num_in_set}"
    is_whole = count == num_samples and evaluated in (None, num_in_set)
    if is_whole and t.state.progress.step < t.total_steps:
        return
    t.log.note(text + ("" if is_whole else "; the others were left out, or could not be read"))


def close_run(t: Training) -> None:
    """The end of a finished run, on rank 0: RUN/summary.json, and what to do next."""
    best = t.state.best
    summary = records(t.run.path, "val")[-1] | {"best": best}
    t.run.write_json("summary.json", summary)
    metric, usual = best["metric"], t.task.best
    shown = partial(figure, t.task, metric)
    compared = {} if metric == usual or usual not in summary else {usual: summary[usual]}
    compared = ", ".join(f"{name} {figure(t.task, usual, value)}"
                         for name, value in (compared | t.task.baselines()).items())
    t.bad_samples.report(t.log.note)
    t.log.note(t.checkpoints.cost())
    t.log.note(t.clock.words())
    progress = t.state.progress
    if progress.step < t.total_steps:
        t.log.note(f"stopped early at step {progress.step} of {t.total_steps}: {progress.without_gain} evaluations"
                   f" without a gain in {best['metric']} (--early-stop-patience)")
    run = shlex.quote(str(t.run.path))
    steps = {"the run": t.run.path, "its curves": f"{command('tensorboard')} --logdir {run}",
             **t.task.next_steps(run, command("python")), **t.extras.finished(t)}
    t.log.note("\n".join((
        "", f"{metric} {shown(summary[metric])} on the validation set (best {shown(best['value'])}, at step"
            f" {best['step']}{', by the average of the weights' if 'weights' in best else ''});",
        f"for comparison: {compared}", *(f"{what:<15} {how}" for what, how in steps.items()))))
    t.run.status("finished", Exit.DONE, f"{best['metric']} {rounded(best['value'])} at step {best['step']}")
