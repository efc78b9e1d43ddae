"""The built-in data, and the settings that suit it: `--data demo` works without a network.

    root = unpack_demo("image-classification", cache)        # root/train/<0..9>/NNNN.png, root/val/<0..9>/NNNN.png

Images: 1,797 handwritten digits, 8 x 8 pixels (source and licence: data/digits.txt). Texts: data/demo_text.py.
Nothing here imports torch: the command line reads SETTINGS first.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data import demo_text
from utils.errors import Exit, UserError
from utils.files import make_folder

if TYPE_CHECKING:
    from utils.distributed.world import World

_TEXTS = {"model": "bert-tiny", "vocab_size": 4096, "max_length": 64, "epochs": 8}
SETTINGS: dict[str, dict[str, Any]] = {
    "image-classification": {
        "image_size": 32,
        "augmentation": "shift",  # a mirrored digit is a different one, or no digit
        "mean": (0.287, 0.287, 0.287),
        "std": (0.354, 0.354, 0.354),
        "epochs": 8,
    },
    "text-classification": _TEXTS,
    "masked-lm": _TEXTS | {"lr": 2e-3},
}
SHEET, LABELS = Path(__file__).with_name("digits.png"), Path(__file__).with_name("digits.txt")
SIDE = 8  # px of one digit
VAL_EVERY = 5  # each fifth of a class is for validation
VERSION = f"1-{hashlib.sha256(SHEET.read_bytes() + LABELS.read_bytes()).hexdigest()[:8]}"  # of the layout; the digits


def data_root(data: str, task: str, cache: Path, world: "World") -> str:
    """The value of --data; for "demo" the folder of the task's built-in data, unpacked once per node. Collective."""
    if data != "demo":
        return data
    return world.on_rank_zero(lambda: str(unpack_demo(task, cache)), per_node=True)


def unpack_demo(task: str, cache: Path) -> Path:
    """Write the built-in data of `task` as a data folder under `cache`, once; returns its path.

    It appears whole or not at all; of several processes one works, the others wait. Raises UserError (64, 66, 73).
    """
    if task not in SOURCES:
        raise UserError(f"--task {task} has no built-in data; pass your own with --data")
    name, write = SOURCES[task]
    root = Path(cache) / "demo" / name
    try:
        make_folder(root, write, is_whole=Path.is_dir)
    except OSError as error:
        raise UserError(f"cannot unpack the built-in data to {root}: {error.strerror};"
                        " set LOCKSTEP_CACHE to a writable folder", Exit.CANNOT_CREATE) from None
    return root


def _write_digits(root: Path) -> None:
    from PIL import Image

    # folders
    lines = LABELS.read_text(encoding="utf-8").splitlines()
    labels = "".join(line for line in lines if not line.startswith("#"))
    for split in ("train", "val"):
        for name in sorted(set(labels)):
            (root / split / name).mkdir(parents=True)

    # images, cut out of the sheet
    num_seen = dict.fromkeys(labels, 0)
    with Image.open(SHEET) as sheet:
        columns = sheet.width // SIDE
        for index, name in enumerate(labels):
            top, left = index // columns * SIDE, index % columns * SIDE
            num_seen[name] += 1
            split = "train" if num_seen[name] % VAL_EVERY else "val"
            sheet.crop((left, top, left + SIDE, top + SIDE)).save(root / split / name / f"{index:04d}.png")


# The built-in data of a task: the folder's name in the cache, and a function that writes its files.
SOURCES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "image-classification": (f"digits-{VERSION}", _write_digits),
    "text-classification": (f"docstrings-{demo_text.VERSION}", demo_text.write_docstrings),
    "masked-lm": (f"topics-{demo_text.VERSION}", demo_text.write_topics),
}
