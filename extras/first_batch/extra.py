"""The first batch as the model sees it, for TensorBoard: images in one picture, texts in a table in Markdown.

Rank 0 alone makes it, and not in a step. Mistakes, with their pictures, are in RUN/report.html.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch.nn import functional as F

from engine.training import Extra, Training

COLUMNS = 8  # of the grid, and rows
SMALLEST, LARGEST, GAP = 64, 128, 6  # pixels: side of a tile, between tiles


class EXTRA(Extra):
    """The first training samples of a new run, augmented as the first epoch has them."""

    def began(self, t: Training) -> None:
        """A picture at step 0."""
        if t.state.progress.step == 0:
            t.log.show("train/first_batch", partial(_first_batch, t))


def _first_batch(t: Training) -> np.ndarray | str | None:
    indices = t.feed.sampler.indices(0, 0)[:COLUMNS**2].tolist()
    shown = t.task.preview(t.feed.samples.collated(0, indices))
    if shown and isinstance(shown[0], str):
        return table(shown)
    return grid(shown) if shown else None


def grid(images: Sequence[np.ndarray]) -> np.ndarray:
    """The images in a grid: [H, W, 3] uint8.

    images: [h, w, 3] uint8 each, all of one size; small ones are enlarged pixel by pixel.
    """
    from torchvision.utils import make_grid  # texts need none of it

    height, width, _ = images[0].shape  # wider where a sample has several images
    side = min(LARGEST, max(SMALLEST, height))
    is_small = height < side
    tiles = F.interpolate(torch.tensor(np.stack(images)).permute(0, 3, 1, 2).float(), (side, side * width // height),
                          mode="nearest" if is_small else "bilinear", antialias=not is_small)  # [B, 3, side, ...]
    made = make_grid(tiles, min(COLUMNS, len(images)), padding=GAP, pad_value=255)             # [3, H, W]
    return made.round().byte().permute(1, 2, 0).numpy()


def table(texts: Sequence[str]) -> str:
    """Markdown with a row for each text, which is shown as it is, letter by letter."""
    cells = [text.replace("`", "'").replace("|", "\\|").replace("\n", " ") for text in texts]
    return "\n".join(["| what the model sees |", "| --- |", *(f"| `{cell}` |" for cell in cells)])
