"""What a trained image classifier says of image files and folders, as CSV.

    python -m models.predict RUN INPUT... [--output FILE]
    python -m models.predict runs/flowers photos cat.jpg --output predictions.csv

Columns: input, prediction, probability, then the probability of every class under its name, with six decimals. Rows come in
the order of the inputs, the images of a folder (and of the folders in it) sorted by path. Model and preprocessing are those of
RUN/model. An image that cannot be read is named on standard error and has no row; the exit code is 65 then.
"""

import argparse
import csv
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TextIO

from utils.errors import Exit, UserError, explain

BATCH = 64
MAX_WORKERS = 8  # processes that decode; one for every BATCH images

# torch is imported inside the functions that need it, so that --help and typing errors answer in a moment.


def main(arguments: list[str]) -> int:
    """Predict as the command line says; returns the exit code."""
    parser = _Parser("python -m models.predict", description=__doc__, allow_abbrev=False,
                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN", help="a run directory of train.py, or its model folder")
    parser.add_argument("inputs", metavar="INPUT", nargs="+", help="an image file, or a folder of images")
    parser.add_argument("--output", metavar="FILE", help="appears under this name once it is complete (default: standard output)")
    given = parser.parse_args(arguments)
    try:
        return predict(Path(given.run), given.inputs, given.output)
    except BrokenPipeError:  # | head: the reader has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter's last flush would fail once more
        return 128 + signal.SIGPIPE
    except Exception as error:
        message, code = explain(error)
        if code == Exit.INTERNAL:
            traceback.print_exc()
        else:
            print(f"predict: {message}", file=sys.stderr)
        return code


def predict(run: Path, inputs: list[str], output: str | None) -> Exit:
    """Write a row per readable image. Raises UserError: 66 where the model or images are missing, 73 for an unwritable `output`."""
    from models.vision import load_model_folder

    paths, num_bad = list_images(inputs), 0
    model, description = load_model_folder(find_model(run))
    classes = description["classes"]
    with _open_output(output) as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["input", "prediction", "probability", *classes])
        for number, (rows, bad) in enumerate(_probabilities(model, description, paths)):
            batch = paths[BATCH * number:BATCH * (number + 1)]
            writer.writerows(
                [path, classes[row.argmax()], *(f"{value:.6f}" for value in (row.max(), *row))]
                for path, row, reason in zip(batch, rows, bad, strict=True) if not reason)
            file.flush()
            for reason in filter(None, bad):
                print(f"predict: cannot read {reason}", file=sys.stderr)
                num_bad += 1
    if num_bad:
        print(f"predict: {num_bad} of {len(paths)} images could not be read and have no row", file=sys.stderr)
    return Exit.BAD_DATA if num_bad else Exit.DONE


def find_model(run: Path) -> Path:
    """The model folder of a run, or `run` if it is one. Raises UserError (66)."""
    if not run.is_dir():
        raise UserError(f"there is no run directory {run}", Exit.NO_INPUT)
    for folder in (run / "model", run):
        if (folder / "config.json").exists():
            return folder
    raise UserError(
        f"{run} holds no model: train first (a run writes its model after its first evaluation), or name another run;"
        f" {run} has {_some(sorted(os.listdir(run)))}", Exit.NO_INPUT)


def list_images(inputs: list[str]) -> list[str]:
    """Files as they are given; for a folder, the images in it and below, sorted by path. Raises UserError (66)."""
    paths = []
    for name in inputs:
        if not os.path.exists(name):
            raise UserError(f"there is no file or folder {name}", Exit.NO_INPUT)
        paths += _images_in(name) if os.path.isdir(name) else [name]
    return paths


def _images_in(root: str) -> list[str]:
    from data.image_folder import EXTENSIONS

    images, others, seen = [], [], set()
    for folder, folders, files in os.walk(root, onerror=_raise, followlinks=True):
        stat = os.stat(folder)
        is_loop = (stat.st_dev, stat.st_ino) in seen  # by links
        seen.add((stat.st_dev, stat.st_ino))
        folders[:] = [] if is_loop else sorted(name for name in folders if not name.startswith((".", "__MACOSX")))
        for name in [] if is_loop else files:
            is_image = name.lower().endswith(EXTENSIONS) and not name.startswith(".")
            (images if is_image else others).append(os.path.join(folder, name))
    if not images:
        raise UserError(f"{root} holds no images ({' '.join(EXTENSIONS)}); it holds {_some(sorted(others))}", Exit.NO_INPUT)
    return sorted(images)


def _probabilities(model: Any, description: dict[str, Any], paths: list[str]) -> Iterator[tuple[Any, list[str | None]]]:
    """For every BATCH images, probabilities as a NumPy array [B, C], and "path: reason" where an image cannot be read."""
    import numpy as np
    import torch
    from torch.utils.data import DataLoader

    from data.augment import build_eval_transform
    from data.image_folder import ImageFolder, ImageIndex

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cudnn.allow_tf32 = False  # which has three decimals
    model.to(device)
    mean, std = (255 * torch.tensor(description[name], device=device).view(1, 3, 1, 1) for name in ("mean", "std"))
    transform = build_eval_transform(description["image_size"], description["interpolation"], description["photo"])
    encoded = [os.fsencode(path) for path in paths]
    index = ImageIndex(
        "", np.frombuffer(b"".join(encoded), np.uint8), np.cumsum([len(name) for name in encoded]), np.zeros(len(paths), np.int32))
    workers = min(MAX_WORKERS, len(os.sched_getaffinity(0)), len(paths) // BATCH)
    loader = DataLoader(
        ImageFolder(index, transform, seed=0), BATCH, sampler=[(0, i) for i in range(len(paths))], num_workers=workers,
        collate_fn=lambda samples: (torch.stack([sample.image for sample in samples]), [sample.bad for sample in samples]),
        multiprocessing_context="fork" if workers else None)
    with torch.inference_mode():
        for images, bad in loader:  # uint8 [B, H, W, 3]
            logits = model((images.to(device).permute(0, 3, 1, 2) - mean) / std)  # [B, C]
            yield logits.double().softmax(dim=1).cpu().numpy(), bad


@contextmanager
def _open_output(name: str | None) -> Iterator[TextIO]:
    """Standard output, or a file that gets its name once it is complete. Raises UserError (73)."""
    text = {"encoding": "utf-8", "errors": "surrogateescape"}  # the latter for file names in another encoding
    if name is None:
        sys.stdout.reconfigure(**text)
        yield sys.stdout
        sys.stdout.flush()
        return
    path = Path(name).resolve()  # a link stays one
    partial = path.with_name(f".tmp-{path.name}-{os.getpid()}")
    try:
        if path.exists() and not path.is_file():
            raise FileExistsError(0, "it exists and is no file")
        file = partial.open("w", newline="", **text)
    except OSError as error:
        raise UserError(f"--output {name}: cannot write it ({error.strerror}); name another file", Exit.CANNOT_CREATE) from None
    try:
        with file:
            yield file
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(Exit.USAGE, f"predict: {message}\n")  # argparse's own code is 2


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") or "nothing"


def _raise(error: OSError) -> NoReturn:
    raise error


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
