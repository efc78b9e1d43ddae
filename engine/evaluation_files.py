"""What an evaluation leaves in files: a row for each sample (CSV), the figures of each class (JSON).

    RUN/eval/samples.csv, RUN/eval/classes.json         # of the best evaluation so far
    train.py --eval-only --output FILE.csv|FILE.json
"""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

from torch import Tensor

from models.tasks.base import Task
from utils.errors import UserError
from utils.output_files import TEXT, csv_writer, open_output, require_output


def write_evaluation(task: Task, step: int, values: Mapping[str, Any], folder: Path) -> None:
    """Write both files into `folder`. values: those of Evaluation.run()."""
    try:
        inputs = list(task.inputs())
    except UserError:  # a file is gone that the training does not need any more: no reason to end it
        inputs = [(index, task.eval_set.name(index)) for index in range(len(task.eval_set))]
    with (folder / "samples.csv").open("w", newline="", **TEXT) as file:
        _write_samples(task, inputs, values["rows"], file)
    (folder / "classes.json").write_text(_class_figures(task, step, values))


def require_writable(task: Task, output: str) -> None:
    """Raise UserError before the evaluation: 64 if the task has nothing to write, 73 if --output cannot be written."""
    if not any(metric.is_per_sample for metric in task.metrics):
        raise UserError(f"--output {output}: this task has no classes, so there is nothing to write for each sample;"
                        " leave --output out, and see the JSON line on standard output")
    if not output.endswith((".csv", ".json")):
        raise UserError(f"--output {output}: the ending says what is written; use .csv (a row for each sample) or .json"
                        " (the figures of each class)")
    require_output(output)


def write_output(task: Task, step: int, values: Mapping[str, Any], output: str) -> None:
    """Write the file that --output names. Raises UserError (73)."""
    with open_output(output) as file:
        if output.endswith(".json"):
            file.write(_class_figures(task, step, values))
        else:
            _write_samples(task, task.inputs(), values["rows"], file)


def _write_samples(task: Task, inputs: Iterable[tuple[int, str]], samples: Tensor, file: TextIO) -> None:
    """A row for each sample, in the order of `inputs`. samples: [N, 5], see models.metrics.SAMPLE_COLUMNS."""
    write_row = csv_writer(file)
    write_row(["input", "label", "prediction", "probability", "loss"])
    rows = samples.tolist()
    for index, name in inputs:
        counts, label, predicted, probability, loss = rows[index]
        result = [task.classes[int(predicted)], f"{probability:.6f}", f"{loss:.6f}"] if counts else ["", "", ""]
        write_row([name, task.classes[int(label)], *result])


def _class_figures(task: Task, step: int, values: Mapping[str, Any]) -> str:
    figures = {name: value for name, value in values.items() if not isinstance(value, Tensor)}
    aurocs = values["class_auroc"].tolist() if "class_auroc" in values else [math.nan] * len(task.classes)
    classes = {}
    for name, (precision, recall, f1, support), auroc in zip(
            task.classes, values["classes"].tolist(), aurocs, strict=True):
        classes[name] = {"precision": precision, "recall": recall, "f1": f1, "support": int(support),
                         "auroc": None if math.isnan(auroc) else auroc}
    return json.dumps({"step": step, **figures, "classes": classes}, indent=1) + "\n"
