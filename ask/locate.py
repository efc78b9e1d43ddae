"""Computes two runs again, side by side, to the first thing that differs between them.

Each must repeat its own records here. Their states are compared after each step, from the newest checkpoints of a step
at which they agreed; then the first step that differs is computed once more in both, and what it computes is compared.
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from tqdm import tqdm

from ask.repeat import Part, Record, batches, carry_on, checkpoint_before, differences, opened, parts_of
from ask.trace import Found, Key, Trace, far_apart, first_difference, sentence, trace_step
from data.batch import GlobalBatch
from engine.training import Training
from train import train_step
from utils.distributed.watchdog import Watchdog
from utils.distributed.world import World
from utils.errors import Exit, UserError
from utils.hardware.devices import Arriving
from utils.rundir.chain import content_hash
from utils.rundir.checkpoint_folder import step_of

NAMES = ("RUN1", "RUN2")


@dataclass(frozen=True)
class Again:
    """How runs are computed again here."""

    given: argparse.Namespace
    world: World
    watchdog: Watchdog
    folder: Path  # that goes at the end

    def walk(self, name: str, record: Record, parts: Sequence[Part],
             visit: Callable[[Training, GlobalBatch], None]) -> None:
        """Compute parts of a run in the folder `name`; visit(training, batch) computes a step. Collective."""
        folder = self.folder / name
        self.world.on_rank_zero(lambda: folder.mkdir(exist_ok=True))  # Collective.
        for part in parts:
            with opened(part, self.given, record.path, folder, self.world, self.watchdog) as t:  # Collective.
                is_quiet = not self.world.is_main or not sys.stderr.isatty()
                bar = partial(tqdm, desc=name, total=part.last - t.state.progress.step, leave=False, disable=is_quiet)
                for batch in bar(batches(t, part.last)):
                    visit(t, batch)  # Collective.
                if t.flags.stop:
                    raise UserError(f"stopped at step {t.state.progress.step} of {name}", Exit.STOPPED)
                if part is not parts[-1]:
                    carry_on(t)  # Collective.


def locate(again: Again, runs: Sequence[Record], agreed: int, differs: int) -> Iterator[str]:
    """Compute both from step `agreed`, or an earlier checkpoint, to `differs`; say what differs first. Collective."""
    # both, each beside its own records
    begin, found = common_step(runs, agreed), []
    yield f"computing steps {begin + 1} to {differs} of both again"
    for name, run in zip(NAMES, runs, strict=True):
        parts: list[Part] = []
        try:
            parts = parts_of(run, begin, differs)
            found.append(states(again, name, run, parts))  # Collective.
        except UserError as error:
            if error.code in (Exit.STOPPED, Exit.LOST_PEERS):
                raise
            yield f"{name} cannot be repeated here: {error}"
            for part in parts:
                yield from (f"  {text}" for text in differences(part.line, again.world).values())  # Collective.
            return

    # the first step that differs, once more
    one, two = found
    step = next((step for step in one if one[step] != two[step]), None)
    if step is None:
        yield ("both repeat their records, and their weights are the same after each of these steps: what differs is an"
               " evaluation, or what the chain keeps beside the weights")
        return
    yield f"both repeat their records; the first step that differs is step {step}"
    yield first_thing(again, runs, [parts_of(run, begin, step) for run in runs])  # Collective.


def common_step(runs: Sequence[Record], step: int) -> int:
    """The last step up to `step` of which both have a checkpoint to begin from; 0: the beginning."""
    while True:
        paths = [checkpoint_before(run, step) for run in runs]
        steps = {step_of(path.name) if path else 0 for path in paths}
        if len(steps) == 1:
            return steps.pop()
        step = min(steps)


def states(again: Again, name: str, run: Record, parts: Sequence[Part]) -> dict[int, list[Any]]:
    """By step: loss, norm of the gradient, learning rate, and the hash of what it left. Collective.

    Raises UserError (83) for a figure that is not the record's.
    """
    found: dict[int, list[Any]] = {}

    def visit(t: Training, batch: GlobalBatch) -> None:
        """Collective."""
        losses, grad_norm = Arriving(*train_step(t, batch)).wait()  # Collective.
        step, by_index = t.state.progress.step, t.world.all_reduce_sum(losses).tolist()  # Collective.
        figures = {"loss": sum(by_index), "grad_norm": float(grad_norm), "lr": t.schedule(step - 1)}
        for figure, value in figures.items():
            recorded = run.trained[step][figure] if step in run.trained else value
            if value != recorded and (math.isfinite(value) or recorded is not None):
                raise UserError(f"{figure} of step {step} is {recorded} in its record, and {value} here", Exit.DIFFERS)
        weights, state = t.state.weights(), {**t.state.state_dict(), "coverage": {}}  # Collective.
        left = t.world.on_rank_zero(lambda: content_hash(weights, state, {"progress": {}, "best": {}}))  # Collective.
        found[step] = [*figures.values(), left]

    again.walk(name, run, parts, visit)  # Collective.
    return found


def trace(again: Again, name: str, run: Record, parts: Sequence[Part]) -> tuple[Found, dict[Key, Tensor]]:
    """What the last step of the parts computes on all ranks; the tensors that this rank keeps of it. Collective."""
    seen = Trace()

    def visit(t: Training, batch: GlobalBatch) -> None:
        if t.state.progress.step + 1 < parts[-1].last:
            train_step(t, batch)  # Collective.
        else:
            trace_step(t, batch, seen)  # Collective.

    again.walk(f"{name}-traced", run, parts, visit)  # Collective.
    by_rank = again.world.gather([*seen.found.items()])  # Collective.
    return {tuple(key): tuple(value) for found in reversed(by_rank) for key, value in found}, seen.kept


def first_thing(again: Again, runs: Sequence[Record], parts: Sequence[list[Part]]) -> str:
    """The first thing that differs in the last step of the parts, in words. parts: of each run. Collective."""
    (one, kept), (two, others) = (trace(again, *each) for each in zip(NAMES, runs, parts, strict=True))  # Collective.
    key, step, line = first_difference(one, two), parts[0][-1].last, parts[0][-1].line
    if key is None:
        return "seen by hooks, both compute the same in it: the difference does not come back"
    far = far_apart(key, one, (kept, others), line["resolved"]["precision"])
    far = next(filter(None, again.world.gather(far)), "")  # Collective: one rank keeps both tensors.
    return f"the first thing that differs is {sentence(key, step, one, two)}{far}"
