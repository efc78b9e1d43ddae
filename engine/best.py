"""Which evaluation of a run is the best one: by the metric that --best names."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.records.log import EMA, records
from engine.start import Start
from engine.training import Training
from utils.errors import Exit, UserError
from utils.numerics.optimizers import warmup_steps
from utils.settings.spelling import suggestion


def best_metric(start: Start) -> tuple[str, bool]:
    """The metric that decides, and whether a higher value is better. Raises UserError (64) if there is no such one."""
    task, names = start.task, {}
    for metric in task.metrics:
        names |= metric.names
    name = task.best if start.config.record.best == "auto" else start.config.record.best
    if name not in names:
        raise UserError(f"--best {name}: this task and data have no such metric{suggestion(name, names)};"
                        f" choose from {', '.join(names)}")
    return name, names[name]


def update_best(t: Training, values: dict[str, Any], averaged: dict[str, Any]) -> dict[str, Any] | None:
    """Note this step's evaluation in the state; returns its values if it is the best so far, else None. Collective.

    values, averaged: of the weights and, if there is one, of their moving average; the better of the two counts. Of
    equal evaluations the earlier counts. Rank 0 decides: early stopping ends the loop of all ranks. Raises UserError
    (65) if the evaluation has no value of --best.
    """
    best, gain, without_gain = t.world.on_rank_zero(lambda: _decide(t, values, averaged))  # Collective.
    step = t.state.progress.step
    t.state.progress = replace(t.state.progress, evaluated_step=step, gain=gain, without_gain=without_gain)
    t.state.best = best
    return None if best["step"] < step else averaged if "weights" in best else values


def _decide(t: Training, values: dict[str, Any], averaged: dict[str, Any]) -> tuple[dict[str, Any], Any, Any]:
    """The best evaluation, and Progress's gain and without_gain after this one; see update_best."""
    # the better of the weights and their average
    name, is_high = best_metric(t)
    if name not in values:
        raise UserError(f"--best {name}: this evaluation has no {name}, because the samples that could be read are all"
                        " of one class, have no label, or the same target; repair the files, or use another --best",
                        Exit.BAD_DATA)
    progress = t.state.progress
    found = {"step": progress.step, "metric": name, "value": values[name]}
    if name in averaged and _is_better(averaged[name], values[name], is_high):
        found |= {"value": averaged[name], "weights": "ema"}

    # the best one before it; by this metric, if the last start had another --best
    best, before = t.state.best, progress.gain
    if best and best["metric"] != name:
        before = recorded(t.run.path, best["step"], (EMA if "weights" in best else "") + name)
        best = {} if before is None else best | {"metric": name, "value": before}

    # --early-stop-patience
    gain, without_gain = progress.gain, progress.without_gain
    if t.config.run.early_stop_patience:
        is_gain = before is None or _is_better(found["value"], before, is_high)
        # a fitted head may lose until the warm-up is over
        spared = warmup_steps(t.config.optim, t.total_steps) if t.run.resolved.head_init == "features" else 0
        count = (without_gain or 0) + (progress.step >= spared)
        gain, without_gain = (found["value"], 0) if is_gain else (before, count)
    is_best = not best or _is_better(found["value"], best["value"], is_high)
    return found if is_best else best, gain, without_gain


def _is_better(value: float, other: float, is_high: bool) -> bool:
    return value > other if is_high else value < other


def recorded(run_dir: Path, step: int, name: str) -> float | None:
    """A value of the evaluation at `step` by RUN/metrics.jsonl; None if it is not there."""
    found = [record.get(name) for record in records(run_dir, "val") if record["step"] == step]
    return found[-1] if found else None
