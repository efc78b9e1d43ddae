"""Send what a run has written down to a tracker of experiments, from outside the loop: while it trains, or afterwards.

    python -m ask.send RUN --to mlflow               # what is there now
    python -m ask.send RUN --to mlflow --follow      # and what comes, until the run ends

The figures of RUN/metrics.jsonl become train/loss, val/top1, ..., by optimizer step; the settings are those of
config.yaml, and as auto.NAME what `auto` became. The tracker is asked what it has, so nothing is sent twice, also after
a kill. (Of a step that the run computed again, it keeps what came first.) A run that was killed counts as running:
--follow waits until it continues, or for Ctrl-C.

mlflow: MLFLOW_TRACKING_URI says where it is, MLFLOW_EXPERIMENT_NAME names the experiment (default: lockstep).

Tests: tests/end_to_end/test_send.py
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path

import yaml

from utils.array_folder import digest_of
from utils.errors import Exit, Parser, UserError, exit_after, first_line, say
from utils.files import json_lines, read_json

Points = dict[tuple[str, int], tuple[float, int]]  # (name, step): (value, NaN if it was not finite; time in ms)
# A run in a tracker: the (name, step) of its points, the names of its settings, and how it gets more: points, settings,
# what status.json says, and when the run wrote last, in ms.
Tracker = tuple[set[tuple[str, int]], set[str], Callable[[Points, dict[str, str], str, int | None], None]]


def open_mlflow(identity: str, name: str, began_ms: int | None) -> Tracker:
    """The run of this identity in MLflow; if there is none, a new one with this name."""
    import mlflow
    from mlflow.entities import Metric, Param

    client = mlflow.MlflowClient()
    number = mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", "lockstep")).experiment_id
    found = client.search_runs([number], f"tags.lockstep = '{identity}'")
    run = found[0] if found else client.create_run(number, began_ms, {"lockstep": identity}, name)
    run_id = run.info.run_id

    def send(points: Points, settings: dict[str, str], state: str, last_ms: int | None) -> None:
        metrics = [Metric(name, value, ms, step) for (name, step), (value, ms) in points.items()]
        params = [Param(*setting) for setting in settings.items()]
        for first in range(0, max(len(metrics), len(params)), 100):  # MLflow takes no more settings at once
            client.log_batch(run_id, metrics[first:first + 100], params[first:first + 100])
        status = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}.get(state, "RUNNING")
        client.set_terminated(run_id, status, last_ms)

    sent = {(name, point.step) for name in run.data.metrics for point in client.get_metric_history(run_id, name)}
    return sent, set(run.data.params), send


TRACKERS = {"mlflow": open_mlflow}


def main(given: argparse.Namespace) -> int:
    """Send, and return the exit code. Raises UserError: 64 if a package is missing, 66 for what is no run, 74."""
    run, known = Path(given.run), ""
    deadline = time.monotonic() + 60  # until then a run that has ended may go on: its command was started just before
    while True:
        # what is there
        if not (run / "command.txt").exists():
            raise UserError(f"{run} is not the directory of a run of train.py", Exit.NO_INPUT)
        identity = digest_of((run / "command.txt").read_text().splitlines()[:2])  # its first start: when, which command
        state = read_json(run / "status.json").get("state", "running")  # before the points: none follows its end
        points, settings = points_of(run), settings_of(run)
        times = [ms for _, ms in points.values()] or [None]

        # what the tracker lacks
        try:
            if identity != known:  # --fresh may begin another run there
                known, (sent, kept, send) = identity, TRACKERS[given.to](identity, run.resolve().name, times[0])
            new = {key: point for key, point in points.items() if key not in sent}
            send(new, {name: text for name, text in settings.items() if name not in kept}, state, times[-1])
        except ImportError as error:
            raise UserError(f"--to {given.to}: {error}: pip install {given.to}") from None
        except Exception as error:  # each tracker has its own
            raise UserError(f"--to {given.to}: {first_line(error)}; the same command continues", Exit.IO) from error
        sent.update(new)
        kept.update(settings)
        deadline = 0.0 if state == "running" else deadline
        if not given.follow or state == "finished" or (state != "running" and time.monotonic() > deadline):
            break
        time.sleep(2)
    say(f"{run} is {state}: {given.to} has its {len(sent)} figures and {len(kept)} settings", sys.stdout)
    return Exit.DONE


def points_of(run: Path) -> Points:
    """The figures in RUN/metrics.jsonl, but for a line that is being written."""
    points = {}
    for record in json_lines(run / "metrics.jsonl"):
        with suppress(ValueError, LookupError, TypeError):
            ms = round(1000 * datetime.fromisoformat(record["time"]).timestamp())
            for name in record.keys() - {"split", "step", "time"}:
                group = "progress" if name in ("epoch", "samples") else record["split"]
                points[f"{group}/{name}", record["step"]] = float("nan" if record[name] is None else record[name]), ms
    return points


def settings_of(run: Path) -> dict[str, str]:
    """The settings in RUN/config.yaml, and what `auto` became; none before that is known."""
    auto = {f"auto.{name}": value for name, value in read_json(run / "auto.json").items()}
    settings = yaml.safe_load((run / "config.yaml").read_text()) if auto else {}
    return {name: str(value)[:500] for name, value in (settings | auto).items()}  # what an old server takes


if __name__ == "__main__":
    PARSER = Parser("ask.send", __doc__)
    PARSER.add_argument("run", metavar="RUN", help="a run directory of train.py")
    PARSER.add_argument("--to", required=True, choices=TRACKERS, help="the tracker")
    PARSER.add_argument("--follow", action="store_true", help="until the run ends; a stopped run gets a minute")
    exit_after(partial(main, PARSER.parse_args()), PARSER.name)
