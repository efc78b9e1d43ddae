"""Whether the files of a run directory belong together: each against RUN/chain.jsonl. Nothing is computed again.

    for text in findings(run): ...    # "RUN/model: config.json is not what the run saved at step 40"

It names what was changed afterwards. Somebody who changes files and computes all hashes anew is found by training again
alone: ask/verify.py.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file

from utils.errors import Exit, UserError, first_line, some
from utils.rundir.chain import FILE, content_hash, digest_of, files_in, read_lines, starts_hash
from utils.rundir.checkpoint_folder import CheckpointFolder, find_damage, name_of
from utils.rundir.lock import is_locked
from utils.rundir.starts import read_starts

Link = dict[str, Any]


def findings(run: Path) -> list[str]:
    """What is not as the run wrote it, in lines that begin with the file's name. Raises UserError (66, 74, 78).

    run: what ask.record.require_begun takes for one. If it is still training, it may be replacing RUN/model, which is
    left out then.
    """
    folder = CheckpointFolder(run / "checkpoints", 1, print)
    of_checkpoints, names = folder.links(), folder.names()  # before the chain: a link is appended after its checkpoint
    lines, links = read_lines(run), {}
    if not lines and not names and not (run / "metrics.jsonl").exists():
        raise UserError(f"{run} has only begun: there is nothing to verify yet", Exit.NO_INPUT)
    checks: dict[str, Callable[[], Iterable[str]]] = {
        FILE: partial(_of_chain, lines, of_checkpoints, links),  # first: it fills `links`
        "metrics.jsonl": partial(_of_records, run / "metrics.jsonl", links),
        "starts.jsonl": partial(_of_starts, run, links),
        "config.yaml": lambda: _of_settings(yaml.safe_load((run / "config.yaml").read_text()), run, 0, "settings"),
        "auto.json": lambda: _of_settings(json.loads((run / "auto.json").read_text()), run, -1, "resolved"),
        **{f"checkpoints/{name}": partial(_of_checkpoint, folder.path / name, lines, links) for name in names}}
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


def _of_chain(lines: list[Link], of_checkpoints: list[Link], links: dict[int, Link]) -> Iterator[str]:
    """links: gets those that count, by step."""
    for line in lines:
        if "resumed" in line:
            for step in [step for step in links if step > line["resumed"]]:
                del links[step]
        else:
            if fault := _fault_of(line, links):
                yield f"the line of step {line['step']} {fault}"
            links.pop(line["step"], None)  # the newest one is the last one
            links[line["step"]] = line
    for link in sorted(of_checkpoints, key=lambda link: link["step"]):  # a kill kept the last line from the file
        if link not in lines and not _fault_of(link, links):
            links[link["step"]] = link
    if not links:
        yield "it is missing, or has no link"


def _fault_of(link: Link, links: Mapping[int, Link]) -> str:
    """What is wrong with a link that comes after `links`; "" if nothing."""
    if digest_of(link) != link["link"]:
        return "was edited"
    newest = [*links.values()][-2:]
    earlier = [each["link"] for each in newest if each["step"] < link["step"]]
    if link["previous"] != (earlier or [""])[-1] or any(each["step"] > link["step"] for each in newest):
        return "does not follow the line before it: one was removed, added or edited there"
    return ""


def _of_records(path: Path, links: Mapping[int, Link]) -> Iterator[str]:
    content, digest, done, before = path.read_bytes() if path.exists() else b"", hashlib.sha256(), 0, 0
    for step, link in links.items():
        digest.update(content[done:link["metrics"]["bytes"]])
        if digest.hexdigest() != link["metrics"]["sha256"]:
            yield f"a record was edited, added or removed between step {before} and step {step}"
            return
        done, before = link["metrics"]["bytes"], step


def _of_starts(run: Path, links: Mapping[int, Link]) -> Iterator[str]:
    if wrong := [start for start, digest in sorted({(link["start"], link["starts"]) for link in links.values()})
                 if starts_hash(run, start) != digest]:
        yield f"a line was edited, added or removed, up to that of start {wrong[0]}"


def _of_settings(here: Mapping[str, Any], run: Path, start: int, part: str) -> Iterator[str]:
    then = read_starts(run)[start][part]
    if differ := [name for name in sorted({*here, *then}) if here.get(name) != then.get(name)]:
        yield f"{some(differ)}: not as in starts.jsonl"


def _of_checkpoint(folder: Path, lines: list[Link], links: Mapping[int, Link]) -> Iterator[str]:
    if damage := find_damage(folder):
        yield f"damaged: {damage}"
        return
    link = json.loads((folder / "MANIFEST.json").read_text()).get("link")
    if not link or link not in [*lines, links.get(link["step"])] or link["step"] not in links:
        yield f"not a checkpoint of this run: its link is not in {FILE}"
    elif folder.name != name_of(link["step"], link["start"], link["awaits_evaluation"]):
        yield f"the checkpoint of step {link['step']} under another name"
    state = torch.load(folder / "state.pt", map_location="cpu", weights_only=True)
    trainer = json.loads((folder / "trainer.json").read_text())
    if link and content_hash(load_file(folder / "model.safetensors"), state, trainer) != link["content"]:
        yield "its weights, state or position were edited, and its manifest was made anew"


def _of_model(run: Path, lines: list[Link], links: Mapping[int, Link]) -> Iterator[str]:
    link = next((link for link in reversed(links.values()) if "model" in link), {"step": 0, "model": {}})
    here, then = files_in(run / "model"), link["model"]
    differ = [name for name in sorted({*here, *then}) if here.get(name) != then.get(name)]
    abandoned = next((line["step"] for line in reversed(lines) if line.get("model") == here), None)
    if differ and abandoned:
        yield (f"it is what the run saved at step {abandoned}, but the run has gone back from there, and has found no"
               " better model since")
    elif differ:
        is_unfinished = json.loads((run / "status.json").read_text())["state"] in ("running", "failed")
        way_out = " (if the run was killed while it saved: continue it, then verify it)" * is_unfinished
        yield f"{some(differ)}: not what the run saved at step {link['step']}{way_out}"
