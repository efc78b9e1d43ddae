"""The chain of a run's checkpoints: what each one means, as a hash, and the hash of the link before it.

    chain = Chain(run.path)
    chain.resume(newest, step)                  # at the start
    link = chain.next(step, ...)                # before a checkpoint is written, for its manifest
    chain.append(link)                          # when it has its name

RUN/chain.jsonl has a line for the beginning, step 0, and for each step that was saved and is done. A copy that is saved
before the evaluation of its step has its link in its manifest alone. A link says

    step, start         of the checkpoint, by the number of the run's start that saved it
    awaits_evaluation   whether it is of such a copy
    content             the sha256 of its meaning, see content_hash
    samples             of what its samples were, see utils.rundir.digests.summary
    metrics             {"bytes", "sha256"}: of RUN/metrics.jsonl up to that step; it has begun with these bytes since
    starts              the sha256 of RUN/starts.jsonl up to that start
    model               {file: sha256} of RUN/model but its README.md, if it is this checkpoint's
    previous, link      the sha256 of the link before it, and of this one

A line {"resumed": step} says that the links after that step are of a part that is trained again: abandoned. A step that
a later start evaluates has a second line, and the last one counts. (Before version 0.14 such a copy had a line, too.)
"""

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from utils.files import file_sha256, json_lines, lines_of, sync, write_atomically

FILE = "chain.jsonl"
CARD = "README.md"  # of RUN/model: its owner may edit it
NO_RECORDS = {"bytes": 0, "sha256": hashlib.sha256().hexdigest()}  # of metrics.jsonl before the first step
Link = dict[str, Any]


class Chain:
    """RUN/chain.jsonl, as rank 0 continues it."""

    def __init__(self, run_dir: Path):
        self._path, self._links = run_dir / FILE, []  # those that count, in their order

    def resume(self, newest: Link | None, step: int) -> None:
        """The run goes on after `step`, from the checkpoint with the link `newest`; None: it has none.

        What is not of its past is abandoned. A kill may have kept the newest line from the file: it is added.
        """
        lines = read_lines(self._path.parent)
        counted = valid_links(lines)
        self._links = [link for link in counted if link["step"] < step or link == newest]
        if len(self._links) < len(counted):
            lines.append({"resumed": max((link["step"] for link in self._links), default=-1)})
        if newest and not newest["awaits_evaluation"] and newest not in self._links[-1:]:
            lines.append(newest)
            self._links.append(newest)
        content = "".join(f"{json.dumps(line)}\n" for line in lines).encode()
        if content != (self._path.read_bytes() if self._path.exists() else b""):
            write_atomically(self._path, content)

    def next(self, step: int, **facts: Any) -> Link:
        """The link of a checkpoint that is about to be written."""
        before = next((link["link"] for link in reversed(self._links) if link["step"] < step), "")
        link = {"step": step, **facts, "previous": before}
        return link | {"link": digest_of(link)}

    def append(self, link: Link) -> None:
        """The checkpoint with this link has its name, and its step is done. Raises OSError."""
        is_new = not self._path.exists()
        with self._path.open("a") as file:
            file.write(f"{json.dumps(link)}\n")
            file.flush()
            os.fsync(file.fileno())
        if is_new:
            sync(self._path.parent)
        self._links.append(link)


def read_lines(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of RUN/chain.jsonl, without what is not one, such as a line that a kill has cut off."""
    return [line for line in json_lines(run_dir / FILE)
            if isinstance(line, dict) and isinstance(line.get("resumed", line.get("step")), int)
            and ("resumed" in line or "link" in line)]


def valid_links(lines: Iterable[dict[str, Any]], pending: Link | None = None) -> list[Link]:
    """Of lines of RUN/chain.jsonl, the links that count, in their order: the last one of each step.

    pending: of the newest checkpoint, whose line is not in the file: a kill kept it away, or an evaluation is due.
    """
    links: dict[int, Link] = {}
    for line in lines:
        if "resumed" in line:
            while links and next(reversed(links)) > line["resumed"]:
                links.popitem()
        else:
            links.pop(line["step"], None)
            links[line["step"]] = line
    last = links[next(reversed(links))] if links else None
    if pending and (last is None or _age(pending) > _age(last)):
        links.pop(pending["step"], None)
        links[pending["step"]] = pending
    return list(links.values())


def _age(link: Link) -> tuple[int, bool]:
    return link["step"], not link["awaits_evaluation"]


def digest_of(values: Mapping[str, Any], own: str = "link") -> str:
    """The sha256 of a link or another JSON object, but for its value `own`, which holds this digest."""
    return hashlib.sha256(json.dumps({name: value for name, value in values.items() if name != own},
                                     sort_keys=True).encode()).hexdigest()


def content_hash(weights: Mapping[str, Tensor], state: Mapping[str, Any], trainer: Mapping[str, Any]) -> str:
    """The sha256 of what a checkpoint means; not of who computed it, when, or how the files are packed.

    weights, state, trainer: what its three files hold. In the order of their names, a line each: a tensor's name,
    dtype, shape and the sha256 of its contiguous little-endian bytes; anything else as JSON; of trainer.json the
    position and the best result.
    """
    nest = {"weights": weights, "state": state, **{name: trainer[name] for name in ("progress", "best")}}
    with ThreadPoolExecutor() as pool:
        lines = pool.map(_described, sorted(leaves(nest), key=itemgetter(0)))
        return hashlib.sha256("".join(lines).encode()).hexdigest()


def hashed(path: Path, size: float = math.inf) -> "tuple[hashlib._Hash, int]":
    """The sha256 of the first `size` bytes of a file, or of all; and how many these are. No file: of no byte."""
    digest, done = hashlib.sha256(), 0
    with suppress(FileNotFoundError), path.open("rb") as file:
        while chunk := file.read(int(min(2**20, size - done))):
            digest.update(chunk)
            done += len(chunk)
    return digest, done


def files_in(folder: Path) -> dict[str, str]:
    """{file: sha256} of all files in a folder but its CARD, by their paths in it."""
    return {path.relative_to(folder).as_posix(): file_sha256(path) for path in sorted(folder.rglob("*"))
            if path.is_file() and path != folder / CARD}


def starts_hash(run_dir: Path, start: int) -> str:
    """The sha256 of RUN/starts.jsonl up to the line of that start."""
    kept = [line for line in lines_of(run_dir / "starts.jsonl") if json.loads(line)["start"] <= start]
    return hashlib.sha256(b"\n".join(kept)).hexdigest()


def leaves(nest: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """All values of a nest of dicts, with their names joined by slashes."""
    for name, value in nest.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value


def _described(leaf: tuple[str, Any]) -> str:
    name, value = leaf
    if not isinstance(value, Tensor):
        return f"{name} {json.dumps(value)}\n"
    return f"{name} {value.dtype} {list(value.shape)} {tensor_hash(value)}\n"


def tensor_hash(tensor: Tensor) -> str:
    """The sha256 of its values in their order, whatever its strides and device."""
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(content).hexdigest()
