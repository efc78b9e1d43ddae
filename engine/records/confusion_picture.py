"""A confusion matrix as a picture for TensorBoard: rows = true class, shaded by their share of the row."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

LABELLED_CLASSES = 20  # above this the matrix is drawn without names and counts
LONGEST_NAME = 24  # characters; a longer one is cut
GAP, LINE, BAR = 8, 18, 12  # pixels: between parts, a line of text, the width of the colour bar
# light to dark blue
_SHADES = torch.tensor([(247, 250, 254), (198, 219, 239), (107, 174, 214), (33, 113, 181), (8, 48, 107)]).float()
_INK, _PALE, _WHITE = (32, 36, 44), (176, 184, 194), (255, 255, 255)


def confusion_picture(confusion: Tensor, class_names: Sequence[str], title: str) -> np.ndarray:
    """The matrix as [H, W, 3] uint8. confusion: [C, C] counts, a row per true class."""
    counts = confusion.cpu()
    shares = (counts / counts.sum(dim=1, keepdim=True).clamp(min=1)).float()
    font, is_labelled = ImageFont.load_default(14), len(counts) <= LABELLED_CLASSES
    names = [_shortened(name) for name in class_names] if is_labelled else []

    # sizes
    widest_count = max((font.getlength(str(int(count))) for count in counts.flatten()), default=0) if is_labelled else 0
    cell = max(44, 320 // len(counts), math.ceil(widest_count) + 2 * GAP) if is_labelled else max(1, 600 // len(counts))
    side, longest = cell * len(counts), math.ceil(max(map(font.getlength, names), default=0))
    is_upright = longest > cell - GAP  # names too long for a column stand upright
    left, top = 2 * GAP + LINE + (longest + GAP if is_labelled else 0), 2 * GAP + LINE
    below = (longest if is_upright else LINE) + GAP if is_labelled else 0
    size = (left + side + 2 * GAP + BAR + GAP + 48, top + side + GAP + below + LINE + GAP)
    canvas = _Canvas(Image.new("RGB", size, "white"), font)

    # the matrix and the colour bar, with their titles
    canvas.write(left, GAP + LINE // 2, title, "lm")
    canvas.paint(shares, left, top, side, side)
    bar = left + side + 2 * GAP
    canvas.paint(torch.linspace(1, 0, side)[:, None], bar, top, BAR, side)
    canvas.write(bar + BAR + GAP, top, "100 %", "lt")
    canvas.write(bar + BAR + GAP, top + side, "0 %", "ls")
    canvas.write_upwards(GAP + LINE // 2, top + side // 2, "true class", "m")
    canvas.write(left + side // 2, top + side + GAP + below + LINE // 2, "predicted class", "mm")

    # names and counts
    for row, name in enumerate(names):
        middle = row * cell + cell // 2
        canvas.write(left - GAP, top + middle, name, "rm")
        if is_upright:
            canvas.write_upwards(left + middle, top + side + GAP, name, "r")
        else:
            canvas.write(left + middle, top + side + GAP + LINE // 2, name, "mm")
        for column, count in enumerate(counts[row].tolist()):
            ink = _PALE if not count else _WHITE if shares[row, column] > 0.5 else _INK
            canvas.write(left + column * cell + cell // 2, top + middle, str(count), "mm", ink)
    return np.asarray(canvas.image)


class _Canvas:
    """An image to write and paint on; x and y in pixels from the top left."""

    def __init__(self, image: Image.Image, font: ImageFont.FreeTypeFont):
        self.image, self._font, self._draw = image, font, ImageDraw.Draw(image)

    def write(self, x: int, y: int, text: str, anchor: str, ink: tuple[int, int, int] = _INK) -> None:
        """Write `text` so that its `anchor`, two letters of Pillow's, is at (x, y)."""
        self._draw.text((x, y), text, fill=ink, font=self._font, anchor=anchor)

    def write_upwards(self, x: int, y: int, text: str, anchor: str) -> None:
        """Centred on column x; y is where the text ends ("r") or its middle ("m")."""
        tile = Image.new("L", (math.ceil(self._font.getlength(text)), LINE))
        ImageDraw.Draw(tile).text((0, LINE // 2), text, fill=255, font=self._font, anchor="lm")
        tile = tile.transpose(Image.Transpose.ROTATE_90)
        self.image.paste(_INK, (x - LINE // 2, y if anchor == "r" else y - tile.height // 2), tile)

    def paint(self, shares: Tensor, x: int, y: int, width: int, height: int) -> None:
        """shares: [H, W] in 0..1, drawn as width x height pixels."""
        tile = Image.fromarray(_shaded(shares).numpy()).resize((width, height), Image.Resampling.NEAREST)
        self.image.paste(tile, (x, y))
        self._draw.rectangle((x - 1, y - 1, x + width, y + height), outline=_PALE)


def _shaded(shares: Tensor) -> Tensor:
    """[H, W] in 0..1 -> [H, W, 3] uint8, linear between the shades."""
    position = shares * (len(_SHADES) - 1)
    lower = position.long().clamp(max=len(_SHADES) - 2)
    return torch.lerp(_SHADES[lower], _SHADES[lower + 1], (position - lower)[..., None]).round().byte()


def _shortened(name: str) -> str:
    name = " ".join(name.split())
    return name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…"
