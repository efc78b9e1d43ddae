"""`train.py ... --check`: look at the data and the machine before a training, say it on one screen, and end.

    python train.py --data DIR --model resnet50 --check [--output FILE.json]

What looks is a start of the training itself, in a temporary folder: what a training would refuse is refused here, in
the same words. No run directory is made, and none is changed.
"""

import io
import json
import resource
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np

from data.labels import counts_of, label_at
from data.loader import BadSamples, num_workers
from engine.build import open_start, open_training
from engine.records.log import records
from engine.records.waiting import WAIT, waiting
from engine.training import Training
from engine.warm_up import warm_up
from extras import build
from extras.check.survey import Survey
from extras.check.surveys import survey_of
from models.tasks.base import Task
from utils.distributed.watchdog import Watchdog
from utils.distributed.world import World
from utils.errors import Exit, UserError, counted, say, some
from utils.output_files import open_output, require_output
from utils.rundir.identity import run_path
from utils.rundir.scratch import scratch_folder
from utils.settings.config import Config, with_values

SHOWN = 3  # samples of a finding, on the screen
MEASURED_S = 5  # of training steps, and then the one that is under way
FORWARD = 1 / 3  # of a training step: an evaluation has no backward
# so that a rank loads and computes in turn, every step has a record, and nothing is packed, evaluated or saved
ALONE = {"workers": 0, "log_every": 1, "cache": "none", "eval_every": sys.maxsize, "profile": 0, "fresh": False,
         "output": None, "stop_after": None}
LOOK = "look at them, and remove one if it is the same picture"
BY_HASH = ("candidates of near-duplicates, mirrored ones too, by a perceptual hash; turned and cropped ones are not"
           " found")
FINDINGS = {  # by the names of Survey.pairs: what is true of the samples, and what to do
    "unreadable": ("unreadable or truncated", "repair or restore the files; --bad-samples skip leaves them out"),
    "conflict": ("the same as another one, with another label", "correct one of the labels, or remove both"),
    "leak": ("in val, and in train, too", "remove them from one of the two, as training has seen what val measures"),
    "copy": ("the same as another one of the split", "remove the copies, unless they are meant to count twice"),
    "left out": ("similar to one that --without leaves out", "look at them, and add to its file those that are the"
                 " same"),
    "near leak": (f"in val, similar to one of train ({BY_HASH})", LOOK),
    "near copy": (f"similar to another one of the split ({BY_HASH})", LOOK),
    "framing": ("similar to another one, so many that a perceptual hash does not tell these images apart (all have one"
                " framing, as radiographs and digits have)", "near-duplicates among them are not found"),
    "one colour": ("of one colour", "remove what is not meant to be empty"),
    "extreme": ("much longer than wide, or much smaller or larger than the median", "remove them, or crop them"),
    "one character": ("of one character alone", "remove what means nothing")}


def run(config: Config, world: World, watchdog: Watchdog, train_epoch: Callable[[Training], None]) -> Exit:
    """Look, print, and write --output. train_epoch: the loop. Collective.

    Raises UserError on every rank for what a training would refuse, and for settings that do not go together (64).
    """
    # what is asked for
    output, run, console = config.run.output, run_path(config).absolute(), sys.stdout
    if config.run.eval_only:
        raise UserError("--check and --eval-only: give one of them")
    if output and not output.endswith(".json"):
        raise UserError(f"--output {output}: --check writes JSON; name a file that ends in .json")
    world.on_rank_zero(lambda: output and require_output(output))  # Collective.
    show = partial(say, stream=console) if world.is_main else lambda text: None

    # the data
    parent = next(path for path in run.parents if path.exists())
    with scratch_folder(world, parent) as folder, redirect_stdout(io.StringIO()) as said:  # Collective.
        alone = with_values(config, {**ALONE, "run_dir": str(folder / "run")})
        with open_start(alone, world, watchdog, print if world.is_main else lambda text: None) as start:  # Collective.
            survey = survey_of(start.task, world)  # Collective.
            found = world.on_rank_zero(lambda: _data(start.task, survey), takes_long=True)  # Collective.
            show("\n".join(_data_words(found)))
            if "unreadable" in found["findings"] and config.data.bad_samples == "stop":
                world.on_rank_zero(lambda: _write(found, output))  # Collective.
                bad_samples = BadSamples("stop", None)
                bad_samples.stopped_by += found["findings"]["unreadable"]["samples"] if world.is_main else ()
                bad_samples.stop(world)  # Collective; raises UserError (65) on every rank.

            # the machine
            with open_training(start, build()) as t:  # Collective.
                warm_up(t)  # Collective.
                t.extras.opened(t)  # Collective.
                found["notes"] = said.getvalue().replace(str(folder / "run"), str(run_path(config))).splitlines()
                show("\n- ".join(["notes that a training would print:", *found["notes"]]))
                found["machine"] = _machine(t, config, train_epoch)  # Collective.
                show("\n".join(_machine_words(found["machine"], t)))
                world.on_rank_zero(lambda: _write(found, output))  # Collective: until then all ranks need the folder
    return Exit.DONE


def _data(task: Task, survey: Survey) -> dict[str, Any]:
    """What is found in the data, for --output."""
    def shown(index: int) -> str:
        if index in survey.unreadable or task.objective is None:
            return survey.unreadable.get(index) or survey.name(index)
        label = task.objective.encode([label_at(survey.labels, index)])[0]
        return f"{survey.name(index)} ({task.objective.label_words(label)})"

    findings, parts = {}, {"train": slice(survey.num_train), "val": slice(survey.num_train, None)}
    for kind, pairs in (*survey.of_the_others().pairs(), ("left out", survey.beside_left_out())):
        num_exact = int((survey.exact[pairs[:, 0]] == survey.exact[pairs[:, 1]])[pairs[:, 0] > pairs[:, 1]].sum())
        words = [" ~ ".join(map(shown, dict.fromkeys(pair))) for pair in pairs.tolist()]
        where = [[*map(survey.where, dict.fromkeys(pair))] for pair in pairs.tolist()]
        findings |= {kind: {"samples": words, "where": where, "exact": num_exact}} if words else {}
    return {"samples": {name: len(survey.labels[part]) for name, part in parts.items()},
            "classes": {name: counts_of(task.classes, survey.labels[part]) for name, part in parts.items()},
            "seen": len(survey.seen) + len(survey.unreadable), "findings": findings}


def _data_words(found: dict[str, Any]) -> Iterator[str]:
    """The same in lines."""
    for split, counts in found["classes"].items():
        rarest = some(f"{name} {count}" for name, count in sorted(counts.items(), key=lambda item: item[1]))
        yield f"{split}: {counted(found['samples'][split], 'sample')}" + f"; the rarest first: {rarest}" * bool(counts)
    if found["seen"] < sum(found["samples"].values()):
        share = (found["seen"] / sum(found["samples"].values())) ** 2
        yield (f"equal files were looked for among all; all else is said of {found['seen']} samples, chosen at random:"
               f" of two that look alike, both are among them in {share:.2g} of all cases")
    yield "what stands out:" if found["findings"] else "no problem found in the data"
    for kind, each in found["findings"].items():
        what, to_do = FINDINGS[kind]
        exact = f", {each['exact']} of them byte for byte" if each["exact"] else ""
        yield f"- {what}: {counted(len(each['samples']), 'sample')}{exact}; {to_do}"
        yield from (f"    {name if name.isprintable() else ascii(name)}"
                    for name in each["samples"][:0 if kind == "framing" else SHOWN])


def _machine(t: Training, config: Config, train_epoch: Callable[[Training], None]) -> dict[str, float]:
    """Train for a moment, and return what the records and rank 0's memory say of it. Collective.

    config: that of the run, with its --workers and --eval-every. Per second: samples, of all ranks. memory, disk, free:
    MiB. A signal ends the process at once, because nothing is to be saved.
    """
    t.watchdog.stop_after(MEASURED_S, from_now=True)
    train_epoch(t)  # Collective.
    t.flags.wait()  # Collective.
    taken = t.world.on_rank_zero(lambda: records(t.run.path, "train"))  # Collective.

    # a rank loaded and computed in turn; with data loading processes it will do both at once
    per_s, wait, share_of_sum = speeds(taken)
    plan, workers = t.feed.plan, num_workers(config.data.workers, t.world)
    busy = max(1 - wait, 1e-6)
    loaded_per_s, computed_per_s = per_s / max(wait, 1e-6) * max(1, workers), per_s / busy
    per_s = min(loaded_per_s, computed_per_s) if workers else per_s
    step_s = min(plan.global_batch_size, plan.num_samples) / computed_per_s
    every = plan.steps_per_epoch if config.record.eval_every == "epoch" else config.record.eval_every
    num_computed = t.total_steps * plan.num_samples / plan.steps_per_epoch + (
        t.total_steps / every * FORWARD * len(t.task.eval_set))
    own_memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    return {"loaded_per_s": loaded_per_s, "computed_per_s": computed_per_s, "wait": 1 - per_s / computed_per_s,
            "workers": workers, "step_s": step_s, "sum_s": share_of_sum * step_s / busy,
            "memory": taken[-1].get("memory", own_memory), "disk": t.checkpoints.most_bytes / 2**20,
            "free": shutil.disk_usage(t.run.path).free / 2**20, "run_s": num_computed / per_s}


def speeds(taken: Sequence[Mapping[str, float]]) -> list[float]:
    """Samples per second, and the shares of waiting for data and for other ranks. taken: records of all steps so far.

    They are averaged over time: a mean of the rates would count a slow step as little as a fast one.
    """
    num_samples = np.diff([record["samples"] for record in taken], prepend=0)
    step_s = num_samples / [record["samples_per_s"] for record in taken]
    return [float(np.average([record.get(name, 0.0) for record in taken], weights=step_s))
            for name in ("samples_per_s", "data_wait", "communication")]


def _machine_words(found: dict[str, float], t: Training) -> Iterator[str]:
    """The same in lines."""
    memory, disk, free = (f"{found[name] / 1024:.3g} GiB" for name in ("memory", "disk", "free"))
    unit = t.task.unit
    computed = f"training {found['computed_per_s']:,.1f} {unit}/s" + ("" if found["workers"] else ", in turn")
    hold_up = waiting(found["wait"], found["workers"], t.world.cores) if found["wait"] > WAIT else (
        "loading is fast enough")
    yield "this machine:"
    yield f"- loading {found['loaded_per_s']:,.1f} {unit}/s, {computed}: {hold_up}"
    yield f"- a step takes {found['step_s']:.3g} s, {found['sum_s']:.3g} s of it for summing gradients over processes"
    yield f"- peak memory: {memory} (a micro-batch of {counted(t.feed.plan.sizes[1], 'sample')})"
    yield f"- disk: up to {disk} ({free} free)"
    yield f"- time: about {timedelta(seconds=round(found['run_s']))}, with evaluations"


def _write(found: dict[str, Any], output: str | None) -> None:
    if output:
        with open_output(output) as file:
            json.dump(found, file, indent=1)
