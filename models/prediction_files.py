"""What models.predict writes: CSV or JSONL, and features. By several processes, and to continue after a kill: in parts.

FILE.parts-DIGEST/N is what FILE gets of batch N, and N.npy its features. The digest is of all that their bytes depend
on: a start with another model, other inputs or other arguments does not find them.

Tests: tests/end_to_end/test_predict.py
"""

import argparse
import glob
import io
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from data.images.folder import images_of
from models.blocks import watch_features
from models.objectives import answer
from models.output import Prediction, Predictions
from utils.array_folder import digest_of
from utils.distributed.world import World
from utils.errors import Exit, RankError, UserError, say
from utils.files import read_checked, write_checked
from utils.output_files import csv_writer, open_output, require_output
from utils.rundir.chain import files_in
from utils.rundir.identity import code_digest
from utils.rundir.lock import RunLock, is_locked


def require_outputs(given: argparse.Namespace) -> None:
    """Raise UserError: 64 if an output is an input or the other output, too, 73 if it cannot be written.

    given: the arguments of models.predict, whose inputs are there.
    """
    taken = {os.path.realpath(part) for file in _files(given.inputs) for part in (file, *file.split(","))}
    for flag, name in (("--output", given.output), ("--embeddings", given.embeddings)):
        if name and os.path.realpath(name) in taken:
            raise UserError(f"{flag} {name}: it is an input, or the other output, too; name another file")
        if name:
            require_output(name, flag)
            taken.add(os.path.realpath(name))


def folder_of_parts(given: argparse.Namespace, model: Path | None, world: World, lock: RunLock) -> Path:
    """FILE.parts-DIGEST, which rank 0 locks; those that other commands left are removed. Collective.

    given: the arguments of models.predict. model: its folder; None: `given` says which weights. Raises UserError: 65 if
    nodes differ, 78 if another command writes FILE.
    """
    files = _files(given.inputs)
    stats = [(stat.st_size, stat.st_mtime_ns) for stat in map(os.stat, filter(os.path.exists, files))]  # A,B is no file
    digest = digest_of(vars(given), files, stats, model and files_in(model),
                       code_digest(), torch.__version__, world.device.type)
    world.require_same(digest, "the model and the inputs")  # Collective.
    parts = Path(f"{given.output}.parts-{digest}")

    def prepare() -> None:
        for found in parts.parent.glob(glob.escape(parts.name[:-len(digest)]) + "[0-9a-f]" * len(digest)):
            if found != parts and is_locked(found):
                raise UserError(f"{given.output} is being written by another start, with another model, other inputs or"
                                " other arguments; wait, stop it, or use another --output", Exit.OTHER_RUN)
            if found != parts:
                say(f"predict: beginning anew: {found} is of another model, other inputs or other arguments")
                shutil.rmtree(found)
        lock.acquire(parts, say, "--output")
        if os.listdir(parts) != [".lock"]:
            say(f"predict: continuing: what is in {parts} is done")

    world.on_rank_zero(prepare)  # Collective.
    return parts


def compute_parts(given: argparse.Namespace, found: Predictions, parts: Path) -> None:
    """Write this process's batches into the folder `parts`. Raises RankError (65) if the features cannot be seen."""
    seen = watch_features(found.model) if given.embeddings else []
    for number, batch in enumerate(found.batches):
        if batch and given.embeddings:
            np.save(parts / f"{number}.npy", _features(seen, batch).float().cpu())
        if batch:
            write_checked(parts / str(number), _piece(given.format, found.description, batch))


def write_files(given: argparse.Namespace, found: Predictions, parts: Path | None) -> tuple[int, int]:
    """Write the files from the folder `parts`, which is then removed; None: from what is computed meanwhile.

    Returns the numbers of inputs, and of those without a row, whose reasons it prints. Raises UserError (73).
    """
    num_inputs = num_bad = 0
    pieces = ((_piece(given.format, found.description, batch) for batch in found.batches) if parts is None else
              (_read_part(parts / str(number)) for number in range(found.num_batches)))
    with open_output(given.output) as file:
        if given.format == "csv":
            names = found.description["classes"]
            csv_writer(file)(["input", *answer(found.description, names, [0.0] * len(names))[0], *names])
        for rows, reasons, size in pieces:
            file.write(rows)
            file.flush()
            for reason in reasons:
                tqdm.write(f"predict: cannot read {reason}", file=sys.stderr)  # above the bar
            num_inputs, num_bad = num_inputs + size, num_bad + len(reasons)
        if given.embeddings:
            features = [parts / f"{number}.npy" for number in range(found.num_batches)]
            shape = (num_inputs - num_bad, max((np.load(path).shape[1] for path in features), default=0))
            with open_output(given.embeddings, "--embeddings") as other:
                np.lib.format.write_array_header_1_0(
                    other.buffer, {"descr": "<f4", "fortran_order": False, "shape": shape})
                for path in features:
                    other.buffer.write(np.load(path).tobytes())
    if parts is not None:
        shutil.rmtree(parts, ignore_errors=True)  # there is none if there was no input
    return num_inputs, num_bad


def _files(inputs: Sequence[str]) -> list[str]:
    return [file for name in inputs for file in images_of(name)]


def _read_part(path: Path) -> tuple[str, list[str], int]:
    """What _piece returned. Raises UserError (65) if the file is damaged."""
    try:
        return read_checked(path)
    except ValueError as error:
        raise UserError(f"{error}; remove it, and the same command computes it again", Exit.BAD_DATA) from None


def _piece(format: str, description: Mapping[str, Any], batch: Sequence[Prediction]) -> tuple[str, list[str], int]:
    """The rows of a batch, why its other inputs have none, and the number of inputs."""
    file = io.StringIO(newline="")
    write_csv = csv_writer(file)
    for one in [one for one in batch if one.values is not None]:
        said, by_name = answer(description, description["classes"], one.values.tolist())
        if format == "csv":
            write_csv([one.input, *said.values(), *by_name.values()])
            continue
        row = {"input": one.input, **said} | {
            name: float(value) for name, value in said.items() if name == "probability"}
        row["probabilities" if said else "predictions"] = {name: float(value) for name, value in by_name.items()}
        is_text = one.input.encode("utf-8", "ignore").decode() == one.input  # a file's name may be in any encoding
        file.write(json.dumps(row, ensure_ascii=not is_text) + "\n")
    return file.getvalue(), [one.bad for one in batch if one.values is None], len(batch)


def _features(seen: list[Tensor], batch: Sequence[Prediction]) -> Tensor:
    """[rows, D], of the inputs that have a row. seen: of watch_features. Raises RankError (65)."""
    is_good = [one.values is not None for one in batch]
    inputs = seen.pop() if len(seen) == 1 else torch.empty(0, 0)  # of all, or of the good ones
    seen.clear()
    if any(is_good) and (inputs.ndim not in (2, 4) or len(inputs) not in (len(batch), sum(is_good))):
        raise RankError("--embeddings: the last layer of the model is not called once for a batch, with a vector or a"
                        " map of each input, so there are no pooled features; leave --embeddings out", Exit.BAD_DATA)
    features = inputs.mean(dim=(2, 3)) if inputs.ndim == 4 else inputs
    return features[is_good] if len(inputs) == len(batch) else features
