"""Pictures and tables for TensorBoard, of plain arrays and words."""

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

MAX_FIRST, MAX_MISTAKES = 64, 16  # samples
SMALLEST, LARGEST = {MAX_FIRST: 64, MAX_MISTAKES: 160}, {MAX_FIRST: 128, MAX_MISTAKES: 224}  # side of a tile in pixels
GAP, LINE = 6, 18  # pixels: between tiles, a line of text
INK = (32, 36, 44)
SIDE = 600  # pixels: of a heat map
LIGHT, DARK = torch.tensor([247.0, 250, 254]), torch.tensor([8.0, 48, 107])  # blue


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
