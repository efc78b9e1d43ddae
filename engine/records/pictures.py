"""What people look at in TensorBoard: the first batch as the model sees it, and the worst mistakes of the best model.

Images become one picture, texts a table in Markdown, and so does all that is known about the mistakes. Only rank 0
makes them, and not in a step.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.records.drawings import MAX_FIRST, MAX_MISTAKES, grid, table
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


def _first_batch(t: Training) -> Sequence[np.ndarray | str]:
    shown = t.task.preview(t.feed.samples.collated(0, t.feed.sampler.indices(0, 0)[:MAX_FIRST].tolist()))
    if shown and isinstance(shown[0], str):
        return [table(["what the model sees"], [[text] for text in shown])]
    return [grid(shown, MAX_FIRST)] if shown else []


def _mistakes(task: Task, samples: Tensor) -> Sequence[np.ndarray | str]:
    """A picture of images, and a table of all that is known about them, in the same order."""
    chosen = worst(samples, task.objective.is_wrong(samples))
    shown = task.preview(task.collate([task.eval_set[0, index] for index in chosen])) if chosen else ()
    if not shown:
        return []
    is_text = isinstance(shown[0], str)
    rows = [task.objective.sample(index, row) for index, row in zip(chosen, samples[chosen].tolist(), strict=True)]
    names = shown if is_text else map(str, range(1, len(shown) + 1))
    words = table(["text" if is_text else "image", *rows[0]],
                  [[name, *row.values()] for name, row in zip(names, rows, strict=True)])
    return [words] if is_text else [grid(shown, MAX_MISTAKES), words]
