"""Steps of a run, computed again by train.py's own functions, in a temporary directory: the run stays as it is.

    with computing(run, device, watchdog) as place:
        record = read_run(run, place.world)
        parts = parts_of(record, first, last, place.world)
        place.walk(record, parts, visit)        # visit(t, batch) computes a step

Settings and what was resolved are those of the start that computed these steps (RUN/starts.jsonl).
"""

import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor
from tqdm import tqdm

from ask.record import Part, Record, last_start
from data.batch import GlobalBatch
from engine.build import open_start, open_training
from engine.saving import save, wait_for_save
from engine.training import Training
from engine.warm_up import warm_up
from engine.wrong import void_steps
from utils.distributed.watchdog import Watchdog
from utils.distributed.world import World
from utils.errors import Exit, UserError, counted, leave
from utils.hardware.devices import Arriving
from utils.rundir.checkpoint import Checkpoints
from utils.rundir.identity import kept_settings
from utils.rundir.scratch import scratch_folder
from utils.rundir.starts import describe
from utils.settings.command_line import config_of
from utils.settings.config import Config, with_values
from utils.strategies import devices_per_process, load_strategy

COPIED = ("tokenizer", "encoder")  # folders of a run directory that a start reads
KINDS = {"processes": "processes", "devices_per_process": "devices of a process",
         "program": "the program", "python": "Python", "hardware": "hardware"}


class Console(io.StringIO):
    """Standard error, once the training is open: what a start says of itself is no answer."""

    is_open = False

    def write(self, text: str) -> int:
        """Pass the text on, or drop it."""
        return sys.stderr.write(text) if self.is_open else len(text)


class Instead:
    """An object with other methods; all else is its own."""

    def __init__(self, original: Any, **methods: Any):
        self._original = original
        vars(self).update(methods)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def config_for(line: Mapping[str, Any], device: str | None, data: str | None, folder: Path) -> Config:
    """The config of a start, in another run directory. device, data: None = as the start had them."""
    config = config_of(line["settings"])
    return with_values(config, {"run_dir": str(folder), "data": data or config.data.data,
                                "device": device or line["resolved"]["device"]})


@dataclass(frozen=True)
class Place:
    """Where steps are computed again: these processes, and a folder that goes at the end."""

    device: str
    world: World
    watchdog: Watchdog
    folder: Path

    @contextmanager
    def opened(self, part: Part, record: Record, kind: type[Checkpoints] = Checkpoints,
               name: str = "run") -> Iterator[Training]:
        """The training at the part's first step, in the folder `name`, before it is warmed up. Collective.

        Raises UserError (78) if the data are others.
        """
        folder, world = self.folder / name, self.world
        config = config_for(part.line, self.device, record.data, folder)
        world.on_rank_zero(lambda: lay_out(part, config, record.path, folder))  # Collective.
        with (redirect_stdout(Console()) as console,
              open_start(config, world, self.watchdog, lambda text: None) as start):  # Collective.
            if start.run.resolved.data != part.line["resolved"]["data"]:
                raise UserError(f"{config.data.data} does not hold the data of {record.path}, or this version of the"
                                " program reads them otherwise; restore them, or give --data PATH if they have moved",
                                Exit.OTHER_RUN)
            with open_training(start, kind=kind) as training:  # Collective.
                now, then = training.feed.plan.num_micro_batches, part.line["resolved"]["micro_batches"]
                if now != then:
                    raise UserError(f"{record.path} cut a step into {counted(then, 'micro-batch')}, and here it would"
                                    f" be {now}: use at most {then} processes, on devices with as much memory",
                                    Exit.OTHER_RUN)
                console.is_open = True
                yield training

    def walk(self, record: Record, parts: Sequence[Part], visit: Callable[[Training, GlobalBatch], None],
             name: str = "run") -> None:
        """Compute parts of a run in the folder `name`; visit(training, batch) computes a step. Collective."""
        for part in parts:
            with self.opened(part, record, name=name) as t:  # Collective.
                warm_up(t)  # Collective.
                t.watchdog.save_on_stop()  # a stop ends the loop
                is_hidden = not self.world.is_main or None  # None: unless standard error is a terminal
                for batch in tqdm(batches(t, part.last), name, part.last - part.first, leave=False, disable=is_hidden):
                    visit(t, batch)  # Collective.
                if t.flags.stop:
                    raise UserError(f"stopped at step {t.state.progress.step}", Exit.STOPPED)
                if part is not parts[-1]:  # the next one begins there
                    save(t)  # Collective.
                    wait_for_save(t)  # Collective.


@contextmanager
def computing(runs: Sequence[str], device: str | None, watchdog: Watchdog) -> Iterator[Place]:
    """The place where steps are computed again, by processes that join as the first run's last start did. Collective.

    device: None = that start's. Exits with 66 or 74 where a node sees no run, or cannot read how it was started. Raises
    UserError (73) for a temporary folder that not all nodes have.
    """
    try:
        line, *_ = [last_start(run) for run in runs]
    except UserError as error:  # there are no ranks yet: each node may see something else
        leave(f"ask: {error}", error.code)
    config = config_for(line, device, None, Path())
    devices = devices_per_process(config.device)
    with (World.from_env(config.device.device, config.faults, watchdog, devices) as world,
          scratch_folder(world) as folder):  # Collective.
        yield Place(config.device.device, world, watchdog, folder)


def batches(t: Training, last: int) -> Iterator[GlobalBatch]:
    """The global batches up to step `last`, or to an agreed stop. The caller trains on each. Collective.

    Raises UserError (65) on every rank if a sample cannot be read any more.
    """
    t.strategy.module.train()
    while t.state.progress.step < last and not t.flags.stop:
        for batch in t.feed.rest_of_epoch(t.state.progress):
            yield batch
            if t.state.progress.step >= last or t.flags.stop:
                break
    t.flags.exchange()  # Collective.
    t.flags.wait()  # Collective.
    void_steps(t)  # Collective; raises UserError (71). The last one may be void: it is what is asked for
    if t.flags.bad_sample:
        t.bad_samples.stop(t.world)  # Collective.
    t.watchdog.enter("answering", t.config.faults.section_timeout)


def figures_of(t: Training, losses: Tensor, grad_norm: Tensor) -> dict[str, float]:
    """What a train record says of the step that was just computed. losses, grad_norm: of train_step. Collective."""
    losses, grad_norm = Arriving(losses, grad_norm).wait()
    by_index = t.world.all_reduce_sum(losses).tolist()  # Collective. In the order of the micro-batches
    return {"loss": sum(by_index), "grad_norm": float(grad_norm), "lr": t.schedule(t.state.progress.step - 1)}


def conditions_of(line: Mapping[str, Any]) -> dict[str, Any]:
    """What the bits of a start depend on besides settings and data, by its name for people; each package by its own."""
    return {words: line[name] for name, words in KINDS.items() if name in line} | line.get("packages", {})


def differences(line: Mapping[str, Any], world: World) -> dict[str, str]:
    """The conditions that are not as in the start of `line`, by name, in words. Collective."""
    then, here = conditions_of(line), conditions_of(describe(world))  # Collective.
    if load_strategy(line["settings"]["strategy"]).is_invariant:
        del then["processes"]
    return {name: f"{name}: {in_words(then[name])} then, {in_words(here.get(name))} here"
            for name in then if then[name] != here.get(name)}


def steps_in_words(first: int, last: int) -> str:
    """"step 30", or "steps 25 to 35"."""
    return f"step {first}" if first == last else f"steps {first} to {last}"


def in_words(value: Any) -> str:
    """A value of starts.jsonl for people."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {in_words(each)}" for name, each in value.items() if each != {})
    return "; ".join(map(in_words, value)) if isinstance(value, list) else str(value)


def lay_out(part: Part, config: Config, run: Path, folder: Path) -> None:
    """What a start finds in its run directory. Files of the run are linked, never written."""
    folder.mkdir(exist_ok=True)
    resolved = {name: value for name, value in part.line["resolved"].items() if name not in ("data", "code", "weights")
                and (name != "branch" or part.first >= value["step"])}  # names of samples need no past
    (folder / "auto.json").write_text(json.dumps(resolved))
    (folder / "config.yaml").write_text(yaml.safe_dump(kept_settings(config)))
    if (folder / "metrics.jsonl").exists():  # of the part before
        return
    if part.checkpoint:  # else it begins without records
        shutil.copy(run / "metrics.jsonl", folder)
    for name in COPIED:
        if (run / name).exists():
            (folder / name).symlink_to((run / name).absolute())
    if part.checkpoint:
        place = folder / "checkpoints" / part.checkpoint.name
        place.mkdir(parents=True)
        try:
            for file in part.checkpoint.iterdir():
                try:
                    os.link(file, place / file.name)  # so that it stays, though the run may remove its own
                except OSError:  # on another disk, say
                    shutil.copy(file, place)
        except FileNotFoundError:
            raise UserError(f"{part.checkpoint} is gone: the run is training, and has just removed it; ask again",
                            Exit.NO_INPUT) from None
