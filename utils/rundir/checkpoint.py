"""Checkpoints: the state of a run, saved in the background; the newest valid one is loaded.

A save is a Snapshot: all that it writes, as it is at one moment. To copy the state is what the training waits for; a
thread of rank 0 writes the copy. There is one save at a time.
All ranks learn of its error with the next step (Agreement). The next save, an evaluation, a stop and the end of the run
wait for it (flush). The files: utils/rundir/checkpoint_folder.py.
"""

import json
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._pytree import tree_map_only

from utils.distributed.world import World
from utils.errors import Exit, UserError, counted
from utils.rundir.chain import NO_RECORDS, Chain, Link, content_hash, files_in, starts_hash
from utils.rundir.checkpoint_folder import FORMAT, CheckpointFolder, name_of, step_of
from utils.rundir.digests import summary
from utils.rundir.run import Run
from utils.rundir.snapshot import Beside, Snapshot, exports_averages
from utils.rundir.state import Progress, TrainState
from utils.settings.run_options import RecordOptions
from utils.strategies.base import Strategy

LEAST_STEPS_KEPT, SHARES_KEPT = 1000, 20  # --keep-every auto: a twentieth of the run, but at least so many steps
STATES = 3  # times the weights: the size of a checkpoint with Adam's two averages, and without --ema-decay's
SAMPLES = "samples.safetensors"  # its hashes are in the link; content_hash leaves it out
LAST_SAVE_S = 20  # to finish the current save when a failure ends the run; torchrun kills after 30 s


class Checkpoints:
    """The checkpoints of a run. Rank 0 writes; every rank calls."""

    def __init__(self, run: Run, world: World, config: RecordOptions):
        self._folder = CheckpointFolder(run.path / "checkpoints", config.keep, run.note)
        self._world, self._run = world, run
        self._every, self._keep, self._keep_every = config.save_every, config.keep, config.keep_every
        self._chain, self._num_landmarks = Chain(run.path), 0
        self._saved, self._saved_at = Progress(), time.monotonic()  # before the first step there is nothing to save
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future | None = None  # the last save
        self._num_bytes = self._model_bytes = 0  # of a checkpoint, roughly, and of RUN/model; known after restore()
        self.records: Mapping[str, Any] = NO_RECORDS  # of metrics.jsonl where this start begins; known on rank 0
        self.count, self.stall_s = 0, 0.0  # saves of this start, and seconds that this rank waited for them

    def is_empty(self) -> bool:
        """Whether there is no checkpoint, valid or not. Collective."""
        return self._world.on_rank_zero(lambda: not self._folder.names())

    def follow(self, state: TrainState, total_steps: int) -> None:
        """The run goes on from `state` to `total_steps`: what --keep-every means; the chain from there on. Collective.
        """
        every, step, run = self._keep_every, state.progress.step, self._run
        every = max(LEAST_STEPS_KEPT, -(-total_steps // SHARES_KEPT)) if every == "auto" else every
        self._folder.is_landmark = lambda at: at == run.resolved.first_step or (every > 0 and at % every == 0)
        self._num_landmarks = total_steps // every if every else 0  # that of a branch is a link, and takes no room
        weights, values = (state.weights(), state.state_dict()) if state.progress == Progress() else ({}, {})

        def go_on() -> None:
            newest = next((link for link in self._folder.links()[:1] if link["step"] == step), None)
            self.records = newest["metrics"] if newest else NO_RECORDS
            self._chain.resume(newest, step)
            if state.progress == Progress() and newest is None:  # a link of the initial weights
                trainer = {"progress": _saved(Progress()), "best": {}}
                self._note(self._link_of(Snapshot(weights, values, {}, trainer, Beside(NO_RECORDS), run.start, False)))

        self._world.on_rank_zero(lambda: run.writes and go_on(), num_bytes=self._num_bytes)

    def is_due(self, step: int) -> bool:
        """Whether --save-every or --keep-every calls for a checkpoint after optimizer step `step`."""
        return step % self._every.steps == 0 or self._folder.is_landmark(step)

    def is_due_by_clock(self) -> bool:
        """The same for a duration, by rank 0's clock: ranks must agree on it before they act."""
        return self._world.is_main and time.monotonic() - self._saved_at > self._every.seconds

    def save(self, state: TrainState, beside: Beside, awaits_evaluation: bool = False) -> None:
        """Start to save, unless nothing happened since the last save. Collective.

        awaits_evaluation: an evaluation comes next, after which the same step is saved again.
        """
        if state.progress == self._saved:
            return
        self.flush()  # one save at a time

        # copy the state; a thread of rank 0 writes the copy
        began = time.monotonic()
        weights, values, samples = state.weights(), state.state_dict(), state.samples()
        if self._world.is_main:
            trainer = {"format": FORMAT, "progress": _saved(state.progress), "best": state.best,
                       "processes": self._world.world_size}
            weights, values, samples = tree_map_only(Tensor, _copied, (weights, values, samples))
            snapshot = Snapshot(weights, values, samples, trainer, beside, self._run.start, awaits_evaluation)
            self._pending = self._writer.submit(self._write, snapshot)

        # count
        self._saved, self._saved_at = state.progress, time.monotonic()
        self.count += 1
        self.stall_s += time.monotonic() - began

    def newest_step(self) -> int | None:
        """The step of the newest checkpoint on disk; None before the first."""
        return next(map(step_of, self._folder.names()), None)

    def has_failed(self) -> bool:
        """Whether the last save failed; known on rank 0."""
        return self._pending is not None and self._pending.done() and self._pending.exception() is not None

    def flush(self) -> None:
        """Wait until the last save is on disk. Collective.

        Raises UserError (74) on every rank if it could not be written.
        """
        began = time.monotonic()
        self._world.on_rank_zero(lambda: self._pending and self._pending.result(), num_bytes=self._num_bytes)
        self.stall_s += time.monotonic() - began

    @property
    def most_bytes(self) -> int:
        """Room on the disk that the run may need: the checkpoints that stay, one being written, RUN/model."""
        return (self._keep + 2 + self._num_landmarks) * self._num_bytes + self._model_bytes

    def warn_of_small_disk(self) -> None:
        """Warn at the start if the run may need more room than there is, or than its checkpoints have taken."""
        run = self._run
        if run.writes and (room := shutil.disk_usage(run.path).free + self._folder.num_bytes()) < self.most_bytes:
            run.note(f"warning: {socket.gethostname()}: {run.path} has room for {room / 1e9:.3g} GB, but its"
                     f" checkpoints and RUN/model may take {self.most_bytes / 1e9:.3g} GB: use a smaller"
                     " --keep, --keep-every 0, or --run-dir on another disk")

    @property
    def limit_s(self) -> float:
        """Seconds that a save, or waiting for one, may take."""
        return self._world.limit_s(self._num_bytes)

    def close(self) -> None:
        """Give the current save time to finish: it is valid whatever ends the run. Only flush reports its error."""
        if self._pending is not None:
            wait([self._pending], LAST_SAVE_S)

    def cost(self) -> str:
        """What the saves of this start have cost, in words."""
        return f"{counted(self.count, 'checkpoint')} saved; training waited {self.stall_s:.1f} s for them"

    def restore(self, state: TrainState) -> bool:
        """Load the newest valid checkpoint into `state`; False if there is none. Collective.

        Rank 0 alone reads and checks them. Damaged ones are renamed to damaged-step-..., with a note. Raises UserError
        on every rank: 82 if there are checkpoints and none is valid, 74 if rank 0 cannot read them.
        """
        self._model_bytes = sum(weight.nbytes for weight in state.strategy.module.parameters())
        self._num_bytes = STATES * self._model_bytes + sum(value.nbytes for value in state.averages.values.values())
        self._num_bytes += sum(digests.num_bytes for digests in state.digests.values())
        found = self._read(self._folder.newest_valid, state.strategy)
        if found is None:
            return False
        with _of_this_model(found):
            state.load(found["weights"], found["state"], found["trainer"], found.get("samples"))
        self._saved = state.progress
        return True

    def load_best(self, strategy: Strategy) -> tuple[Progress, bool]:
        """Load what RUN/model holds, or the newest weights if nothing was evaluated. Collective.

        Returns its position, and whether it is the average of the weights (--ema-decay). Changes nothing on disk.
        Raises UserError (66) if there is none.
        """
        found = self._read(self._folder.best, strategy, with_state=False)
        with _of_this_model(found):
            strategy.load_model_state(found["weights"])
        return Progress(**found["trainer"]["progress"]), exports_averages(found["trainer"])

    def _write(self, snapshot: Snapshot) -> None:
        try:
            # records and RUN/model, which the checkpoint refers to
            snapshot.beside.write({name: weight.contiguous() for name, weight in snapshot.exported.items()})
            link = self._link_of(snapshot)

            # then the checkpoint itself, and its link
            weights = {name: weight.contiguous() for name, weight in snapshot.weights.items()}  # strides are not saved
            self._folder.write(name_of(snapshot.step, snapshot.start, snapshot.awaits_evaluation), {
                "model.safetensors": lambda path: save_file(weights, path, metadata={"format": "pt"}),
                "state.pt": lambda path: torch.save(snapshot.values, path),
                SAMPLES: partial(save_file, snapshot.samples),
                "trainer.json": lambda path: path.write_text(json.dumps(snapshot.trainer, indent=1)),
            }, snapshot.trainer["best"].get("step"), link)
            self._note(link)
        except (OSError, RuntimeError, SafetensorError) as error:
            raise UserError(f"cannot save to {self._folder.path.parent}: {error}; make room or repair the disk, and the"
                            " same command continues the run", Exit.IO) from error

    def _link_of(self, snapshot: Snapshot) -> Link:
        """The link of what is being saved; what it refers to is written."""
        facts = {"start": snapshot.start, "awaits_evaluation": snapshot.awaits_evaluation,
                 "content": content_hash(snapshot.weights, snapshot.values, snapshot.trainer),
                 "samples": summary(snapshot.samples), "metrics": snapshot.beside.records,
                 "starts": starts_hash(self._run.path, snapshot.start)}
        if snapshot.beside.has_model:
            facts["model"] = files_in(self._run.path / "model")
        return self._chain.next(snapshot.step, **facts)

    def _note(self, link: Link) -> None:
        """The checkpoint with this link, or the beginning, is there. Raises OSError."""
        if not link["awaits_evaluation"]:
            self._chain.append(link)

    def _read(self, choose: Callable[[], str | None], strategy: Strategy,
              with_state: bool = True) -> dict[str, Any] | None:
        """What the checkpoint that rank 0 chooses and reads holds; None if it chooses none. Collective.

        In host memory, if a device has no room for all.
        """
        found = None

        def read() -> None:
            nonlocal found
            if (name := choose()) is not None:
                folder = self._folder.path / name
                found = {"folder": str(folder), "trainer": json.loads((folder / "trainer.json").read_text()),
                         "weights": load_file(folder / "model.safetensors")}
                if with_state and (folder / SAMPLES).exists():  # not of 0.13 and before
                    found["samples"] = load_file(folder / SAMPLES)
                if with_state or exports_averages(found["trainer"]):
                    found["state"] = torch.load(folder / "state.pt", map_location="cpu", weights_only=True)
                if not with_state:
                    found["weights"] |= found.pop("state", {}).get("ema", {})

        size = self._world.on_rank_zero(self._folder.num_bytes)
        self._world.on_rank_zero(read, num_bytes=size)
        return self._world.broadcast_nest(found, strategy.is_split)


@contextmanager
def _of_this_model(found: dict[str, Any]) -> Iterator[None]:
    """Raise UserError (78) if what was found has other names or shapes than the model that loads it."""
    try:
        yield
    except KeyError as error:
        raise UserError(f"{found['folder']} holds another model: {error.args[0]}; a run needs the model that it began"
                        " with: undo the change in models/own.py, or in the packages (its env.txt has the versions)",
                        Exit.OTHER_RUN) from None


def _saved(progress: Progress) -> dict[str, Any]:
    return {name: value for name, value in asdict(progress).items() if value is not None}


def _copied(tensor: Tensor) -> Tensor:
    """A tensor in host memory, as it is now."""
    return tensor.detach().to("cpu", copy=True)
