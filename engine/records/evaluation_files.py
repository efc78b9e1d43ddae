"""What an evaluation leaves in files: a row for each sample (CSV), the figures of each class (JSON).

    RUN/eval/samples.csv, RUN/eval/classes.json         # of the best evaluation so far; targets.json of a regression
    train.py --eval-only --output FILE.csv|FILE.json

Tests: tests/end_to_end/test_evaluation.py
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from models.tasks.base import Task
from utils.errors import UserError
from utils.output_files import TEXT, csv_writer, open_output, require_output


def write_evaluation(task: Task, step: int, values: Mapping[str, Any], folder: Path) -> None:
    """Write both files into `folder`. values: those of Evaluation.run()."""
    try:
        inputs, groups = list(task.inputs()), task.groups()
    except UserError:  # a file is gone that the training does not need any more: no reason to end it
        inputs, groups = [(index, task.eval_set.name(index)) for index in range(len(task.eval_set))], None
    with (folder / "samples.csv").open("w", newline="", **TEXT) as file:
        _write_samples(task, inputs, groups, values["rows"], file)
    (folder / f"{task.objective.figures}.json").write_text(_figures(task, step, values))


def require_writable(task: Task, output: str) -> None:
    """Raise UserError before the evaluation: 64 if the task has nothing to write, 73 if --output cannot be written."""
    if not any(metric.is_per_sample for metric in task.metrics):
        raise UserError(f"--output {output}: there is nothing to write for each sample of this task and data; leave"
                        " --output out, and see the JSON line on standard output")
    if not output.endswith((".csv", ".json")):
        raise UserError(f"--output {output}: the ending says what is written; use .csv (a row for each sample) or .json"
                        " (the figures of each class)")
    require_output(output)


def write_output(task: Task, step: int, values: Mapping[str, Any], output: str) -> None:
    """Write the file that --output names. Raises UserError (73)."""
    with open_output(output) as file:
        if output.endswith(".json"):
            file.write(_figures(task, step, values))
        else:
            _write_samples(task, task.inputs(), task.groups(), values["rows"], file)


def _write_samples(task: Task, inputs: Iterable[tuple[int, str]], groups: Sequence[str] | None, samples: Tensor,
                   file: TextIO) -> None:
    """A row for each sample, in the order of `inputs`. groups: see Task. samples: [N, S], rows of the task's metrics.
    """
    write_row, rows = csv_writer(file), samples.tolist()
    write_row(["input", *task.objective.sample(0, rows[0]), *([] if groups is None else ["group"])])
    for index, name in inputs:
        found = task.objective.sample(index, rows[index])
        if not rows[index][0]:  # it could not be read: what the data say is all there is
            found = {column: value if column in task.objective.given else "" for column, value in found.items()}
        write_row([name, *found.values(), *([] if groups is None else [groups[index]])])


def _figures(task: Task, step: int, values: Mapping[str, Any]) -> str:
    figures = {name: value for name, value in values.items() if not isinstance(value, Tensor)}
    objective, found = task.objective, values[task.objective.figures]                        # [C, columns]
    last = values.get(f"class_{objective.columns[-1]}", torch.full([len(found)], math.nan))
    table = torch.cat([found, last[:, None]], dim=1)[:, :len(objective.columns)].tolist()
    by_name = {name: {column: _plain(column, value) for column, value in zip(objective.columns, row, strict=True)}
               for name, row in zip(task.classes, table, strict=True)}
    return json.dumps({"step": step, **figures, objective.figures: by_name}, indent=1) + "\n"


def _plain(column: str, value: float) -> float | int | None:
    """For JSON, which has no NaN."""
    return None if math.isnan(value) else int(value) if column == "support" else value
