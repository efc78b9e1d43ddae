"""Verify a run: train its steps again in a temporary directory, and compare what each of its checkpoints meant.

    python -m ask.verify RUN                            # from the beginning to the last checkpoint
    python -m ask.verify RUN --from 4000 --to 5000      # from a checkpoint that was kept (--keep-every)
    python -m ask.verify RUN --chain-only               # compute nothing: do the files belong together?
    torchrun --nproc-per-node=2 -m ask.verify RUN       # with --strategy exact on any number of processes

The run stays as it is. Exit code 0: verified. 83: the run is not what its directory says. 78: it cannot be compared
here, because bits differ and so does what computed them. 75: stopped. The training itself prints to standard error.
"""

import argparse
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from ask.command_line import begin, parser_of

PARSER = parser_of("verify", __doc__, "RUN")
PARSER.add_argument("--from", dest="first", type=int, metavar="STEP",
                    help="begin with the newest checkpoint up to this step; by default with the run")
PARSER.add_argument("--to", dest="last", type=int, metavar="STEP",
                    help="end with the first checkpoint that the run saved from this step on; by default with the last")
PARSER.add_argument("--output", metavar="FILE", help="write a receipt, as JSON")
PARSER.add_argument("--chain-only", action="store_true", help="compute nothing: do the files belong together?")

if __name__ == "__main__":  # before torch is imported
    GIVEN, WATCHDOG = begin(PARSER, sys.argv[1:])

from ask.compared import ComparedCheckpoints, ComparedFolder, QuietLog
from ask.integrity import Link, findings
from ask.record import Part, Record, checkpoint_before, is_alike, parts_of, read_run, starts_of
from ask.repeat import Place, computing, differences
from engine.after_step import evaluate_and_save, is_evaluation_due
from engine.records.log import TIMING, records
from engine.saving import wait_for_save
from train import train
from utils.distributed.watchdog import Watchdog
from utils.errors import Exit, UserError, counted, exit_after, say
from utils.output_files import open_output, require_output
from utils.rundir.chain import read_lines
from utils.rundir.checkpoint_folder import CheckpointFolder, step_of
from utils.rundir.lock import is_locked
from utils.rundir.starts import describe

SPLITS = ("train", "val", "epoch")


@dataclass(frozen=True)
class Again:
    """Steps of a run that are computed again."""

    place: Place
    record: Record
    parts: list[Part]
    note: Callable[[str], None]
    seen: list[int] = field(default_factory=list)  # the steps whose links were compared; on rank 0

    @property
    def steps(self) -> str:
        """Which, in words."""
        first, last = self.parts[0].first + 1, self.parts[-1].last
        return f"steps {first} to {last}" if first < last else f"step {last}"

    def announce(self, apart: list[dict[str, str]]) -> None:
        """Say what will be computed, and what may keep bits from being the same. apart: see differences, by start."""
        begin, last, run = self.parts[0], self.parts[-1].last, self.record.path
        count = sum(begin.first < record["step"] <= last for record in records(run, "val"))
        world, start = self.place.world, begin.checkpoint or "the beginning"
        self.note(f"computing {self.steps} and {counted(count, 'evaluation')} again, from {start}, on"
                  f" {world.world_size} x {world.device.type}")
        for words in dict.fromkeys(words for differ in apart for words in differ.values()):
            self.note(f"{words}: if bits differ, the run cannot be compared here")
        if is_locked(run):
            self.note(f"{run} is still training; it is compared up to step {last}")

    def train(self, part: Part) -> None:
        """Train a part, and compare. Collective. Raises UserError: 83 at the first difference, 75 if it is stopped."""
        links = {step: link for step, link in self.record.links.items()
                 if part.first <= step <= part.last and link["start"] <= part.line["start"]}
        end = None if part is self.parts[-1] else part.last
        world, folder = self.place.world, self.place.folder / "run"
        compared = ComparedFolder(folder / "checkpoints", links, end, self.seen, self.note)
        kind = partial(ComparedCheckpoints, folder=compared)
        with self.place.opened(part, self.record.path, kind) as t:  # Collective.
            if part.first == 0:
                world.on_rank_zero(lambda: compared.compare(read_lines(folder)[0]))  # Collective.
            t = replace(t, last_step=part.last, log=QuietLog(t.log))
            train(t)  # Collective.
            if is_evaluation_due(t) and not links.get(part.last, {"awaits_evaluation": True})["awaits_evaluation"]:
                evaluate_and_save(t)  # Collective. As at the run's next start.
                wait_for_save(t)  # Collective.
            self.place.watchdog.enter("comparing", math.inf)
            if t.flags.stop:
                raise UserError(f"stopped at step {t.state.progress.step}; up to there nothing differs", Exit.STOPPED)
        world.on_rank_zero(lambda: self._require_all(links, part.last))  # Collective.

    def _require_all(self, links: Mapping[int, Link], last: int) -> None:
        missed = sorted(step for step in links if step > self.parts[0].first and step not in self.seen)
        words = f"step {missed[0]} differs: nothing is saved there" if missed else self.differing_record()
        if words:
            self.seen.append(missed[0] if missed else last)
            raise UserError(words, Exit.DIFFERS)

    def differing_record(self) -> str:
        """The first record that only one of both has, or that differs, in words; "" if there is none."""
        of_run, computed = (records(path, *SPLITS) for path in (self.record.path, self.place.folder / "run"))
        then = {(record["split"], record["step"]): record for record in of_run}
        for here in computed:
            old = then.get((here["split"], here["step"]), {})
            for name in {**old, **here}:
                if name not in TIMING and old.get(name) != here.get(name):
                    return (f"the {here['split']} record of step {here['step']} differs: {name} {old.get(name)} in the"
                            f" run, {here.get(name)} here")
        last = max((record["step"] for record in computed), default=0)  # whose evaluation may be that of the next start
        numbers = [Counter((record["split"], record["step"]) for record in each if record["step"] < last)
                   for each in (of_run, computed)]
        for split, step in numbers[0] - numbers[1]:
            return f"the {split} record of step {step} differs: the run has one more"
        return ""


def main(given: argparse.Namespace, watchdog: Watchdog) -> Exit:
    """Answer on standard output. Collective. Raises UserError."""
    run, is_main = Path(given.run), os.environ.get("RANK", "0") == "0"
    note = partial(say, stream=sys.stdout) if is_main else lambda text: None
    if given.chain_only and given.output:
        raise UserError("--output: a receipt is about steps that are computed again; leave --chain-only out")
    if given.chain_only:
        found = findings(run)
        note("\n".join([*found, f"differs: {run}"]) if found else f"the files of {run} belong together")
        return Exit.DIFFERS if found else Exit.DONE

    record = read_run(given.run)
    with computing(record.starts[-1], given, watchdog) as place:  # Collective.
        # the files
        world = place.world
        if given.output:
            world.on_rank_zero(partial(require_output, given.output))  # Collective.
        if found := world.on_rank_zero(partial(findings, run), takes_long=True):  # Collective.
            note("\n".join([*found, f"differs: {run}"]))
            return Exit.DIFFERS

        # the steps
        again = Again(place, record, parts_to_verify(record, given.first, given.last), note)
        here, starts = describe(world), starts_of(record, again.parts)  # Collective.
        apart, words = [differences(start, world) | not_promised(start) for start in starts], ""  # Collective.
        again.announce(apart)
        try:
            for part in again.parts:
                again.train(part)  # Collective.
        except UserError as error:
            if error.code != Exit.DIFFERS:
                raise
            words = str(error)
        return Exit(world.on_rank_zero(lambda: conclude(again, words, here, starts, apart)))  # Collective.


def conclude(again: Again, words: str, here: dict[str, Any], starts: list[dict[str, Any]],
             apart: list[dict[str, str]]) -> int:
    """Say the result, and write the receipt; on rank 0. Returns the exit code.

    words: what differs, or "". here: what computed it, see describe. starts: the lines of those that had computed it.
    apart: what is not here as it was there, by start.
    """
    # the result
    links, seen, reasons = again.record.links, again.seen, []
    model = max((step for step, link in links.items() if "model" in link), default=None)
    result, code, found = "verified", Exit.DONE, ""
    if words:
        by = max(link["start"] for step, link in links.items() if step <= seen[-1])
        reasons = [each for start, differ in zip(starts, apart, strict=True) if start["start"] <= by
                   for each in differ.values()]
        found = "\n".join(dict.fromkeys(filter(None, [words, again.differing_record(), *reasons]))) + "\n"
        result, code = ("cannot be compared here", Exit.OTHER_RUN) if reasons else ("differs", Exit.DIFFERS)
    what = (f", {again.steps}: {counted(len(seen), 'link')} and all records are the same"
            + f"; RUN/model is that of step {model}" * (model in seen)) * (not words)
    again.note(f"{found}{result}: {again.record.path}{what}")

    # the receipt
    if again.place.given.output:
        receipt = {"result": result, "found": found.splitlines(), "run": again.record.path.absolute().name,
                   "steps": [again.parts[0].first + 1, again.parts[-1].last], "model_step": model,
                   "links": {step: links[step] for step in seen}, "head": [*links.values()][-1]["link"],
                   "starts": starts, "computed_on": here, "time": datetime.now(UTC).isoformat(timespec="seconds")}
        with open_output(again.place.given.output) as file:
            json.dump(receipt, file, indent=1)
    return int(code)


def not_promised(start: Mapping[str, Any]) -> dict[str, str]:
    """Why the bits of this start need not repeat on the same machine: docs/reliability.md."""
    settings = start["settings"]
    is_deterministic = settings["deterministic"] or start["resolved"]["device"] == "cpu"
    kinds = {"with --compile": settings["compile"], "without --deterministic": not is_deterministic}
    return {kind: f"trained {kind}" for kind, is_so in kinds.items() if is_so}


def parts_to_verify(record: Record, first: int | None, last: int | None) -> list[Part]:
    """What is computed again. first, last: as the user gave them. Raises UserError (64, 66)."""
    # from where, to where
    links, starts = record.links, {line["start"]: line for line in record.starts}
    ends = sorted(step for step in links if step >= (last or 1))
    begun = record.starts[0]["step"]
    if not ends:
        raise UserError(f"{record.path} has saved steps up to {max(links, default=0)}, and nothing after them can be"
                        " verified")
    end = ends[0] if last else ends[-1]
    if first is None:  # the first kept checkpoint, if an older version began the run
        kept = (step_of(name) for name in CheckpointFolder(record.path / "checkpoints", 1, print).names())
        first = next((step for step in sorted(kept) if begun <= step < end and checkpoint_before(record, step)),
                     begun) if begun else 0

    # the last step of a part may have been evaluated by a start that took no step
    found, parts = parts_of(record, first, end), []
    for part, following in zip(found, [*found[1:], None], strict=True):
        start = starts[links.get(part.last, part.line)["start"]]
        if start["start"] > part.line["start"] and is_alike(start, part.line):
            part = replace(part, line=start)
        parts.append(part)
        if start["start"] > part.line["start"] and not (following and is_alike(start, following.line)):
            parts.append(Part(part.last, part.last, start, None))
    return parts


if __name__ == "__main__":
    exit_after(partial(main, GIVEN, WATCHDOG), "verify")
