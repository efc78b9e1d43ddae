"""The chain of a run's checkpoints: what each one means, as a hash, and the hash of the link before it.

    chain = Chain(run.path)
    chain.resume(of_checkpoints, step)          # at the start
    link = chain.next(step, ...)                # before a checkpoint is written, for its manifest
    chain.append(link)                          # when it has its name

RUN/chain.jsonl has a line for each checkpoint that ever was, and one for the beginning, step 0. The manifests are the
truth: what a kill kept from the file is taken from there. A link says

    step, start         of the checkpoint, by the number of the run's start that saved it
    awaits_evaluation   whether it was saved before the evaluation of its step, after which another one is
    content             the sha256 of its meaning, see content_hash
    metrics             {"bytes", "sha256"}: of RUN/metrics.jsonl then; it has begun with these bytes ever since
    starts              the sha256 of RUN/starts.jsonl up to that start
    model               {file: sha256} of RUN/model but its README.md, if it is this checkpoint's
    previous, link      the sha256 of the link before it, and of this one

A line {"resumed": step} says that the links after that step are of a part that is trained again: abandoned.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from utils.files import json_lines, lines_of, write_atomically

FILE = "chain.jsonl"
CARD = "README.md"  # of RUN/model: its owner may edit it


class Chain:
    """RUN/chain.jsonl, as rank 0 continues it."""

    def __init__(self, run_dir: Path):
        self._run_dir = run_dir
        self._lines: list[dict[str, Any]] = []  # of the file, and what could not be written to it

    def resume(self, of_checkpoints: Sequence[dict[str, Any]], step: int) -> None:
        """The run goes on after `step`: complete the file from the links in the checkpoints' manifests, newest first.
        """
        self._lines = read_lines(self._run_dir)
        num_written = len(self._lines)
        self._lines += missing_links(self._lines, of_checkpoints)
        links = valid_links(self._lines)

        # what is abandoned; what the run goes on from stays, or counts again
        newest = [link for link in of_checkpoints if link["step"] == step][:1]
        stays = newest or [link for link in links if link["step"] == step]
        if [link for link in links if link["step"] >= step] != stays:
            self._lines += [{"resumed": step}, *newest]
        if len(self._lines) > num_written:
            self._write()

    def next(self, step: int, **facts: Any) -> dict[str, Any]:
        """The link of a checkpoint that is about to be written."""
        before = [link["link"] for link in valid_links(self._lines) if link["step"] < step]
        link = {"step": step, **facts, "previous": before[-1] if before else ""}
        return link | {"link": digest_of(link)}

    def append(self, link: dict[str, Any]) -> None:
        """The checkpoint with this link has its name. Raises OSError; then the next call writes this link, too."""
        self._lines.append(link)
        self._write()

    def _write(self) -> None:
        write_atomically(self._run_dir / FILE, "".join(f"{json.dumps(line)}\n" for line in self._lines))


def read_lines(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of RUN/chain.jsonl, without what is not one, such as a line that a kill has cut off."""
    return [line for line in json_lines(run_dir / FILE)
            if isinstance(line, dict) and ("resumed" in line or {"step", "link"} <= line.keys())]


def missing_links(lines: Iterable[dict[str, Any]], of_checkpoints: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The links of checkpoints that a kill kept from these lines, in their order."""
    known = {line.get("link") for line in lines}
    return sorted((link for link in of_checkpoints if link["link"] not in known),
                  key=lambda link: (link["start"], link["step"], not link["awaits_evaluation"]))


def valid_links(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of lines of RUN/chain.jsonl, the links that count, in their order: the last one of each step."""
    links: dict[int, dict[str, Any]] = {}
    for line in lines:
        if "resumed" in line:
            links = {step: link for step, link in links.items() if step <= line["resumed"]}
        else:
            links.pop(line["step"], None)
            links[line["step"]] = line
    return list(links.values())


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


def begins_with(path: Path, size: int) -> dict[str, Any]:
    """The first `size` bytes of a file, as a link has them."""
    content = path.read_bytes()[:size] if path.exists() else b""
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def files_in(folder: Path) -> dict[str, str]:
    """{file: sha256} of all files in a folder but its CARD, by their paths in it."""
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / CARD):
        with path.open("rb") as file:  # which may be larger than the memory
            found[path.relative_to(folder).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


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
