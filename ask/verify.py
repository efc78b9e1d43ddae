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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from ask.command_line import answer, begin, parser_of

PARSER = parser_of("verify", __doc__, "RUN")
PARSER.add_argument("--from", dest="first", type=int, metavar="STEP",
                    help="begin with the newest checkpoint up to this step; by default with the run")
PARSER.add_argument("--to", dest="last", type=int, metavar="STEP",
                    help="end with the first checkpoint that the run saved from this step on; by default with the last")
PARSER.add_argument("--output", metavar="FILE", help="write a receipt, as JSON")
PARSER.add_argument("--chain-only", action="store_true", help="compute nothing: do the files belong together?")

if __name__ == "__main__":  # before torch is imported
    GIVEN, WATCHDOG = begin(PARSER)

from ask.integrity import Link, findings
from ask.record import Part, Record, is_alike, parts_of, read_run, records_of, require_begun, starts_of
from ask.repeat import Instead, Place, computing, differences, steps_in_words
from engine.after_step import evaluate_and_save, is_evaluation_due
from engine.saving import wait_for_save
from train import train
from utils.distributed.watchdog import Watchdog
from utils.distributed.world import World
from utils.errors import Exit, UserError, counted, say
from utils.output_files import open_output, require_output
from utils.rundir.chain import files_in
from utils.rundir.checkpoint import Checkpoints
from utils.rundir.lock import is_locked
from utils.rundir.run import Run
from utils.rundir.starts import describe
from utils.rundir.state import TrainState
from utils.settings.run_options import RecordOptions


class ComparedCheckpoints(Checkpoints):
    """Saves where the run did; instead of being written, each checkpoint is compared with the run's link.

    links: of the run, by step. end: the step of the only checkpoint that is written, as the next part begins there;
    None: there is no next part. compare: called with each link that was computed here; raises UserError (83).
    """

    def __init__(self, run: Run, world: World, config: RecordOptions, links: Mapping[int, Link], end: int | None,
                 compare: Callable[[Link], None]):
        super().__init__(run, world, config)
        self._links, self._end, self._compare = links, end, compare
        write = self._folder.write
        self._folder = Instead(self._folder, write=lambda *given: write(*given) if given[-1]["step"] == end else None)

    def is_due(self, step: int) -> bool:
        """Whether the run has a link of this step."""
        return step in self._links

    def is_due_by_clock(self) -> bool:
        """The links alone say when."""
        return False

    def save(self, state: TrainState, beside: Callable, awaits_evaluation: bool = False) -> None:
        """Where a step is saved before and after its evaluation: the one that the run's link is of. Collective."""
        progress, link = state.progress, self._links.get(state.progress.step)
        is_end = progress.step == self._end and progress.evaluated_step < progress.step
        if link["awaits_evaluation"] == awaits_evaluation if link else is_end:
            super().save(state, beside, awaits_evaluation)  # Collective.

    def _append(self, link: Link) -> None:
        """Also called for the beginning, which has no checkpoint."""
        if link["step"] in self._links:
            self._compare(link)
        super()._append(link)


@dataclass(frozen=True)
class Again:
    """Steps of a run that are computed again."""

    place: Place
    record: Record
    parts: list[Part]
    apart: list[tuple[dict[str, Any], dict[str, str]]]  # the starts that had computed them; what is not here as there
    note: Callable[[str], None]
    seen: dict[int, Link] = field(default_factory=dict)  # what was computed here of each step's link; on rank 0

    @property
    def steps(self) -> str:
        """Which, in words."""
        return steps_in_words(self.parts[0].first + 1, self.parts[-1].last)

    def announce(self) -> None:
        """Say what will be computed, and what may keep bits from being the same."""
        begin, last, run = self.parts[0], self.parts[-1].last, self.record.path
        count = sum(record["split"] == "val" and begin.first < record["step"] <= last for record in self.record.records)
        world, start = self.place.world, begin.checkpoint or "the beginning"
        self.note(f"computing {self.steps} and {counted(count, 'evaluation')} again, from {start}, on"
                  f" {world.world_size} x {world.device.type}")
        for words in dict.fromkeys(words for _, differ in self.apart for words in differ.values()):
            self.note(f"{words}: if bits differ, the run cannot be compared here")
        if is_locked(run):
            self.note(f"{run} is still training; it is compared up to step {last}")

    def train(self, part: Part) -> None:
        """Train a part, and compare. Collective. Raises UserError: 83 at the first difference, 75 if it is stopped."""
        links = {step: link for step, link in self.record.links.items()
                 if part.first <= step <= part.last and link["start"] <= part.line["start"]}
        end = None if part is self.parts[-1] else part.last
        kind = partial(ComparedCheckpoints, links=links, end=end, compare=self.compare)
        with self.place.opened(part, self.record, kind) as t:  # Collective.
            t = replace(t, last_step=part.last, log=Instead(t.log, note=lambda text: None))
            train(t)  # Collective.
            if is_evaluation_due(t) and not links.get(part.last, {"awaits_evaluation": True})["awaits_evaluation"]:
                evaluate_and_save(t)  # Collective. As at the run's next start.
                wait_for_save(t)  # Collective.
            self.place.watchdog.enter("comparing", math.inf)
            if t.flags.stop:
                raise UserError(f"stopped at step {t.state.progress.step}; no checkpoint before it differs",
                                Exit.STOPPED)
        self.place.world.on_rank_zero(lambda: self._require_all(links, part.last))  # Collective.

    def compare(self, link: Link) -> None:
        """Raise UserError (83) if a link that was computed here means something else than the run's of its step."""
        step = link["step"]
        self.seen[step] = link
        then, here = ({f"RUN/model/{file}": digest for file, digest in each.get("model", {}).items()}
                      | {"the content": each["content"]} for each in (self.record.links[step], link))
        if differ := [name for name in {**then, **here} if then.get(name) != here.get(name)]:
            raise UserError(f"step {step} differs: {', '.join(differ)}", Exit.DIFFERS)
        self.note(f"step {step}: the same, {link['content'][:16]}")

    def _require_all(self, links: Mapping[int, Link], last: int) -> None:
        missed = sorted(step for step in links if step > self.parts[0].first and step not in self.seen)
        words = f"step {missed[0]} differs: nothing is saved there" if missed else self.differing_record()
        if words:
            self.seen[missed[0] if missed else last] = {}
            raise UserError(words, Exit.DIFFERS)

    def differing_record(self) -> str:
        """Names the first record that is not the same in the run and here, as far as there are some here; or "".

        The evaluation of the last step may be that of the next start. If the run awaits it, it may be done here alone.
        """
        # those that both must have
        both = self.record.records, records_of(self.place.folder / "run")
        then, here = ({(record["split"], record["step"]) for record in each} for each in both)
        end = max((step for _, step in here), default=0)
        is_awaited = self.record.links.get(end, {}).get("awaits_evaluation", False)
        asked = {key for key in here if key in then or key[0] == "train" or not is_awaited}
        both = [[record for record in each if record["step"] < end or (record["split"], record["step"]) in asked]
                for each in both]

        # in their order; another program may have more figures
        is_other = any("the program" in differ for _, differ in self.apart)
        for old, new in zip_longest(*both, fillvalue={}):
            names = old if old and is_other else old | new
            for name in names:
                if old.get(name) != new.get(name):
                    record = new or old
                    return (f"the {record['split']} record of step {record['step']} differs: {name} {old.get(name)} in"
                            f" the run, {new.get(name)} here")
        return ""


def main(given: argparse.Namespace, watchdog: Watchdog) -> Exit:
    """Answer on standard output. Collective. Raises UserError."""
    if given.chain_only and given.output:
        raise UserError("--output: a receipt is about steps that are computed again; leave --chain-only out")
    run, is_main = Path(given.run), os.environ.get("RANK", "0") == "0"
    if given.chain_only:  # no group of processes, and no start that could be opened, is needed
        found = []
        if is_main:
            require_begun(given.run)
            found = findings(run)
            say("\n".join([*found, f"differs: {run}"]) if found else f"the files of {run} belong together", sys.stdout)
        return Exit.DIFFERS if found else Exit.DONE

    with computing([given.run], given.device, watchdog) as place:  # Collective.
        # the files
        world, here = place.world, describe(place.world)  # Collective.
        note = partial(say, stream=sys.stdout) if world.is_main else lambda text: None
        if given.output:
            world.on_rank_zero(partial(require_output, given.output))  # Collective.
        if found := world.on_rank_zero(partial(findings, run), takes_long=True):  # Collective.
            note("\n".join([*found, f"differs: {run}"]))
            world.on_rank_zero(lambda: write_receipt(given.output, run, "differs", found, here))  # Collective.
            return Exit.DIFFERS

        # the steps
        record = read_run(given.run, world, *given.data)  # Collective.
        parts, words = parts_to_verify(record, given.first, given.last, world), ""  # Collective.
        apart = [(start, differences(start, world) | not_promised(start))  # Collective.
                 for start in starts_of(record, parts)]
        again = Again(place, record, parts, apart, note)
        again.announce()
        try:
            for part in parts:
                again.train(part)  # Collective.
        except UserError as error:
            if error.code != Exit.DIFFERS:
                raise
            words = str(error)
        return Exit(world.on_rank_zero(lambda: conclude(again, words, given.output, here)))  # Collective.


def conclude(again: Again, words: str, output: str | None, here: dict[str, Any]) -> int:
    """Say the result, and write the receipt; on rank 0. Returns the exit code.

    words: what differs, or "". here: what computed it, see describe.
    """
    # the result
    links, seen, reasons = again.record.links, again.seen, []
    model = max((step for step, link in links.items() if "model" in link), default=None)
    if words or model not in seen or files_in(again.record.path / "model") != links[model]["model"]:
        model = None  # not verified, or the run is replacing it
    result, code = "verified", Exit.DONE
    if words:
        by = max(link["start"] for step, link in links.items() if step <= [*seen][-1])
        reasons = [each for start, differ in again.apart if start["start"] <= by for each in differ.values()]
        result, code = ("cannot be compared here", Exit.OTHER_RUN) if reasons else ("differs", Exit.DIFFERS)
    found = [*dict.fromkeys(filter(None, [words, words and again.differing_record(), *reasons]))]
    what = (f", {again.steps}: {counted(len(seen), 'link')} and all records are the same"
            + f"; RUN/model is that of step {model}" * (model is not None)) * (not words)
    again.note("\n".join([*found, f"{result}: {again.record.path}{what}"]))

    # the receipt
    write_receipt(output, again.record.path, result, found, here,
                  steps=[again.parts[0].first + 1, again.parts[-1].last], model_step=model,
                  links={step: links[step] for step in seen}, head=[*links.values()][-1]["link"],
                  computed={step: link["content"] for step, link in seen.items() if link},
                  starts=[start for start, _ in again.apart])
    return int(code)


def write_receipt(output: str | None, run: Path, result: str, found: list[str], here: dict[str, Any],
                  **steps: Any) -> None:
    """What was found, as JSON. output: None = nowhere. steps: what was computed again, if anything was."""
    if output:
        with open_output(output) as file:
            json.dump({"result": result, "found": found, "run": run.absolute().name, **steps, "computed_on": here,
                       "time": datetime.now(UTC).isoformat(timespec="seconds")}, file, indent=1)


def not_promised(start: Mapping[str, Any]) -> dict[str, str]:
    """Why the bits of this start need not repeat on the same machine: docs/reliability.md."""
    settings = start["settings"]
    is_deterministic = settings["deterministic"] or start["resolved"]["device"] == "cpu"
    kinds = {"with --compile": settings["compile"], "without --deterministic": not is_deterministic}
    return {kind: f"trained {kind}" for kind, is_so in kinds.items() if is_so}


def parts_to_verify(record: Record, first: int | None, last: int | None, world: World) -> list[Part]:
    """What is computed again. first, last: as the user gave them. Collective. Raises UserError (64)."""
    # from where, to where
    links, starts = record.links, {line["start"]: line for line in record.starts}
    ends = sorted(step for step in links if step > (first or 0) and step >= (last or 1))
    if not ends or (last and last < (first or 0)):
        raise UserError(f"{record.path} has saved steps up to {max(links, default=0)}; what is verified ends with one"
                        " of them, and begins before it: --from A --to B with A before B")
    found = parts_of(record, first or 0, ends[0] if last else ends[-1], world)  # Collective.

    # the last step of a part may have been evaluated by a start that took no step
    parts = []
    for part, following in zip(found, [*found[1:], None], strict=True):
        start = starts[links.get(part.last, part.line)["start"]]
        if start["start"] > part.line["start"] and is_alike(start, part.line):
            part = replace(part, line=start)
        parts.append(part)
        if start["start"] > part.line["start"] and not (following and is_alike(start, following.line)):
            parts.append(Part(part.last, part.last, start, None))
    return parts


if __name__ == "__main__":
    answer(main, GIVEN, WATCHDOG, PARSER)
