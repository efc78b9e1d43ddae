"""A checkpoint of a step that the run has not kept: computed again, verified by what the run saved next, put into RUN.

Tests: tests/end_to_end/test_keep.py
"""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from ask.again import Again
from ask.record import Part, Record
from utils.rundir.chain import Link, digest_of, hashed, starts_hash
from utils.rundir.checkpoint import SAMPLES
from utils.rundir.checkpoint_folder import CheckpointFolder, name_of, step_of
from utils.rundir.digests import summary
from utils.rundir.lock import RunLock


def cut_at(parts: Sequence[Part], step: int | None) -> list[Part]:
    """These parts, so that one of them ends with `step`, if there is one."""
    cut: list[Part] = []
    for part in parts:
        inside = step is not None and part.first < step < part.last
        cut += [replace(part, last=step), replace(part, first=step, checkpoint=None)] if inside else [part]
    return cut


def keep(again: Again, step: int) -> Path:
    """Put the checkpoint of `step`, which was computed and verified, into the run's; returns where. On rank 0.

    It has the step's link, or is a copy as before an evaluation, which has its link in its manifest alone. Raises
    UserError: 78 if the run is training, 74 for a full disk.
    """
    record, folder = again.record, CheckpointFolder(again.place.folder / "run" / "checkpoints", 1, print)
    made = folder.path / next(name for name in folder.names() if step_of(name) == step)
    part = next(part for part in again.parts if part.last == step)
    link = record.links.get(step) or _link_of(record, made, part.line["start"])
    name, lock = name_of(step, link["start"], link["awaits_evaluation"]), RunLock()
    lock.acquire(record.path)
    try:
        target = record.path / "checkpoints" / name
        if not target.exists():
            files = {file.name: partial(shutil.copy, file) for file in made.iterdir() if file.name != "MANIFEST.json"}
            place = CheckpointFolder(record.path / ".kept", 1, print)
            shutil.rmtree(place.path, ignore_errors=True)  # of a command that was killed
            place.write(name, files, None, link)
            os.rename(place.path / name, target)
            place.path.rmdir()
    finally:
        lock.close()
    return target


def _link_of(record: Record, made: Path, start: int) -> Link:
    """The link of a copy of a step that the chain does not have. made: its checkpoint, as it was computed again."""
    manifest, trainer = (json.loads((made / f"{name}.json").read_text()) for name in ("MANIFEST", "trainer"))
    step = trainer["progress"]["step"]
    before = next(link["link"] for link in reversed(record.links.values()) if link["step"] < step)
    records = record.path / "metrics.jsonl"
    digest, size = hashed(records, _bytes_up_to(records, trainer["progress"]))
    facts: dict[str, Any] = {
        "step": step, "start": start, "awaits_evaluation": True, "content": manifest["link"]["content"],
        "samples": summary(load_file(made / SAMPLES)) if (made / SAMPLES).exists() else {},
        "metrics": {"bytes": size, "sha256": digest.hexdigest()}, "starts": starts_hash(record.path, start),
        "previous": before}
    return facts | {"link": digest_of(facts)}


def _bytes_up_to(file: Path, progress: Mapping[str, Any]) -> int:
    """How many bytes the records up to this position have."""
    size = 0
    with file.open("rb") as opened:
        for line in opened:
            record = json.loads(line)
            if record["step"] > progress["evaluated_step" if record["split"] == "val" else "step"]:
                return size
            size += len(line)
    return size
