"""What a run directory says of a run, and which steps its starts have computed.

    record = read_run(path)
    parts = parts_of(record, first, last)           # what is computed to get from step `first` to `last`
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from engine.records.log import records
from utils.errors import Exit, UserError, counted
from utils.files import read_json
from utils.rundir.chain import read_lines, valid_links
from utils.rundir.checkpoint_folder import CheckpointFolder, find_damage, step_of
from utils.rundir.starts import read_starts


@dataclass(frozen=True)
class Record:
    """What a run directory says of a run."""

    path: Path
    starts: list[dict[str, Any]]  # see utils/rundir/starts.py
    links: dict[int, dict[str, Any]]  # by step: those that count, see utils/rundir/chain.py
    trained: dict[int, dict[str, Any]]  # the train records by step

    @property
    def last_step(self) -> int:
        """The last step that the run has taken and written down."""
        return max([0, *self.links, *self.trained])


@dataclass(frozen=True)
class Part:
    """Steps of a run that were computed with the same settings: those after `first`, up to `last`."""

    first: int
    last: int
    line: dict[str, Any]  # of starts.jsonl
    checkpoint: Path | None  # of step `first`; None: the part begins where the one before ended, or with the run


def read_run(path: str, needs_starts: bool = True) -> Record:
    """What is written down of the run in `path`. Raises UserError (66).

    needs_starts: False = of a version before 0.11, whose steps nobody computes again, what it kept of its first start.
    """
    run = Path(path)
    if not (run / "auto.json").exists():
        raise UserError(f"{run} is not the directory of a run that has begun", Exit.NO_INPUT)
    starts = read_starts(run)
    if not starts and not needs_starts:
        settings, resolved = yaml.safe_load((run / "config.yaml").read_text()), read_json(run / "auto.json")
        starts = [{"step": 0, "settings": settings, "resolved": resolved}]
    elif not starts:
        raise UserError(f"{run} has no starts.jsonl: a version before 0.11 trained it, whose steps cannot be computed"
                        " again; if it is not finished, continue it with this version, and ask about the steps from"
                        " there on", Exit.NO_INPUT)
    links = {link["step"]: link for link in valid_links(read_lines(run))}
    return Record(run, starts, links, {record["step"]: record for record in records(run, "train")})


def parts_of(record: Record, first: int, last: int) -> list[Part]:
    """What is computed to get from step `first` (or the newest checkpoint before it) to `last`.

    Raises UserError: 64 for steps that the run has not taken, 66 if nothing is left to begin from.
    """
    # where to begin
    _require_taken(record, first + 1, last)
    checkpoint = checkpoint_before(record, first)
    begin = step_of(checkpoint.name) if checkpoint else 0
    if begin < (known := record.starts[0]["step"]):
        raise UserError(f"{record.path} has no checkpoint of steps {known} to {first} left to begin from, and an older"
                        f" version trained its first {counted(known, 'step')}; ask about steps after one of"
                        f" {record.path / 'checkpoints'}", Exit.NO_INPUT)

    # the starts that computed what counts: a later one may have gone back to an earlier step
    found: list[Part] = []
    end = last
    for line in reversed(record.starts):
        if line["step"] < end and begin < end:
            found.insert(0, Part(max(begin, line["step"]), end, line, None))
            end = line["step"]

    # neighbours that agree are one part
    merged: list[Part] = []
    for part in found:
        if merged and is_alike(merged[-1].line, part.line):
            part = Part(merged.pop().first, part.last, part.line, None)
        merged.append(part)
    return [Part(merged[0].first, merged[0].last, merged[0].line, checkpoint), *merged[1:]]


def part_of(record: Record, step: int) -> Part:
    """The part that begins with the run and has the settings of `step`: for its samples, which need no weights."""
    _require_taken(record, step, step)
    return Part(0, step, next(line for line in reversed(record.starts) if line["step"] < step), None)


def is_alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two starts have the same settings, and resolved the same."""
    return all(one[name] == other[name] for name in ("settings", "resolved"))


def starts_of(record: Record, parts: list[Part]) -> list[dict[str, Any]]:
    """The lines of starts.jsonl of those starts that computed what these parts compute again."""
    found, end = {part.line["start"]: part.line for part in parts}, parts[-1].last
    for line in reversed(record.starts):
        if line["step"] < end and parts[0].first < end:
            found[line["start"]], end = line, line["step"]
    return [found[start] for start in sorted(found)]


def checkpoint_before(record: Record, step: int) -> Path | None:
    """The newest checkpoint up to `step` that is whole and of what counts; None: none is left."""
    folder = CheckpointFolder(record.path / "checkpoints", 1, print)
    first = record.starts[0]["step"]  # where an older version had stopped, whose checkpoints have no links
    for path in (folder.path / name for name in folder.names() if first <= step_of(name) <= step):
        if find_damage(path) is None:
            link = json.loads((path / "MANIFEST.json").read_text()).get("link", {})
            if link == record.links.get(step_of(path.name), {}):
                return path
    return None


def _require_taken(record: Record, first: int, last: int) -> None:
    """Raise UserError (64) for steps that the run has not taken, or that nobody knows the settings of."""
    known = record.starts[0]["step"]
    if not known < first <= last <= record.last_step:
        before = f"; an older version trained the first {known} and kept too little of them" if known else ""
        raise UserError(f"{record.path} has taken {counted(record.last_step, 'step')}{before}; ask for steps from"
                        f" {known + 1} to {record.last_step}")
