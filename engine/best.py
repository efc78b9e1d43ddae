"""Which evaluation of a run is the best one: by the metric that --best names."""

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.start import Start
from models.metrics import LOWER_IS_BETTER
from utils.errors import Exit, UserError

if TYPE_CHECKING:
    from engine.training import Training


def best_metric(start: Start) -> tuple[str, bool]:
    """The metric that decides, and whether a higher value is better. Raises UserError (64) if there is no such one."""
    name, task = start.config.record.best, start.task
    if name in ("auto", task.best):
        return task.best, task.best_is_high
    names = list(dict.fromkeys([task.best, *(known for metric in task.metrics for known in metric.names)]))
    if name not in names:
        close = difflib.get_close_matches(name, names, n=1)
        meant = f" (did you mean {close[0]}?)" if close else ""
        raise UserError(f"--best {name}: this task and data have no such metric{meant}; choose from {', '.join(names)}")
    return name, name not in LOWER_IS_BETTER


def update_best(t: "Training", values: Mapping[str, Any]) -> bool:
    """Whether this step's evaluation, with these values, is the best so far; then t.state.best says so. Collective.

    Of equal ones the earlier counts. If the last start had another --best, its best model is compared by this metric.
    Raises UserError (65) if the evaluation has no such value.
    """
    # this one
    name, is_high = best_metric(t)
    if name not in values:
        raise UserError(f"--best {name}: this evaluation has no {name}, because only one class could be read; repair"
                        " the files, or use another --best", Exit.BAD_DATA)
    value = values[name]

    # the best one before it
    best = t.state.best
    if best and best["metric"] != name:
        before = t.world.on_rank_zero(lambda: recorded(t.run.path, best["step"], name))  # Collective.
        best = {} if before is None else {"step": best["step"], "metric": name, "value": before}
    is_best = not best or (value > best["value"] if is_high else value < best["value"])
    t.state.best = {"step": t.state.progress.step, "metric": name, "value": value} if is_best else best
    return is_best


def recorded(run_dir: Path, step: int, name: str) -> float | None:
    """A value of the evaluation at `step` by RUN/metrics.jsonl; None if it is not there (in runs of older versions)."""
    records = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    found = [record.get(name) for record in records if (record["split"], record["step"]) == ("val", step)]
    return found[-1] if found else None
