"""What a branch begins with: the past of another run, up to a checkpoint, and what was resolved then.

The branch is whole in itself: records, links, starts and RUN/model up to that step are copied, the checkpoint is linked
(or copied, on another disk). auto.json comes last: without it nothing has begun, and the next start lays out again.

Tests: extras/branch/tests/test_launches.py
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from extras.branch import OPTIONS
from extras.branch.parent import Parent, checkpoints_of, find_parent, name_of_run, parts_of
from utils.errors import Exit, UserError, some
from utils.files import json_lines, lines_of, write_atomically
from utils.rundir.chain import files_in, read_lines, valid_links
from utils.rundir.checkpoint_folder import find_damage
from utils.rundir.identity import compare, kept_settings
from utils.rundir.resolved import Resolved
from utils.rundir.run import describe_run
from utils.settings.config import Config, facts, flag
from utils.settings.option import OPERATIONAL, Kept

LAYING = ".branch"  # the folder in which a branch is laid out; it is there until auto.json is
COPIED = ("tokenizer", "encoder", "bad_samples.txt", "metrics.jsonl")  # records behind the step are cut off by the log
OF_BEST = ("model", "eval")
WRITTEN = (*COPIED, *OF_BEST, "checkpoints", "chain.jsonl", "starts.jsonl", "config.yaml", "env.txt")
ANEW = {  # what is resolved again where a setting differs, besides what has its name
    "micro_batch_size": ["micro_batches"], "global_batch_size": ["micro_batches"],
    "lr": ["head_lr_factor"], "freeze": ["head_lr_factor"], "without": ["left_out"]}


def begin(config: Config, path: Path, note: Callable[[str], None]) -> None:
    """Lay out the run directory `path` of a branch, on rank 0, which holds its lock. RUN stays as it is.

    Raises UserError: 64 for a setting that a branch keeps, 66 where RUN or its checkpoint is missing.
    """
    # a start that was killed while it laid out
    laying = path / LAYING
    if laying.exists():
        for name in (*WRITTEN, LAYING):
            _remove(path / name)
    compare(config, path, note)

    # what differs
    spec = config.extra(OPTIONS).branch
    parent = find_parent(spec)
    if damage := find_damage(parent.checkpoint):
        raise UserError(f"--branch {spec}: {parent.checkpoint} is damaged ({damage}); begin from another step",
                        Exit.NO_INPUT)
    changed = differences(config, parent)
    require_allowed(config, spec, parent, changed)

    # all of it, and auto.json last
    laying.mkdir()
    has_best = _lay_out(parent, laying)
    resolved = {name: value for name, value in parent.resolved.items()
                if name not in {*changed, "device", *(each for key in changed for each in ANEW.get(key, ()))}}
    progress = parent.trainer["progress"]
    if "global_batch_size" in changed:
        resolved["origin"] = [progress["step"], progress["epoch"]]
    resolved["branch"] = {"run": name_of_run(parent.path), "at": parts_of(spec)[1], "step": parent.step,
                          "link": parent.link.get("link", ""), "changed": changed, "begins_best": not has_best}
    describe_run(config, path)
    for piece in sorted(laying.iterdir()):
        _remove(path / piece.name)
        os.rename(piece, path / piece.name)
    write_atomically(path / "auto.json", json.dumps(resolved, indent=1))
    laying.rmdir()
    note(f"{path}: {Resolved.of(resolved).branched()}")


def differences(config: Config, parent: Parent) -> dict[str, list[Any]]:
    """The settings of the branch that are not RUN's, {name: [RUN's, the branch's]}.

    But where the data are: it must be the same data, which the run compares.
    """
    usual, then, now, known = kept_settings(type(config)()), parent.settings, kept_settings(config), facts(config)
    names = (name for name in sorted({*then, *now} & known.keys() - {"data"}) if known[name].kind != OPERATIONAL)
    both = {name: [values.get(name, usual.get(name)) for values in (then, now)] for name in names}
    return {name: values for name, values in both.items() if values[0] != values[1]}


def require_allowed(config: Config, spec: str, parent: Parent, changed: dict[str, list[Any]]) -> None:
    """Raise UserError (64) for what a branch keeps, or changes at the end of an epoch alone."""
    known, done = facts(config), {"epochs": parent.trainer["progress"]["epoch"], "max_steps": parent.step}
    for name, number in done.items():
        if isinstance(most := getattr(config.run, name), int) and most <= number:
            raise UserError(f"--branch {spec}: {flag(name)} {most} leaves nothing to train after step {parent.step};"
                            f" give at least {flag(name)} {number + 1}")
    if changed.get("without", [None, None])[1] and (learnt := learnt_before(parent)):
        raise UserError(f"--branch {spec}: RUN has learnt {some(learnt)} from its samples before step 1, those that"
                        " --without names included; start a new run")
    for name, (old, new) in changed.items():
        reason = known[name].in_branch
        if reason == Kept.AMID_EPOCH and not parent.is_end_of_epoch:
            steps = sorted({each.step for each in checkpoints_of(parent.path) if each.is_end_of_epoch},
                           key=lambda step: (abs(step - parent.step), step))
            where = f"RUN@{some(map(str, steps))}" if steps else "there is no such checkpoint"
            raise UserError(f"--branch {spec}: {flag(name)} {new} needs the end of an epoch, because {reason}: {where}")
        if reason and reason != Kept.AMID_EPOCH:
            raise UserError(f"--branch {spec}: {flag(name)} was {old} and cannot become {new}, because {reason}; leave"
                            " it out, or start a new run")


def learnt_before(parent: Parent) -> list[str]:
    """What RUN, or a run that it branched from, has learnt from its samples before step 1; sizes: see extra.py."""
    starts = [(line["settings"], line["resolved"]) for line in json_lines(parent.path / "starts.jsonl")]
    found = {}
    for given, resolved in starts or [(parent.settings, parent.resolved)]:
        found |= {
            "a head": resolved.get("head_init") == "features",
            "class weights": given.get("class_weights") == "balanced",
            "the mean and the deviation of the targets": given["task"].endswith("-regression"),
            "a tokenizer": given.get("tokenizer") == "auto" and "encoder" not in resolved} | {
            words: True for words, is_so in found.items() if is_so}
    return [words for words, is_so in found.items() if is_so]


def _lay_out(parent: Parent, folder: Path) -> bool:
    """Copy the past of the parent; returns whether the checkpoint of its best model then is there, if it had one."""
    # what counts of its past
    run, link, best_step = parent.path, parent.link, parent.trainer["best"].get("step")
    links = [each for each in valid_links(read_lines(run)) if each["step"] < parent.step or each == link]
    if link and links and links[-1] != link and links[-1]["link"] != link["previous"]:
        raise UserError(f"{parent.checkpoint} belongs to steps that {run} has trained again since", Exit.NO_INPUT)
    starts = [line for line in lines_of(run / "starts.jsonl") if json.loads(line)["start"] <= link.get("start", 0)]
    of_best = [each.checkpoint for each in checkpoints_of(run) if each.step == best_step and each.step <= parent.step]
    model = next((each["model"] for each in reversed(links) if "model" in each), {})

    # its files
    try:
        for checkpoint in {parent.checkpoint, *of_best}:
            _link(checkpoint, folder / "checkpoints" / checkpoint.name)
        for name in filter(lambda name: (run / name).exists(), (*COPIED, *(OF_BEST if of_best else ()))):
            (shutil.copytree if (run / name).is_dir() else shutil.copy)(run / name, folder / name)
    except FileNotFoundError as error:
        raise UserError(f"{error.filename} is gone: {run} is training, and has just removed it; give the command again",
                        Exit.NO_INPUT) from None
    for name in OF_BEST if files_in(folder / "model") != model else ():  # of a later best model
        _remove(folder / name)
    write_atomically(folder / "starts.jsonl", b"".join(line + b"\n" for line in starts))
    write_atomically(folder / "chain.jsonl", "".join(f"{json.dumps(each)}\n" for each in links))
    had_best = best_step is not None
    return len(of_best) > 0 or not had_best


def _link(source: Path, target: Path) -> None:
    target.mkdir(parents=True)
    for file in source.iterdir():
        try:
            os.link(file, target / file.name)
        except OSError:  # on another disk, say
            shutil.copy(file, target)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
