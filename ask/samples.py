"""The samples of a step: what the model saw of each, what it said, and what each added to the loss; tables of them.

    watched, rows = watch(t, has_grad_norms=False, output=None)
    train_step(watched, batch)                      # rows holds a row for each sample of this rank

Tests: tests/unit/ask/test_replay.py
"""

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from ask.repeat import Instead
from data.batch import Batch
from engine.training import Training
from models.objectives import answer, values_of
from models.output import Output
from models.tasks.base import Task
from utils.errors import counted
from utils.numerics.seed import seed_micro_batch
from utils.output_files import csv_writer, open_output

SHOWN, WIDTH, MOST_COLUMNS = 20, 120, 12  # rows of a table on the terminal, characters of a line, columns
Rows = list[dict[str, Any]]


def watch(t: Training, has_grad_norms: bool, output: Path | None) -> tuple[Training, Rows]:
    """The training with a task whose forward keeps a row for each sample, and these rows."""
    rows: Rows = []

    def forward(model: nn.Module, batch: Batch) -> Output:
        """The task's; the gradients of single samples go backward through the same graph."""
        new = inputs_of(t.state.progress.step + 1, t.task, batch, output)
        found = t.task.forward(model, batch)
        if new and new[0]["micro_batch"] not in {row["micro_batch"] for row in rows}:  # nor computed again
            losses = t.task.sample_losses(found, batch)
            norms = grad_norms(t, model, losses) if has_grad_norms else ()
            for place, (row, loss) in enumerate(zip(new, losses.tolist(), strict=True)):
                if t.task.objective:
                    row["prediction"] = prediction(t.task, found.logits[place].detach())
                row |= {"loss": loss} | ({"grad_norm": norms[place]} if has_grad_norms else {})
            rows.extend(new)
        return found

    return replace(t, task=Instead(t.task, forward=forward)), rows


def grad_norms(t: Training, model: nn.Module, losses: Tensor) -> list[float]:
    """The norm of the gradient of what each sample adds to the loss; one backward pass for each. losses: [B]."""
    params = [param for param in model.parameters() if param.requires_grad]
    scale, norms = t.precision.scale, []
    with torch.autocast(losses.device.type, enabled=False):
        for loss in losses:
            grads = torch.autograd.grad(loss * scale, params, retain_graph=True, allow_unused=True)
            norms.append(float(torch.nn.utils.get_total_norm([grad for grad in grads if grad is not None]) / scale))
    return norms


def requested(t: Training, step: int, output: Path | None, is_list: bool) -> Rows:
    """The samples of a step that nobody computes, those of this rank. is_list: their names alone; nothing is read."""
    sampler, starts, origin = t.feed.sampler, t.feed.plan.starts, t.run.resolved.as_dict().get("origin", (0, 0))
    epoch, place = divmod(step - 1 - origin[0], len(starts))
    rows: Rows = []
    for index in sampler.share:
        request = sampler.micro_batch(origin[1] + epoch, starts[place], index)
        if is_list and not request.is_stand_in:
            rows += [{"micro_batch": index, "index": each, "sample": t.feed.samples.name(each)}
                     for each in request.indices]
        elif not is_list:
            seed_micro_batch(t.config.run.seed, step - 1, index, t.world.device)
            rows += inputs_of(step, t.task, t.feed.samples[request], output)
    return rows


def inputs_of(step: int, task: Task, batch: Batch, output: Path | None) -> Rows:
    """A row for each sample of a batch: which it is, and what the model sees of it; pictures go to `output`."""
    host = batch.to(torch.device("cpu"))
    shown, rows = task.preview(task.as_seen(host)), []
    for place, index in enumerate(batch.indices):
        row = {"micro_batch": batch.index, "index": index, "sample": task.train_set.name(index)}
        if task.objective:
            row["label"] = task.objective.label_words(host.labels[place])
        if shown and isinstance(shown[place], str):
            row["seen"] = shown[place]
        elif shown and output:
            row["seen"] = f"step-{step}-{batch.index}-{place}.png"
            Image.fromarray(shown[place]).save(output / row["seen"])
        rows.append(row)
    return rows


def prediction(task: Task, logits: Tensor) -> str:
    """What the model says of a sample, in words. logits: [C]."""
    described, names = task.objective.described(), task.objective.names
    said, by_name = answer(described, names, values_of(described, logits).tolist())
    return said.get("prediction", ",".join(by_name.values()))


def write_rows(rows: Rows, name: str) -> None:
    """NAME.csv, with all digits, and NAME.json, where a figure that is not finite is null. Raises UserError (73)."""
    finite = [{key: None if isinstance(value, float) and not math.isfinite(value) else value
               for key, value in row.items()} for row in rows]
    with open_output(f"{name}.json") as file:
        json.dump(finite, file, indent=1)
    with open_output(f"{name}.csv") as file:
        write = csv_writer(file)
        write(list(rows[0]))
        for row in rows:
            write(list(row.values()))


def table(rows: Rows, most: int = SHOWN) -> list[str]:
    """The first rows for a terminal, in columns, of which the widest are cut; and what is left out, in words."""
    cells = [[*row][:MOST_COLUMNS] for row in (rows[0], *(map(_cell, row.values()) for row in rows[:most]))]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    while sum(widths) + 2 * (len(widths) - 1) > WIDTH:
        widths[widths.index(max(widths))] -= 1
    lines = ["  ".join(_cut(cell, width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    if len(rows) > most:
        lines.append(f"... and {len(rows) - most} more")
    if len(rows[0]) > MOST_COLUMNS:
        lines.append(f"... and {counted(len(rows[0]) - MOST_COLUMNS, 'column')} more")
    return lines


def shortened(rows: Rows) -> tuple[str, Rows]:
    """The folder that all samples have in common, and the rows as a terminal shows them: by their names in it."""
    names = [row["sample"] for row in rows]
    folder = os.path.commonpath(map(os.path.dirname, names))
    left_out = {"step"} if len({row["step"] for row in rows}) == 1 else set()
    if str(rows[0].get("seen")).endswith(".png"):
        left_out.add("seen")
    short = [row | {"sample": name.removeprefix(f"{folder}/")} for row, name in zip(rows, names, strict=True)]
    return folder, [{key: value for key, value in row.items() if key not in left_out} for row in short]


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else " ".join(str(value).split())


def _cut(text: str, width: int) -> str:
    """As wide as its column. Of a path the end tells more than the beginning."""
    if len(text) > width:
        text = f"...{text[3 - width:]}" if "/" in text else f"{text[:width - 3]}..."
    return text.ljust(width)
