"""What stands beside an exported model of images: how to prepare one, in words and as a program, and a golden sample.

Legend: I images of a sample, H, W height and width in pixels, C outputs.

Tests: tests/end_to_end/test_export.py
"""

import runpy
import shutil
import sys
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from utils.errors import first_line, say

RUN = "run.py"
RUN_TOLERANCE = 0.05  # the same by Pillow alone, whose resizing and decoding differ a little


def steps_of(description: Mapping[str, Any]) -> list[str]:
    """How an image is prepared, in words; run.py does it."""
    return ["take the first page or frame of the file, and turn it as its EXIF orientation says",
            f"16 bits: 0 is black, {description['white_value']} and above white; scale to 8 bits",
            "lay transparency over white; RGB, 8 bits",
            f"resize the shorter side to {description['resize_size']} pixels, {description['interpolation']}, with"
            " antialias (as Pillow's resize)",
            f"cut out the centre of {description['image_size']} x {description['image_size']} pixels; black beyond",
            "uint8, channels first; mean and std are inside of the model"]


def add_run(folder: Path, about: Mapping[str, Any], prepare: Callable[[Sequence[str]], dict[str, Tensor]],
            predict: Callable[[Sequence[str]], np.ndarray], known: Mapping[str, np.ndarray],
            description: Mapping[str, Any]) -> dict[str, Any]:
    """The golden sample, for export.json. Beside it run.py, if it predicts the same as the model of the run."""
    name = next(iter(known))
    [pixels] = prepare([name])["images"].split(1)[:1]                                       # [1, 3 * I, H, W]
    pictures = []
    for image in pixels[0].split(3):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(file := BytesIO(), "PNG")
        pictures.append(b64encode(file.getvalue()).decode())
    found = {"golden": {"pixels": pictures, "values": predict([name])[0].tolist()}}

    shutil.copy(Path(__file__).with_name("run_exported.py"), folder / RUN)
    module = SimpleNamespace(**runpy.run_path(str(folder / RUN)))
    far = 0.0
    try:
        own = module.load(folder)
        for name, values in known.items():
            [given] = own(np.ascontiguousarray(module.prepare(name, about | found)[None]))
            far = max(far, float(np.max(np.abs(given - values) / description.get("target_std", 1.0))))
        reason = f"its predictions are off by up to {far:.2g}" if far > RUN_TOLERANCE else ""
    except Exception as error:  # Pillow does not read all that models.predict reads
        reason = f"{name}: {first_line(error)}"
    if reason:
        (folder / RUN).unlink()
        say(f"{RUN} is left out: {reason}", sys.stdout)
    return found | ({} if reason else {"run_largest_difference": far})
