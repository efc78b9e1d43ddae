"""Trains steps of a run again where nothing is kept, and compares what each of its checkpoints meant.

    again = Again(place, record, parts, apart, note)
    again.train(part)                           # of each part: raises UserError (83) at the first difference
    again.require_all()                         # the links and the records of these steps, as wholes

Tests: tests/unit/ask/test_verify.py
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from ask.record import Part, Record
from ask.repeat import Instead, Place, steps_in_words
from engine.after_step import evaluate_and_save
from engine.due import what_is_due
from engine.records.log import TIMING
from engine.saving import wait_for_save
from train import train
from utils.distributed.world import World
from utils.errors import Exit, UserError
from utils.rundir.chain import Link
from utils.rundir.checkpoint import Checkpoints
from utils.rundir.lock import is_locked
from utils.rundir.run import Run
from utils.rundir.snapshot import Beside
from utils.rundir.state import TrainState
from utils.settings.run_options import RecordOptions

SAMPLES = "what its samples were"
Key = tuple[int, bool]  # of a link: its step, and whether it is of a copy before the evaluation


class ComparedCheckpoints(Checkpoints):
    """Saves where the run did; instead of being written, each checkpoint is compared with the run's link.

    wanted: the run's links up to this part's start. end: the step of the only checkpoint that is written, as the next
    part begins there; None: there is no next part. compare: called with each wanted link that was computed here.
    """

    def __init__(self, run: Run, world: World, config: RecordOptions, wanted: Mapping[Key, Link], end: int | None,
                 compare: Callable[[Link, Key], None]):
        super().__init__(run, world, config)
        self._wanted, self._end, self._compare = wanted, end, compare
        self._steps, self._asked = {step for step, _ in wanted}, dict[Key, Key]()  # of what was saved, the run's key
        write = self._folder.write
        self._folder = Instead(self._folder, write=lambda *given: write(*given) if given[-1]["step"] == end else None)

    def is_due(self, step: int) -> bool:
        """Whether the run has a link of this step."""
        return step in self._steps

    def is_due_by_clock(self) -> bool:
        """The links alone say when."""
        return False

    def save(self, state: TrainState, beside: Beside, awaits_evaluation: bool = False) -> None:
        """Where a step is saved before and after its evaluation: what the run has links of. Collective."""
        progress = state.progress
        is_end = progress.step == self._end and progress.evaluated_step < progress.step
        key, copy = (progress.step, awaits_evaluation), (progress.step, True)
        if key not in self._wanted and copy in self._wanted and copy not in self._asked.values():
            self._asked[key] = copy  # `ask.verify --keep` made it, though no evaluation is due
        if is_end or self._asked.setdefault(key, key) in self._wanted:
            super().save(state, beside, awaits_evaluation)  # Collective.

    def _note(self, link: Link) -> None:
        """Also called for the beginning, which has no checkpoint. Raises UserError (83)."""
        if (key := self._asked.get(key_of(link), key_of(link))) in self._wanted:
            self._compare(link, key)
        super()._note(link)


@dataclass(frozen=True)
class Again:
    """Steps of a run that are computed again."""

    place: Place
    record: Record
    parts: list[Part]
    apart: list[tuple[dict[str, Any], dict[str, str]]]  # the starts that had computed them; what is not here as there
    note: Callable[[str], None]
    kept: int | None = None  # this step's checkpoint is written, too
    seen: dict[Key, Link] = field(default_factory=dict)  # what was computed here; on rank 0
    unsaid: set[str] = field(default_factory=set)  # what the run does not say, so that nothing was compared

    @property
    def steps(self) -> str:
        """Which, in words."""
        return steps_in_words(self.parts[0].first + 1, self.parts[-1].last)

    @cached_property
    def wanted(self) -> dict[Key, Link]:
        """Every link that the run has of these steps; of the beginning, too, if they begin there."""
        first, last = self.parts[0].first, self.parts[-1].last
        return {key_of(link): link for link in (*self.record.links.values(), *self.record.copies)
                if first < link["step"] <= last or link["step"] == first == 0}

    def announce(self) -> None:
        """Say what will be computed, and what may keep bits from being the same."""
        begin, run = self.parts[0], self.record.path
        world, start = self.place.world, begin.checkpoint or "the beginning"
        self.note(f"computing {self.steps} again, from {start}, on {world.world_size} x {world.device.type}")
        for words in dict.fromkeys(words for _, differ in self.apart for words in differ.values()):
            self.note(f"{words}: if bits differ, the run cannot be compared here")
        if is_locked(run):
            self.note(f"{run} is still training; it is compared up to step {self.parts[-1].last}")

    def train(self, part: Part) -> None:
        """Train a part, and compare. Collective. Raises UserError: 83 at the first difference, 75 if it is stopped."""
        end = None if part is self.parts[-1] and part.last != self.kept else part.last
        # a later start may have evaluated the last step: that is the next part's; require_all wants all of them
        wanted = {key: link for key, link in self.wanted.items() if link["start"] <= part.line["start"]}
        kind = partial(ComparedCheckpoints, wanted=wanted, end=end, compare=self.compare)
        with self.place.opened(part, self.record, kind) as t:  # Collective.
            t = replace(t, last_step=part.last, log=Instead(t.log, note=lambda text: None))
            train(t)  # Collective.
            if what_is_due(t).evaluate and (part.last, False) in wanted:
                evaluate_and_save(t)  # Collective. As at the run's next start.
                wait_for_save(t)  # Collective.
            self.place.watchdog.enter("comparing", math.inf)
            if t.flags.stop:
                raise UserError(f"stopped at step {t.state.progress.step}; no checkpoint before it differs",
                                Exit.STOPPED)

    def compare(self, link: Link, key: Key) -> None:
        """Raise UserError (83) if a link that was computed here means something else than the run's of this key."""
        step = link["step"]
        self.seen[key] = link
        then, here = (meaning(each) for each in (self.wanted[key], link))
        if then[SAMPLES].get("since") != here[SAMPLES].get("since"):  # a version before 0.14 began the run
            then[SAMPLES] = here[SAMPLES]
            self.unsaid.add(SAMPLES)
        if then[SAMPLES] != here[SAMPLES]:
            raise UserError(f"step {step}: the samples that it used are not what they were; restore them, or give"
                            " --data PATH; then verify the run", Exit.OTHER_RUN)
        if differ := [name for name in {**then, **here} if then.get(name) != here.get(name)]:
            raise UserError(f"step {step} differs: {', '.join(differ)}", Exit.DIFFERS)
        before = ", before its evaluation" * link["awaits_evaluation"]
        self.note(f"step {step}{before}: the same, {link['content'][:16]}")

    def require_all(self) -> None:
        """Raise UserError (83) unless the run's links and records of these steps are those computed here, as wholes."""
        if missed := sorted(self.wanted.keys() - self.seen.keys()):
            self.seen[missed[0]] = {}
            raise UserError(f"step {missed[0][0]} differs: nothing is saved there", Exit.DIFFERS)
        if words := self.differing_record():
            raise UserError(words, Exit.DIFFERS)

    def differing_record(self) -> str:
        """Names the first line of metrics.jsonl that is not the same in the run and here, or "".

        Compared are all lines of these steps; where a link differed, as far as there are lines here.
        """
        links, (first, last) = self.record.links, (self.parts[0].first, self.parts[-1].last)
        begin, copy = links[first]["metrics"]["bytes"] if first else 0, self.place.folder / "run"
        ends = [self.seen.get(key_of(links[last])), links[last]]
        both = [_lines(run / "metrics.jsonl", begin, link["metrics"]["bytes"] if link else math.inf)
                for run, link in zip((copy, self.record.path), ends, strict=True)]

        # in their order; another program may have more figures
        is_other = any("the program" in differ for _, differ in self.apart)
        for lines in zip_longest(*both) if ends[0] else zip(*both, strict=False):
            here, then = (_figures(line) if line else {} for line in lines)
            for name in then | here:
                if is_other and then and name not in then:
                    self.unsaid.add(name)
                elif then.get(name) != here.get(name):
                    record = then or here
                    return (f"the {record['split']} record of step {record['step']} differs: {name} {then.get(name)} in"
                            f" the run, {here.get(name)} here")
        return ""


def key_of(link: Link) -> Key:
    """What there is one link of."""
    return link["step"], link["awaits_evaluation"]


def meaning(link: Link) -> dict[str, Any]:
    """What a link says of what was computed, by names for people."""
    return {f"RUN/model/{file}": digest for file, digest in link.get("model", {}).items()} | {
        "the content": link["content"], SAMPLES: link.get("samples", {})}


def _lines(path: Path, begin: int, end: float) -> Iterator[bytes]:
    """The lines of a file between two bytes; none if there is no file, as where step 0 differed."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        file.seek(begin)
        for line in file:
            begin += len(line)
            if begin > end:
                return
            yield line


def _figures(line: bytes) -> dict[str, Any]:
    """The figures of a record but for times; of a line that the log would not write as it is, the line itself."""
    with suppress(ValueError, AttributeError):
        record = json.loads(line)
        if json.dumps(record).encode() + b"\n" == line and record.keys() >= {"split", "step"}:
            return {name: value for name, value in record.items() if name not in TIMING}
    return {"split": "unreadable", "step": "?", "line": line.decode(errors="backslashreplace").strip()}
