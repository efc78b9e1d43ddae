"""The samples of a step: what the model saw of each, what it said, and what each added to the loss.

    watched, rows = watch(t, with_grad_norms=False, output=None)
    train_step(watched, batch)                      # rows() holds a row for each sample of this rank
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from data.batch import Batch
from engine.training import Training
from models.objectives import answer, values_of
from models.output import Output
from models.tasks.base import Task
from utils.numerics.seed import seed_micro_batch
from utils.output_files import TEXT, csv_writer

SHOWN, WIDEST = 20, 60  # rows of a table on the terminal, and characters of a column
Rows = list[dict[str, Any]]


class Watched:
    """A task whose forward keeps a row for each sample. All else is the task's own."""

    def __init__(self, t: Training, has_grad_norms: bool, output: Path | None):
        self._t, self._task, self._has_grad_norms, self._output = t, t.task, has_grad_norms, output
        self.rows: Rows = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def forward(self, model: nn.Module, batch: Batch) -> Output:
        """The task's; the gradients of single samples go backward through the same graph."""
        rows = inputs_of(self._t, self._task, batch, self._output)
        output = self._task.forward(model, batch)
        if rows and rows[0]["micro_batch"] not in {row["micro_batch"] for row in self.rows}:  # nor computed again
            losses = self._task.sample_losses(output, batch).tolist()
            norms = self._grad_norms(output, batch) if self._has_grad_norms else []
            for place, row in enumerate(rows):
                if self._task.objective:
                    row["prediction"] = prediction(self._task, output.logits[place].detach())
                row |= {"loss": losses[place]} | ({"grad_norm": norms[place]} if norms else {})
            self.rows += rows
        return output

    def _grad_norms(self, output: Output, batch: Batch) -> list[float]:
        """The norm of the gradient of what each sample adds to the loss; one backward pass for each."""
        params = [param for param in self._t.strategy.module.parameters() if param.requires_grad]
        scale, norms = self._t.precision.scale, []
        with torch.autocast(batch.device.type, enabled=False):
            for loss in self._task.sample_losses(output, batch):
                grads = torch.autograd.grad(loss * scale, params, retain_graph=True, allow_unused=True)
                found = [grad for grad in grads if grad is not None]
                norms.append(float(torch.nn.utils.get_total_norm(found) / scale))
        return norms


def watch(t: Training, has_grad_norms: bool, output: Path | None) -> tuple[Training, Watched]:
    """The training with a task that keeps a row for each sample; and that task."""
    watched = Watched(t, has_grad_norms, output)
    return replace(t, task=watched), watched


def requested(t: Training, step: int, output: Path | None, is_list: bool) -> Rows:
    """The samples of a step that nobody computes, those of this rank. is_list: their names alone; nothing is read."""
    sampler, starts = t.feed.sampler, t.feed.plan.starts
    epoch, place = divmod(step - 1, len(starts))
    rows: Rows = []
    for index in sampler.share:
        request = sampler.micro_batch(epoch, starts[place], index)
        if is_list and not request.is_stand_in:
            rows += [{"micro_batch": index, "index": each, "sample": t.feed.samples.name(each)}
                     for each in request.indices]
        elif not is_list:
            seed_micro_batch(t.config.run.seed, step - 1, index, t.world.device)
            rows += inputs_of(t, t.task, t.feed.samples[request], output)
    return rows


def inputs_of(t: Training, task: Task, batch: Batch, output: Path | None) -> Rows:
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
            row["seen"] = f"step-{t.state.progress.step + 1}-{batch.index}-{place}.png"
            Image.fromarray(shown[place]).save(output / row["seen"])
        rows.append(row)
    return rows


def prediction(task: Task, logits: Tensor) -> str:
    """What the model says of a sample, in words. logits: [C]."""
    described, names = task.objective.described(), task.objective.names
    said, by_name = answer(described, names, values_of(described, logits).tolist())
    return said.get("prediction", ",".join(by_name.values()))


def write_rows(rows: Rows, output: Path) -> None:
    """samples.csv and samples.json in a folder."""
    (output / "samples.json").write_text(json.dumps(rows, indent=1), **TEXT)
    columns = list(rows[0]) if rows else []
    with (output / "samples.csv").open("w", newline="", **TEXT) as file:
        write = csv_writer(file)
        write(columns)
        for row in rows:
            write([row[name] for name in columns])


def table(rows: Rows) -> str:
    """The first rows for a terminal, in columns."""
    cells = [list(rows[0]), *([_cell(value) for value in row.values()] for row in rows[:SHOWN])]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    return "\n".join(lines + [f"... and {len(rows) - SHOWN} more"] * (len(rows) > SHOWN))


def _cell(value: Any) -> str:
    text = f"{value:.4f}" if isinstance(value, float) else str(value)
    return text if len(text) <= WIDEST else f"...{text[3 - WIDEST:]}" if "/" in text else f"{text[:WIDEST - 3]}..."
