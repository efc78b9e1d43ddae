"""What a run directory says of a run, and which steps its starts have computed.

    record = read_run(path, world)
    parts = parts_of(record, first, last, world)    # what is computed to get from step `first` to `last`

A run may be training meanwhile, so rank 0 reads it, once, and tells the others. Records are read where they are asked
for: there may be millions.

Tests: tests/unit/ask/test_repeat.py
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from engine.records.log import TIMING, each_record
from engine.records.record_file import last_records
from utils.distributed.world import World
from utils.errors import Exit, UserError, counted
from utils.files import json_lines, read_json
from utils.rundir.chain import Link, digest_of, read_lines, valid_links
from utils.rundir.checkpoint_folder import CheckpointFolder, find_damage, name_of, step_of
from utils.rundir.resolved import Resolved
from utils.rundir.starts import read_starts
from utils.settings.habits import FORMERLY_KEPT


@dataclass(frozen=True)
class Record:
    """What a run directory says of a run."""

    path: Path
    data: str | None  # where its data are, if not where they were
    starts: list[dict[str, Any]]  # see utils/rundir/starts.py
    links: dict[int, Link]  # by step: those that count, see utils/rundir/chain.py
    copies: list[Link] = field(default_factory=list)  # of checkpoints before an evaluation, which the chain leaves out
    reached: int = 0  # the last step by metrics.jsonl or status.json: of a run that diverged, say, it is in no link

    @property
    def branched(self) -> str:
        """From which run it has come, in words; "" if it is no branch."""
        return Resolved.of(self.starts[-1]["resolved"]).branched()

    @property
    def last_step(self) -> int:
        """The last step that the run has taken, as far as it is written down."""
        return max([self.reached, *self.links])


@dataclass(frozen=True)
class Part:
    """Steps of a run that were computed with the same settings: those after `first`, up to `last`."""

    first: int
    last: int
    line: dict[str, Any]  # of starts.jsonl
    checkpoint: Path | None  # of step `first`; None: the part begins where the one before ended, or with the run


def require_begun(run: str) -> None:
    """Raise UserError (66) for what is no run, or one that a version before 0.11 began."""
    path = Path(run)
    if not (path / "auto.json").exists():
        raise UserError(f"{run} is not the directory of a run that has begun", Exit.NO_INPUT)
    lines = [*json_lines(path / "starts.jsonl"), *read_lines(path)]
    if not any(isinstance(line, dict) and line.get("step") == 0 for line in lines):  # neither file has the beginning
        raise UserError(f"{run}: a version before 0.11 began this run, and kept too little of it to compute its steps"
                        " again, or to compare them", Exit.NO_INPUT)


def last_start(run: str) -> dict[str, Any]:
    """The line of the run's last start in starts.jsonl. Raises UserError: 66 for what is no run, 74."""
    require_begun(run)
    try:
        starts = read_starts(Path(run))
        for line in starts:  # what the commands take from it before they compute
            _ = (line["step"], line["start"], line["settings"]["task"], line["settings"]["strategy"],
                 line["resolved"]["device"], line["resolved"]["data"])
        return starts[-1]
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(f"{run}/starts.jsonl is damaged ({error!r}): restore it", Exit.IO) from None


def read_run(run: str, world: World, data: str | None = None) -> Record:
    """What is written down of the run in this directory. Collective. Raises UserError (74)."""
    path = Path(run)

    def read() -> list[Any]:
        try:
            lines = [line for line in read_lines(path) if "resumed" in line or line["link"] == digest_of(line)]
            of_checkpoints = CheckpointFolder(path / "checkpoints", 1, print).links()
            links = valid_links(lines, next(iter(of_checkpoints), None))
            copies = [link for link in of_checkpoints if link["awaits_evaluation"] and link not in links]
            reached = max((record["step"] for record in last_records(path / "metrics.jsonl")), default=0)
            return [read_starts(path), links, copies, max(reached, read_json(path / "status.json").get("step", 0))]
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise UserError(f"a line of {path}/metrics.jsonl or chain.jsonl is not what this program writes"
                            f" ({error!r}): restore the file", Exit.IO) from None

    starts, links, *more = world.on_rank_zero(read, takes_long=True)  # Collective.
    for start in starts:  # of an older version; no two starts differ by these
        start["settings"] = {name: value for name, value in start["settings"].items() if name not in FORMERLY_KEPT}
    return Record(path, data, starts, {link["step"]: link for link in links}, *more)


def read_records(record: Record, world: World, *splits: str, first: int = 0, last: float = math.inf
                 ) -> list[dict[str, Any]]:
    """The records of these splits of steps `first` to `last`, without times, in their order. Collective."""
    return world.on_rank_zero(lambda: [  # Collective.
        {name: value for name, value in found.items() if name not in TIMING}
        for found in each_record(record.path, *splits) if first <= found["step"] <= last], takes_long=True)


def read_trained(record: Record, world: World, parts: Sequence[Part]) -> dict[int, dict[str, Any]]:
    """The train records of the steps of these parts, by step. Collective."""
    trained = read_records(record, world, "train", first=parts[0].first + 1, last=parts[-1].last)  # Collective.
    return {each["step"]: each for each in trained}


def parts_of(record: Record, first: int, last: int, world: World) -> list[Part]:
    """What is computed to get from step `first` (or the newest checkpoint before it) to `last`. Collective.

    Raises UserError (64) for steps that the run has not taken.
    """
    _require_taken(record, first, last)
    checkpoint = checkpoint_before(record, first, world)  # Collective.
    merged: list[Part] = []
    for part in _stretches(record, step_of(checkpoint.name) if checkpoint else 0, last):
        if merged and is_alike(merged[-1].line, part.line):  # neighbours that agree are one part
            part = Part(merged.pop().first, part.last, part.line, None)
        merged.append(part)
    return [replace(merged[0], checkpoint=checkpoint), *merged[1:]]


def part_of(record: Record, step: int) -> Part:
    """The part that begins with the run and has the settings of `step`: for its samples, which need no weights."""
    _require_taken(record, step - 1, step)
    return Part(0, step, _stretches(record, step - 1, step)[0].line, None)


def _require_taken(record: Record, first: int, last: int) -> None:
    if not 0 <= first < last <= record.last_step:
        rule = f"ask for steps from 1 to {record.last_step}" if record.last_step else "there is nothing to ask for yet"
        raise UserError(f"{record.path} has taken {counted(record.last_step, 'step')}; {rule}")


def is_alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two starts have the same settings, and resolved the same."""
    return all(one[name] == other[name] for name in ("settings", "resolved"))


def starts_of(record: Record, parts: list[Part]) -> list[dict[str, Any]]:
    """The lines of starts.jsonl of those starts that computed what these parts compute again."""
    found = {part.line["start"]: part.line for part in [*_stretches(record, parts[0].first, parts[-1].last), *parts]}
    return [found[start] for start in sorted(found)]


def checkpoint_before(record: Record, step: int, world: World) -> Path | None:
    """The newest checkpoint up to `step` that is whole and of what counts; None: none is left. Collective."""
    folder = CheckpointFolder(record.path / "checkpoints", 1, print)

    def find() -> str | None:
        names = (name_of(link["step"], link["start"], link["awaits_evaluation"]) for link in folder.links()
                 if 0 < link["step"] <= step and link == record.links.get(link["step"]))
        return next((name for name in names if find_damage(folder.path / name) is None), None)

    name = world.on_rank_zero(find, takes_long=True)  # Collective.
    return folder.path / name if name else None


def _stretches(record: Record, first: int, last: int) -> list[Part]:
    """The steps after `first` up to `last` by the start that computed what counts of them: a later one may have gone
    back to an earlier step. A start that only evaluated its first step has a part without steps.
    """
    found: list[Part] = []
    for line in reversed(record.starts):
        begin = max(first, line["step"])
        if begin < last or (begin == last == line["step"] and record.links.get(last, {}).get("start") == line["start"]):
            found.insert(0, Part(begin, last, line, None))
        last = min(last, begin)
    return found
