"""Pictures and tables for TensorBoard, of plain arrays and words."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

MAX_FIRST, MAX_MISTAKES = 64, 16  # samples
SMALLEST, LARGEST = {MAX_FIRST: 64, MAX_MISTAKES: 160}, {MAX_FIRST: 128, MAX_MISTAKES: 224}  # side of a tile in pixels
GAP, SIDE = 6, 600  # pixels: between tiles; of a heat map
LIGHT, DARK = torch.tensor([247.0, 250, 254]), torch.tensor([8.0, 48, 107])  # blue


def grid(images: Sequence[np.ndarray], most: int) -> np.ndarray:
    """The images in a grid with as many columns as `most` in a square: [H, W, 3] uint8.

    images: [h, w, 3] uint8 each, all of one size; small ones are enlarged pixel by pixel.
    """
    from torchvision.utils import make_grid  # texts need none of it

    height, width, _ = images[0].shape  # wider where a sample has several images
    side = min(LARGEST[most], max(SMALLEST[most], height))
    is_small = height < side
    tiles = F.interpolate(torch.tensor(np.stack(images)).permute(0, 3, 1, 2).float(), (side, side * width // height),
                          mode="nearest" if is_small else "bilinear", antialias=not is_small)  # [B, 3, side, ...]
    made = make_grid(tiles, min(round(most**0.5), len(images)), padding=GAP, pad_value=255)    # [3, H, W]
    return made.round().byte().permute(1, 2, 0).numpy()


def heat_map(counts: Tensor) -> np.ndarray:
    """A confusion matrix as [H, W, 3] uint8, each field shaded by its share of its row. counts: [C, C]."""
    shares = counts.cpu() / counts.cpu().sum(dim=1, keepdim=True).clamp(min=1)
    fields = torch.lerp(LIGHT, DARK, shares[..., None]).round().byte()                       # [C, C, 3]
    size = max(1, SIDE // len(counts))
    return fields.repeat_interleave(size, 0).repeat_interleave(size, 1).numpy()


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown; the cells of the first column are shown as they are, letter by letter."""
    lines = [header, ["---"] * len(header), *([f"`{first.replace('`', chr(39))}`", *others] for first, *others in rows)]
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)
