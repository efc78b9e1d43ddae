"""Checkpoints: atomic, checksummed, the newest valid one wins.

    RUN/checkpoints/step-0000000120-g1/  model.safetensors  state.pt  trainer.json  MANIFEST.json

MANIFEST.json is written last and holds a sha256 of every chunk of every file (torch.load accepts flipped bits silently), and
the folder is renamed into place last: nothing unfinished is ever named step-*. g counts the starts of the run.
"""

import hashlib
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from utils.config import RecordOptions, duration_or_steps
from utils.distributed import World
from utils.errors import Exit, UserError
from utils.parallel.base import Strategy

FORMAT = 1
CHUNK = 16 * 2**20  # bytes hashed at once; sha256 does 1.3 GB/s a core, and chunks run in parallel


@dataclass(frozen=True)
class Progress:
    """Where a run is. Everything random or scheduled is a pure function of this."""

    epoch: int = 0
    sample_offset: int = 0  # samples of the epoch's order that are done
    step: int = 0  # optimizer steps done
    evaluated_step: int = 0  # the step of the last finished evaluation: one that is due and not done is done first after a resume

    def advanced(self, end: int, num_samples: int) -> "Progress":
        """After an optimizer step over the samples up to position `end` of an epoch of `num_samples`."""
        is_over = end == num_samples
        return replace(self, epoch=self.epoch + is_over, sample_offset=0 if is_over else end, step=self.step + 1)


@dataclass
class TrainState:
    """The only list of what a run is: if losing it changes the run, it is here."""

    strategy: Strategy
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    progress: Progress = Progress()
    best: dict[str, Any] = field(default_factory=dict)  # {"step", "metric", "value"} of the best evaluation

    def weights(self) -> dict[str, Tensor]:
        """Full raw weights and buffers by plain name, contiguous, on the CPU; the run's on rank 0."""
        return {name: tensor.detach().cpu().contiguous() for name, tensor in self.strategy.model_state().items()}

    def state_dict(self) -> dict[str, Any]:
        """What state.pt holds."""
        return {"optimizer": self.strategy.optimizer_state(self.optimizer), "scaler": self.scaler.state_dict()}

    def load(self, state: dict[str, Any], trainer: dict[str, Any]) -> None:
        """Become what was saved; the weights are loaded apart."""
        self.strategy.load_optimizer_state(self.optimizer, state["optimizer"])
        if state["scaler"]:  # else the run was no fp16 run until now
            self.scaler.load_state_dict(state["scaler"])
        self.progress, self.best = Progress(**trainer["progress"]), trainer["best"]


class Checkpoints:
    """The checkpoints of a run, under `folder`. Rank 0 writes; every rank calls."""

    def __init__(self, folder: Path, world: World, config: RecordOptions, start: int, note: Callable[[str], None]):
        self._folder, self._world, self._keep, self._start, self._note = folder, world, config.keep, start, note
        self._every_steps, self._every_s = duration_or_steps("save_every", config.save_every)
        self._saved, self._saved_at = Progress(), time.monotonic()  # (before the first step there is nothing to lose)

    def are_none(self) -> bool:
        """Whether there is no checkpoint to continue from, valid or not. Collective."""
        return self._world.once(lambda: not _names(self._folder))

    def is_due(self, step: int) -> bool:
        """Whether --save-every calls for a checkpoint after optimizer step `step`."""
        return self._every_steps is not None and step % self._every_steps == 0

    def is_due_by_clock(self) -> bool:
        """The same for a duration, by rank 0's clock: ranks must agree before they act."""
        return self._every_s is not None and self._world.is_main and time.monotonic() - self._saved_at > self._every_s

    def save(self, state: TrainState) -> None:
        """Save, unless nothing happened since the last save. Collective. Raises UserError (74) on every rank if rank 0 cannot write."""
        if state.progress == self._saved:
            return
        weights, values = state.weights(), state.state_dict()
        trainer = {"format": FORMAT, "progress": asdict(state.progress), "best": state.best, "processes": self._world.world_size}
        self._world.once(lambda: self._write(state.progress.step, weights, values, trainer))
        self._saved, self._saved_at = state.progress, time.monotonic()

    def restore(self, state: TrainState) -> bool:
        """Load the newest valid checkpoint into `state`; False if there is none. Collective.

        Damaged ones are set aside as damaged-step-..., with a note. Raises UserError: 82 if there are some and none is valid, 74
        if a rank does not see the one that rank 0 chose.
        """
        name = self._world.once(self._newest_valid)
        if name is None:
            return False

        def load() -> None:
            _load_weights(self._folder / name, state.strategy)
            values = torch.load(self._folder / name / "state.pt", map_location=self._world.device, weights_only=True)
            state.load(values, json.loads((self._folder / name / "trainer.json").read_text()))

        self._on_every_rank(load)
        self._saved = state.progress
        return True

    def load_best(self, strategy: Strategy) -> Progress:
        """Load the weights of the best checkpoint, or of the newest if none was evaluated; where it stood. Collective.

        Changes nothing on disk. Raises UserError (66) if there is none.
        """
        folder = self._folder / self._world.once(lambda: _best(self._folder))
        self._on_every_rank(lambda: _load_weights(folder, strategy))
        return Progress(**self._world.once(lambda: json.loads((folder / "trainer.json").read_text())["progress"]))

    def _on_every_rank(self, load: Callable[[], None]) -> None:
        """Run `load`; if any rank cannot read, raise UserError (74) on all. Collective."""
        problem = None
        try:
            load()
        except OSError as error:
            problem = (f"{socket.gethostname()} cannot read {error.filename} ({error.strerror}):"
                       " on several nodes the run directory must be shared")
        for told in self._world.gather(problem):
            if told:
                raise UserError(told, Exit.IO)

    def _write(self, step: int, weights: dict[str, Tensor], values: dict, trainer: dict) -> None:
        name = f"step-{step:010d}-g{self._start}"
        partial = self._folder / f".tmp-{name}"
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
            torch.save(values, partial / "state.pt")
            (partial / "trainer.json").write_text(json.dumps(trainer, indent=1))
            files = ("model.safetensors", "state.pt", "trainer.json")
            for file in files:
                sync(partial / file)
            manifest = {"format": FORMAT, "chunk": CHUNK, "files": {file: _digest(partial / file) for file in files}}
            manifest["sha256"] = _own_digest(manifest)
            (partial / "MANIFEST.json").write_text(json.dumps(manifest, indent=1))
            sync(partial / "MANIFEST.json")
            sync(partial)
            os.rename(partial, self._folder / name)
            sync(self._folder)
        except (OSError, RuntimeError, SafetensorError) as error:  # torch.save and safetensors wrap a full disk in their own types
            free = shutil.disk_usage(self._folder).free >> 20 if self._folder.is_dir() else 0
            shutil.rmtree(partial, ignore_errors=True)
            raise UserError(
                f"cannot save {self._folder / name}: {error} ({free} MiB free); earlier checkpoints are untouched:"
                " make room and run the same command to continue", Exit.IO) from error
        self._remove_old(trainer["best"].get("step"))

    def _remove_old(self, best_step: int | None) -> None:
        names = _names(self._folder)
        spared = set(names[: self._keep]) | set([name for name in names if _step(name) == best_step][:1])
        for name in set(names) - spared:
            doomed = self._folder / f".tmp-removed-{name}"
            os.rename(self._folder / name, doomed)  # a half-removed one must not look like a checkpoint
            shutil.rmtree(doomed)

    def _newest_valid(self) -> str | None:
        for leftover in self._folder.glob(".tmp-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        names = _names(self._folder)
        for i, name in enumerate(names):
            problem = find_damage(self._folder / name)
            if problem is None:
                return name
            os.rename(self._folder / name, self._folder / f"damaged-{name}")
            lost = _step(name) - _step(names[i + 1]) if i + 1 < len(names) else _step(name)
            self._note(f"checkpoint {name} is damaged ({problem}) and set aside as damaged-{name}; {lost} steps will be repeated")
        damaged = sorted(path.name for path in self._folder.glob("damaged-*")) if self._folder.is_dir() else []
        if damaged:
            raise UserError(
                f"{self._folder} holds {len(damaged)} checkpoints and none is valid ({damaged[-1]} is the newest);"
                " start over with --fresh, or restore the folder from a copy", Exit.NO_CHECKPOINT)
        return None


def find_damage(folder: Path) -> str | None:
    """What is wrong with the checkpoint in `folder`, in words; None if every byte is as it was written.

    Raises UserError (78) if a newer version of this program wrote it.
    """
    try:
        manifest = json.loads((folder / "MANIFEST.json").read_bytes())
        if manifest.pop("sha256") != _own_digest(manifest):
            return "MANIFEST.json: checksum differs"
        if manifest["format"] > FORMAT:
            raise UserError(f"{folder} has format {manifest['format']}, newer than this program's {FORMAT}", Exit.OTHER_RUN)
        for file, expected in manifest["files"].items():
            size = (folder / file).stat().st_size
            if size != expected["bytes"]:
                return f"{file}: {size} of {expected['bytes']} bytes"
            if _digest(folder / file, manifest["chunk"]) != expected:
                return f"{file}: checksum differs"
    except (OSError, json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _load_weights(folder: Path, strategy: Strategy) -> None:
    try:
        strategy.load_model_state(load_file(folder / "model.safetensors"))
    except KeyError as error:
        raise UserError(f"{folder} holds another model: {error.args[0]}", Exit.OTHER_RUN) from None


def _best(folder: Path) -> str:
    names = _names(folder)
    newest = next((name for name in names if find_damage(folder / name) is None), None)
    if newest is None:
        raise UserError(f"{folder} holds no valid checkpoint: train first", Exit.NO_INPUT)
    best = json.loads((folder / newest / "trainer.json").read_text())["best"]
    return next((name for name in names if best and _step(name) == best["step"] and find_damage(folder / name) is None), newest)


def _names(folder: Path) -> list[str]:
    """Names of finished checkpoints, the newest (step, then start) first."""
    found = [path.name for path in folder.glob("step-*") if re.fullmatch(r"step-\d+-g\d+", path.name)] if folder.is_dir() else []
    return sorted(found, key=lambda name: [int(part) for part in re.findall(r"\d+", name)], reverse=True)


def _step(name: str) -> int:
    return int(name.split("-")[1])


def _digest(path: Path, chunk: int = CHUNK) -> dict[str, Any]:
    size = path.stat().st_size

    def hashed(start: int) -> str:
        with path.open("rb") as file:
            file.seek(start)
            return hashlib.sha256(file.read(chunk)).hexdigest()

    with ThreadPoolExecutor() as pool:
        return {"bytes": size, "sha256": list(pool.map(hashed, range(0, size, chunk)))}


def _own_digest(manifest: dict) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def sync(path: Path) -> None:
    """fsync a file or folder: what is renamed into place must have reached the disk before."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
