"""What people look at in TensorBoard: the first batch as the model sees it, and the worst mistakes of the best model.

Images become one picture, texts a table in Markdown. Only rank 0 makes them, and not in a step.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.records.drawings import MAX_FIRST, MAX_MISTAKES, table, tiles
from engine.training import Training
from models.tasks.base import Task


def show_first_batch(t: Training) -> None:
    """The first training samples of a new run, augmented as the first epoch has them."""
    if t.state.progress.step == 0:
        t.log.show("train/first_batch", 0, partial(_first_batch, t))


def show_mistakes(t: Training, values: Mapping[str, Any]) -> None:
    """The samples with the highest loss among those that were classified wrongly. values: of an evaluation."""
    if "rows" in values:
        t.log.show("val/worst_mistakes", t.state.progress.step, partial(_mistakes, t.task, values["rows"]))


def worst(samples: Tensor, is_wrong: Tensor) -> list[int]:
    """Indices of wrong samples, the highest loss first; of equal ones the first.

    samples: [N, S], the rows of the metrics: whether a sample counts comes first, its loss last. is_wrong: [N] bool.
    """
    wrong = torch.nonzero((samples[:, 0] > 0) & is_wrong)[:, 0]
    return wrong[samples[wrong, -1].argsort(descending=True, stable=True)][:MAX_MISTAKES].tolist()


def _first_batch(t: Training) -> np.ndarray | str | None:
    shown = t.task.preview(t.feed.samples.collated(0, t.feed.sampler.indices(0, 0)[:MAX_FIRST].tolist()))
    if not shown:
        return None
    if isinstance(shown[0], str):
        return table(["what the model sees"], [[text] for text in shown])
    return tiles(shown, MAX_FIRST)


def _mistakes(task: Task, samples: Tensor) -> np.ndarray | str | None:
    chosen = worst(samples, task.objective.is_wrong(samples))
    shown = task.preview(task.collate([task.eval_set[0, index] for index in chosen])) if chosen else ()
    if not shown:
        return None
    rows = [task.objective.sample(index, row) for index, row in zip(chosen, samples[chosen].tolist(), strict=True)]
    if isinstance(shown[0], str):
        return table(["text", *rows[0]], [[text, *row.values()] for text, row in zip(shown, rows, strict=True)])
    return tiles(shown, MAX_MISTAKES, [[f"{name}: {cell}" for name, cell in row.items()] for row in rows])
