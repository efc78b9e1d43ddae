"""Predicts images by the exported model in this folder. It needs Pillow, numpy, and onnxruntime or torch.

    python run.py IMAGE...        # A,B for a model that takes two images of a sample
    python run.py                 # predicts the golden sample of export.json, and compares

models.export writes a copy of this file beside a model, as run.py. prepare() does what `preparation` in export.json
says.

Tests: tests/end_to_end/test_export.py
"""

import base64
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

HERE = Path(__file__).parent
LONGEST = 8  # times as long as wide: the ends of a longer image are not used


def prepare(names: str, about: dict) -> np.ndarray:
    """Paths with commas between them to uint8 [3 * images, H, W], what the model takes of a sample."""
    parts = [_prepared(name, about) for name in (names.split(",") if about.get("num_images", 1) > 1 else [names])]
    return np.concatenate(parts, axis=2).transpose(2, 0, 1)


def _prepared(name: str, about: dict) -> np.ndarray:
    image, white, side = Image.open(name), about["white_value"], about["image_size"]
    tags = getattr(image, "tag_v2", {})  # of a TIFF: a fourth band is transparency if it says so
    is_clear = image.has_transparency_data and (not tags or image.mode != "RGBA" or bool(tags.get(338)))
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):  # 16 bits
        values = np.asarray(image).astype(np.int64).clip(0, white)
        shown = ((values * 255 + white // 2) // white).astype(np.uint8)
        image = Image.fromarray(255 - shown if tags.get(262) == 0 else shown)
    if is_clear:
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    shorter = min(image.size)
    image = _centre(image.convert("RGB"), *(min(each, LONGEST * shorter) for each in image.size))
    size = [int(about["resize_size"] * each / shorter) for each in image.size]
    if image.size != tuple(size):
        image = image.resize(size, Image.Resampling[about["interpolation"].upper()])  # with antialias
    return np.asarray(_centre(image, side, side))


def _centre(image: Image.Image, width: int, height: int) -> Image.Image:
    """Black where the image is smaller."""
    left, top = round((image.width - width) / 2), round((image.height - height) / 2)
    return image.crop((left, top, left + width, top + height))


def load(folder: Path) -> Callable[[np.ndarray], np.ndarray]:
    """A function of uint8 [B, 3 * images, H, W] that gives [B, C]."""
    if (folder / "model.onnx").exists():
        import onnxruntime

        session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
        return lambda pixels: session.run(None, {"images": pixels})[0]
    import torch

    module = torch.export.load(folder / "model.pt2").module()
    return lambda pixels: module(torch.from_numpy(pixels)).numpy()


def golden(about: dict) -> tuple[np.ndarray, np.ndarray]:
    """The prepared pixels of one sample, [1, 3 * images, H, W], and what the model gives of them, [1, C]."""
    pictures = [np.asarray(Image.open(io.BytesIO(base64.b64decode(each)))) for each in about["golden"]["pixels"]]
    return np.concatenate(pictures, axis=2).transpose(2, 0, 1)[None], np.array([about["golden"]["values"]])


if __name__ == "__main__":
    ABOUT, PREDICT = json.loads((HERE / "export.json").read_text()), load(HERE)
    for each in sys.argv[1:]:
        [values] = PREDICT(np.ascontiguousarray(prepare(each, ABOUT)[None]))
        print(each, *(f"{name} {value:.6g}" for name, value in zip(ABOUT["classes"], values)))  # noqa: B905
    if not sys.argv[1:]:
        pixels, expected = golden(ABOUT)
        scale = np.array(ABOUT.get("target_std", 1.0))
        far = float((np.abs(PREDICT(np.ascontiguousarray(pixels)) - expected) / scale).max())
        if far > 1e-3:
            sys.exit(f"the golden sample is off by {far:.1e}: the file is damaged, or the runtime computes otherwise")
        print(f"the golden sample is predicted as it was (largest difference {far:.1e})")
