"""What people look at in TensorBoard: the first batch as the model sees it, and the worst mistakes of the best model.

Images become one picture, texts a table in Markdown. Only rank 0 makes them, and not in a step.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from engine.training import Training
from models.tasks.base import Task

MAX_FIRST, MAX_MISTAKES = 64, 16  # samples
SMALLEST, LARGEST = {MAX_FIRST: 64, MAX_MISTAKES: 160}, {MAX_FIRST: 128, MAX_MISTAKES: 224}  # side of a tile in pixels
GAP, LINE = 6, 18  # pixels: between tiles, a line of text
INK = (32, 36, 44)


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


def tiles(images: Sequence[np.ndarray], most: int, captions: Sequence[Sequence[str]] = ()) -> np.ndarray:
    """[H, W, 3] uint8: the images in a grid with as many columns as `most` in a square, lines of text below each.

    images: [h, w, 3] uint8 each; small ones are enlarged pixel by pixel.
    """
    # sizes
    columns, font = round(most**0.5), ImageFont.load_default(14)
    columns = min(columns, len(images))
    side = min(LARGEST[most], max(SMALLEST[most], images[0].shape[0]))
    width = side * images[0].shape[1] // images[0].shape[0]  # wider where a sample has several images
    height = side + LINE * max(map(len, captions), default=0) + GAP
    rows = -(-len(images) // columns)
    canvas = Image.new("RGB", (columns * (width + GAP) + GAP, rows * height + GAP), "white")
    draw = ImageDraw.Draw(canvas)

    # tiles
    for number, image in enumerate(images):
        left, top = GAP + number % columns * (width + GAP), GAP + number // columns * height
        how = Image.Resampling.NEAREST if image.shape[0] < side else Image.Resampling.BILINEAR
        canvas.paste(Image.fromarray(image).resize((width, side), how), (left, top))
        for line, text in enumerate(captions[number] if captions else ()):
            text = text[:width]  # a letter is wider than a pixel; of very many labels the rest would take long
            while font.getlength(text) > width:
                text = text[:-2] + "…"
            draw.text((left, top + side + line * LINE), text, fill=INK, font=font)
    return np.asarray(canvas)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown; the cells of the first column are shown as they are, letter by letter."""
    lines = [[f"`{first.replace('`', chr(39))}`", *others] for first, *others in rows]
    cells = [header, ["---"] * len(header), *([cell.replace("|", "\\|").replace("\n", " ") for cell in line]
                                              for line in lines)]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


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
