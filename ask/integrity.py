"""Whether the files of a run directory belong together: each against RUN/chain.jsonl. Nothing is computed again.

    for text in findings(run): ...    # "RUN/model: config.json is not what the run saved at step 40"
    not_covered(run)                  # what lies behind the last link of a run that was killed, in words

It names what was changed afterwards. Somebody who changes files and computes all hashes anew is found by training again
alone: ask/verify.py.

Tests: tests/end_to_end/test_attacks.py
"""

import hashlib
import io
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file

from ask.repeat import COPIED
from utils.errors import Exit, UserError, counted, first_line, some
from utils.files import folder_digest, read_json
from utils.rundir.chain import FILE, Link, content_hash, digest_of, files_in, read_lines, starts_hash, valid_links
from utils.rundir.checkpoint import SAMPLES
from utils.rundir.checkpoint_folder import CheckpointFolder, find_damage, name_of
from utils.rundir.digests import summary
from utils.rundir.lock import is_locked
from utils.rundir.starts import read_starts


def findings(run: Path) -> list[str]:
    """What is not as the run wrote it, in lines that begin with the file's name. Raises UserError (66, 74, 78).

    run: what ask.record.require_begun takes for one. If it is still training, it may be replacing RUN/model, which is
    left out then.
    """
    folder = CheckpointFolder(run / "checkpoints", 1, print)
    names, pending = folder.names(), _pending(run)  # before the chain: a link is appended after its checkpoint
    lines = read_lines(run)
    if not lines and not names and not (run / "metrics.jsonl").exists():
        raise UserError(f"{run} has only begun: there is nothing to verify yet", Exit.NO_INPUT)
    links = {link["step"]: link for link in valid_links(lines, pending)}
    unwritten = [pending] if lines and pending not in lines and pending in links.values() else []
    checks: dict[str, Callable[[], Iterable[str]]] = {
        FILE: partial(_of_chain, [*lines, *unwritten]),
        "metrics.jsonl": partial(_of_records, run, links),
        "starts.jsonl": partial(_of_starts, run, links),
        "config.yaml": lambda: _of_settings(
            yaml.safe_load((run / "config.yaml").read_text()), run, _first_of(run), "settings"),
        "auto.json": lambda: _of_settings(json.loads((run / "auto.json").read_text()), run, -1, "resolved"),
        **{name: partial(_of_folder, run, name) for name in COPIED},
        **{f"checkpoints/{name}": partial(_of_checkpoint, folder.path / name, links) for name in names}}
    if not is_locked(run):
        checks["model"] = partial(_of_model, run, lines, links)

    found = []
    for name, check in checks.items():
        try:
            words = [*check()]
        except UserError:
            raise
        except Exception as error:  # whatever somebody put there
            words = [f"cannot be read ({type(error).__name__}: {first_line(error)})"]
        if (run / name).exists() or not name.startswith("checkpoints/"):  # a run that is training removes old ones
            found += [f"{run / name}: {text}" for text in words]
        if found and name == FILE:  # the others are compared with it
            break
    return found


def not_covered(run: Path) -> str:
    """What no link covers of a run that was killed, or failed, before it saved again, in words; "" if nothing."""
    links = valid_links(read_lines(run), _pending(run))
    if not links or is_locked(run):
        return ""
    found, number = [], 0
    with suppress(FileNotFoundError), (run / "metrics.jsonl").open("rb") as file:
        file.seek(links[-1]["metrics"]["bytes"])
        number = sum(1 for _ in file)
    if number:
        found.append(f"{counted(number, 'record')} behind step {links[-1]['step']}, the last that was saved")
    if not has_saved_all(run, links[-1]) and files_in(run / "model") != model_of(links)["model"]:
        found.append("RUN/model, which was written for a save that did not come to its end")
    return " and ".join(found)


def has_saved_all(run: Path, last: Link) -> bool:
    """Whether the start that the last link is of has ended in order: then nothing of it is in no link."""
    status = read_json(run / "status.json")
    return status.get("state") in ("finished", "stopped") and status.get("start") == last["start"]


def model_of(links: Iterable[Link]) -> Link:
    """The link that RUN/model is of; before the first evaluation there is no model."""
    return next((link for link in reversed([*links]) if "model" in link), {"step": 0, "model": {}})


def _pending(run: Path) -> Link | None:
    return next(iter(CheckpointFolder(run / "checkpoints", 1, print).links()), None)


def _of_chain(lines: Iterable[Link]) -> Iterator[str]:
    """Walks through the file as the run wrote it: each line must follow what counts of those before it."""
    links: dict[int, Link] = {}
    for line in lines:
        if "resumed" in line:
            while links and next(reversed(links)) > line["resumed"]:
                links.popitem()
            continue
        newest = [*islice(reversed(links.values()), 2)]
        earlier = [link["link"] for link in newest if link["step"] < line["step"]]
        if digest_of(line) != line["link"]:
            yield f"the line of step {line['step']} was edited"
        elif line["previous"] != (earlier or [""])[0] or any(link["step"] > line["step"] for link in newest):
            yield (f"the line of step {line['step']} does not follow the line before it: one was removed, added or"
                   " edited there")
        links.pop(line["step"], None)  # a step that a later start evaluated has two
        links[line["step"]] = line
    if not links:
        yield "it is missing, or has no link"


def _of_records(run: Path, links: Mapping[int, Link]) -> Iterator[str]:
    digest, done, before = hashlib.sha256(), 0, 0
    with (run / "metrics.jsonl").open("rb") if (run / "metrics.jsonl").exists() else io.BytesIO() as file:
        for step, link in links.items():
            while chunk := file.read(min(2**20, max(0, link["metrics"]["bytes"] - done))):
                digest.update(chunk)
                done += len(chunk)
            if {"bytes": done, "sha256": digest.hexdigest()} != link["metrics"]:
                yield f"a record was edited, added or removed between step {before} and step {step}"
                return
            before = step
    if links and has_saved_all(run, [*links.values()][-1]) and (behind := not_covered(run)):
        yield f"it has {behind}"


def _of_starts(run: Path, links: Mapping[int, Link]) -> Iterator[str]:
    begun = {start["start"]: start["step"] for start in read_starts(run)}
    numbers, of_links = [start["start"] for start in read_starts(run)], [link["start"] for link in links.values()]
    if numbers != sorted(set(numbers)):
        yield "a line is there twice, or is not in its place"
    elif wrong := [start for start, digest in sorted({(link["start"], link["starts"]) for link in links.values()})
                   if starts_hash(run, start) != digest]:
        yield f"a line was edited, added or removed, up to that of start {wrong[0]}"
    elif of_links != sorted(of_links) or any(begun.get(link["start"], math.inf) > step for step, link in links.items()):
        yield f"by {FILE} a start computed steps that it did not come to"


def _first_of(run: Path) -> int:
    """The place of the run's own first start in starts.jsonl: those of a branch's past come before it."""
    branches = [start["resolved"].get("branch") for start in read_starts(run)]
    return branches.index(branches[-1])


def _of_settings(here: Mapping[str, Any], run: Path, start: int, part: str) -> Iterator[str]:
    then = read_starts(run)[start][part]
    if differ := [name for name in sorted({*here, *then}) if here.get(name) != then.get(name)]:
        yield f"{some(differ)}: not as in starts.jsonl"


def _of_folder(run: Path, name: str) -> Iterator[str]:
    then = read_starts(run)[-1]["resolved"].get(name)  # a run of images has none
    if then is not None and folder_digest(run / name) != then:
        yield "not what the run was created with"


def _of_checkpoint(folder: Path, links: Mapping[int, Link]) -> Iterator[str]:
    if damage := find_damage(folder):
        yield f"damaged: {damage}"
        return
    link = json.loads((folder / "MANIFEST.json").read_text()).get("link")
    before = next((each["link"] for each in reversed(links.values()) if link and each["step"] < link["step"]), "")
    if not link or not (link == links.get(link["step"]) or (
            link["awaits_evaluation"] and link["previous"] == before and digest_of(link) == link["link"])):
        yield f"not a checkpoint of this run: its link is not in {FILE}"
    elif folder.name != name_of(link["step"], link["start"], link["awaits_evaluation"]):
        yield f"the checkpoint of step {link['step']} under another name"
    state = torch.load(folder / "state.pt", map_location="cpu", weights_only=True)
    trainer = json.loads((folder / "trainer.json").read_text())
    samples = summary(load_file(folder / SAMPLES)) if (folder / SAMPLES).exists() else {}
    if link and samples != link.get("samples", {}):
        yield "what its samples were was edited, and its manifest was made anew"
    if link and content_hash(load_file(folder / "model.safetensors"), state, trainer) != link["content"]:
        yield "its weights, state or position were edited, and its manifest was made anew"


def _of_model(run: Path, lines: list[Link], links: Mapping[int, Link]) -> Iterator[str]:
    link = model_of(links.values())
    here, then = files_in(run / "model"), link["model"]
    differ = [name for name in sorted({*here, *then}) if here.get(name) != then.get(name)]
    abandoned = next((line["step"] for line in reversed(lines) if line.get("model") == here), None)
    if differ and abandoned:
        yield (f"it is what the run saved at step {abandoned}, but the run has gone back from there, and has found no"
               " better model since")
    elif differ and links and has_saved_all(run, [*links.values()][-1]):  # else see not_covered
        yield f"{some(differ)}: not what the run saved at step {link['step']}"
