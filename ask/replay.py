"""Compute steps of a run again: which samples they were, what the model saw of them, and what each cost.

    python -m ask.replay RUN --step N                       # one step
    python -m ask.replay RUN --steps A:B                    # a table over steps: which sample is behind the spike
    python -m ask.replay RUN --step N --list                # the names alone
    python -m ask.replay RUN --first-use FILE               # in which step each sample that FILE names is used first
    torchrun --nproc-per-node=2 -m ask.replay RUN --step N  # of a run with --strategy exact: the same bytes

The run stays as it is: its steps are computed in a temporary directory, from the newest checkpoint before them. A
sample's loss is what it adds to the loss of its micro-batch; with BatchNorm, mixing or packing it depends on the others
there. --grad-norms adds the norm of the gradient of that loss: a backward pass for each sample.
"""

import argparse
import math
import os
import re
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ask.command_line import answer, begin, parser_of

PARSER = parser_of("replay", __doc__, "RUN")
PARSER.add_argument("--step", "--steps", dest="steps", metavar="N or A:B", default="",
                    help="an optimizer step, counted from 1 as in the records; or several, both ends included")
PARSER.add_argument("--output", metavar="FOLDER", help="also write samples.csv, samples.json and the pictures there")
PARSER.add_argument("--grad-norms", action="store_true", help="also the norm of each sample's gradient")
PARSER.add_argument("--inputs-only", action="store_true", help="draw the inputs, and compute nothing")
PARSER.add_argument("--first-use", metavar="FILE", help="names of samples, as train.py --without takes them")
PARSER.add_argument("--list", action="store_true", help="print the samples' names, and read none of them")

if __name__ == "__main__":  # before torch is imported
    GIVEN, WATCHDOG = begin(PARSER)

import torch
from torch import Tensor

from ask.record import Part, Record, part_of, parts_of, read_run, read_trained, starts_of
from ask.repeat import computing, differences, figures_of, steps_in_words
from ask.rounding import not_as_recorded
from ask.samples import Rows, requested, shortened, table, watch, write_rows
from data.batch import GlobalBatch
from data.left_out import find_all, named
from engine.training import Training
from models.blocks import blocks_of
from train import train_step
from utils.distributed.watchdog import Watchdog
from utils.distributed.world import World
from utils.errors import Exit, UserError, counted, say
from utils.output_files import open_output, require_output
from utils.rundir.scratch import require_seen
from utils.settings.option import Names
from utils.strategies import load_strategy


@dataclass
class Found:
    """What was computed again."""

    rows: Rows = field(default_factory=list)  # the samples of the steps that were asked for
    figures: Rows = field(default_factory=list)  # step, loss, grad_norm, lr, normalizer of these steps
    updates: Rows = field(default_factory=list)  # of one step: by block, see update_norms
    compared: list[int] = field(default_factory=list)  # steps with a record
    apart: list[str] = field(default_factory=list)  # what is not as recorded, in words


def main(given: argparse.Namespace, watchdog: Watchdog) -> Exit:
    """Answer on standard output; what depends on this machine goes to standard error. Collective."""
    first, last = (1, 1) if given.first_use else steps_of(given)
    is_idle = given.list or given.inputs_only or given.first_use
    device = given.device or ("cpu" if given.list or given.first_use else None)
    with computing([given.run], device, watchdog) as place:  # Collective.
        # what is asked for
        world, found, output = place.world, Found(), Path(given.output) if given.output else None
        record = read_run(given.run, world, *given.data)  # Collective.
        parts = [part_of(record, last)] if is_idle else parts_of(record, first - 1, last, world)  # Collective.
        if output:
            world.on_rank_zero(lambda: _make(output))  # Collective.
            world.everywhere(lambda: require_seen(output, "--output"))  # Collective.

        # the answer
        if is_idle:
            with place.opened(parts[0], record) as t:  # Collective.
                found.rows = first_uses(t, given.first_use) if given.first_use else _gathered(  # Collective.
                    t, last, requested(t, last, output, given.list))
        else:
            for text in announced(record, parts, given, world):  # Collective.
                if world.is_main:
                    say(text)
            recorded = read_trained(record, world, parts)  # Collective.
            place.walk(record, parts, partial(replay, (first, last), given, recorded, found))  # Collective.
        if world.is_main:
            asked = "first uses in the steps" if given.first_use else steps_in_words(first, last)
            report(f"{asked} of {record.path}", found, output)
    return Exit.DONE


def first_uses(t: Training, file: str) -> Rows:
    """A row for each sample that the file names: its step in the first epoch, which uses all. Raises UserError (64)."""
    starts, train, place_of = t.feed.plan.starts, named(t.task.train_set), t.feed.sampler.order(0).argsort()
    if train is None or named(t.task.eval_set) is None:
        raise UserError("--first-use: this task's samples have no names")
    indices_of = find_all(Names(file).names or (), train, t.task.eval_set.index)
    steps = {index: bisect_right(starts, int(place_of[index])) for indices in indices_of.values() for index in indices}
    return [{"step": step if step <= t.total_steps and index not in train.left_out else "never",
             "sample": train.called(index)} for index, step in sorted(steps.items(), key=lambda item: item[::-1])]


def steps_of(given: argparse.Namespace) -> tuple[int, int]:
    """The first and the last step that is asked for. Raises UserError (64)."""
    match = re.fullmatch(r"(\d+)(?::(\d+))?", given.steps)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last or (first < last and (given.list or given.inputs_only)):
        raise UserError("give --step N, or --steps A:B with A up to B, counted from 1; --list and --inputs-only are"
                        " for one step")
    return first, last


def consequences(start: dict[str, Any], differ: dict[str, str]) -> list[str]:
    """What is not as it was in this start of the run, and what follows from it."""
    strategy = start["settings"]["strategy"]
    if "the program" in differ:
        follows = "what is computed here may be something else"
    elif load_strategy(strategy).is_invariant:
        follows = "the bits may differ: --strategy exact promises equal bits on the same hardware and versions only"
    else:
        follows = f"with --strategy {strategy} sums may be rounded differently, and the figures differ a little"
    return [f"{text}; {follows}" for text in differ.values()]


def announced(record: Record, parts: list[Part], given: argparse.Namespace, world: World) -> Iterator[str]:
    """What is not as it was, and what will be computed. Collective. Raises UserError (64)."""
    for start in starts_of(record, parts):
        yield from consequences(start, differences(start, world))  # Collective.
    what = f"computing {counted(parts[-1].last - parts[0].first, 'step')} again, from step {parts[0].first} of"
    known = [part.line["settings"] for part in parts]
    if given.grad_norms and any(load_strategy(each["strategy"]).is_sharded or each["compile"] for each in known):
        # a compiled backward pass overwrites what a second one needs; with donated_buffer off its figures are wrong
        raise UserError("--grad-norms: with --strategy fsdp or --compile a sample's gradient cannot be computed alone;"
                        " leave it out")
    each = counted(known[-1]["global_batch_size"], "backward pass")
    yield f"{what} {record.path}" + f"; --grad-norms: {each} more in a step that is asked for" * given.grad_norms


def replay(asked: tuple[int, int], given: argparse.Namespace, recorded: dict[int, dict[str, Any]], found: Found,
           t: Training, batch: GlobalBatch) -> None:
    """Compute a step; of one that is asked for, keep every sample. recorded: the train records by step. Collective."""
    # the step
    (first, last), step = asked, t.state.progress.step + 1
    if step < first:
        figures = figures_of(t, *train_step(t, batch))  # Collective.
    else:
        before = _weights(t) if first == last else {}  # Collective.
        watched, rows = watch(t, given.grad_norms, Path(given.output) if given.output else None)
        figures = figures_of(t, *train_step(watched, batch))  # Collective.
        found.rows += _gathered(t, step, rows)  # Collective.
        found.updates = update_norms(t, before, _weights(t)) if first == last else []  # Collective.
        found.figures.append({"step": step} | figures | {"normalizer": batch.normalizer})

    # its record
    if then := recorded.get(step):
        found.compared.append(step)
        found.apart += not_as_recorded(then, figures, t.precision.name)


def update_norms(t: Training, before: dict[str, Tensor], after: dict[str, Tensor]) -> Rows:
    """By block, from the input to the head: the norm of the step's update by the norm of the weights before it.

    before, after: by name, on rank 0; nothing on the others.
    """
    rows = []
    for index, block in enumerate(blocks_of(t.strategy.module)):
        names = [name for name in block.params if name in before]
        weights = [before[name].float() for name in names]
        updates = [after[name].float() - weight for name, weight in zip(names, weights, strict=True)]
        norm, moved = (float(torch.nn.utils.get_total_norm(each)) for each in (weights, updates))
        if norm:
            modules = [name.rpartition(".")[0].replace(".", "/") for name in names]
            name = (os.path.commonpath(modules) or modules[0]).replace("/", ".")
            rows.append({"block": index, "name": name, "update_by_weights": moved / norm})
    return rows


def report(what: str, found: Found, output: Path | None) -> None:
    """Write what was found to --output, and print it, the samples with the highest figures first."""
    # the files
    by = "grad_norm" if "grad_norm" in found.rows[0] else "loss"
    rows = sorted(found.rows, key=lambda row: -_weight(row.get(by)))
    for name, each in {"samples": rows, "steps": found.figures, "blocks": found.updates}.items():
        if output and each:
            write_rows(each, str(output / name))

    # the words
    folder, short = shortened(rows)
    lines = [f"{what}: {counted(len(rows), 'sample')}" + f", the highest {by} first" * bool(found.figures)
             + f"\nthe samples are in {folder}" * bool(folder), *table(short)]
    lines += [f"all of them: {output / 'samples.csv'}"] if output else []
    for each in (found.figures, found.updates):
        lines += ["", *table(each, len(each))] if each else []
    if found.apart:
        lines += ["", f"not as recorded: {found.apart[0]}"]
    elif found.compared:  # --log-every leaves some out
        steps = f"{steps_in_words(found.compared[0], found.compared[-1])} ({counted(len(found.compared), 'record')})"
        lines += ["", f"the same bits as recorded: loss, grad_norm and lr of {steps}"]
    elif found.figures:
        lines += ["", "nothing to compare with: neither these steps nor those before them are on record (--log-every)"]
    with suppress(BrokenPipeError), open_output(None) as file:
        file.write("\n".join([*lines, ""]))


def _gathered(t: Training, step: int, rows: Rows) -> Rows:
    """The rows of all ranks, in the order of the micro-batches. Collective."""
    rows = [{"step": step, **row} for rank in t.world.gather(rows) for row in rank]  # Collective.
    return sorted(rows, key=lambda row: row["micro_batch"])


def _weights(t: Training) -> dict[str, Tensor]:
    """In host memory: a device may have no room for two more."""
    state = t.strategy.model_state()  # Collective.
    return {name: value.to("cpu", copy=True) for name, value in state.items()} if t.world.is_main else {}


def _weight(value: float | None) -> float:
    """For sorting: what is not finite comes first."""
    return 0.0 if value is None else value if math.isfinite(value) else math.inf


def _make(folder: Path) -> None:
    with suppress(OSError):  # nor can a file in it be written
        folder.mkdir(parents=True, exist_ok=True)
    require_output(str(folder / "samples.csv"))


if __name__ == "__main__":
    answer(main, GIVEN, WATCHDOG, PARSER)
