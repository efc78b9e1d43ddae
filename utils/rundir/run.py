"""An open run directory: its records, its status. The same command continues the same run.

    with open_run(config, world, note) as run: ...

The files here are a contract: docs/run-directory.md.
"""

import json
import os
import platform
import re
import shlex
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from importlib import import_module, metadata
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

import utils
from utils.distributed.preflight import words_about_tasks
from utils.distributed.world import World
from utils.errors import Exit, UserError, counted, explain
from utils.files import json_lines, read_json, replace_folder, wait_to_see, write_atomically
from utils.hardware.vendor import ENVIRONMENT
from utils.rundir.identity import code_digest, compare, fixed_values, kept_settings, run_path
from utils.rundir.lock import RunLock
from utils.rundir.resolved import UNSET, Resolved
from utils.rundir.restart import acts_fresh, launch_id, slurm_starts
from utils.rundir.state import Progress, TrainState
from utils.settings.config import Config
from utils.strategies import load_strategy


class Run:
    """An open run directory. Rank 0 alone writes; the other ranks hold the same facts.

    kept: what RUN/auto.json holds. facts: of this start, for RUN/status.json. lock: None = the directory is only read.
    is_there: False if --eval-only evaluates weights as they are, and there is no run directory.
    """

    def __init__(self, path: Path, kept: dict[str, Any], facts: Mapping[str, Any], note: Callable[[str], None],
                 lock: RunLock | None):
        self.path, self.note = path, note
        self.resolved = Resolved.of(kept)  # what RUN/auto.json holds, or will hold; keep() changes it
        self.is_read_only = lock is None
        self.is_there = facts.get("is_there", True)
        self.writes = lock is not None and lock.is_held
        self.start: int = facts["start"]  # starts of this run, counted from 1
        self.cores_per_process: int = facts["cores_per_process"]  # of rank 0's node
        self._facts, self._lock = dict(facts), lock
        self._state: TrainState | None = None
        self._writing = threading.Lock()

    def resolve(self, name: str, given: Any, derive: Callable[[], Any]) -> Any:
        """The value of a setting that may be `auto`: resolved at the first start, kept from then on."""
        kept = getattr(self.resolved, name)
        if given == "auto":
            given = derive() if kept is UNSET else kept
        elif kept not in (UNSET, given):
            self.note(f"{name} was {kept} in this run and is now {given}; the run is not bit-exact from here on")
        self.keep(**{name: given})
        return given

    def keep(self, **values: Any) -> None:
        """From here on these are what the run has resolved, by fields of Resolved."""
        self.resolved = replace(self.resolved, **values)

    def require_same(self, name: str, value: str, what: str) -> None:
        """Raise UserError (78) if the run was created with another value."""
        if self.resolve(name, "auto", lambda: value) != value:
            raise UserError(f"{what} changed since {self.path} was created; restore it, or use another --run-dir or"
                            " --fresh", Exit.OTHER_RUN)

    def require_same_data(self, fingerprint: str, world: World) -> None:
        """Raise UserError on every rank if the data set differs between nodes (65) or from the run's (78). Collective.
        """
        world.require_same(fingerprint, "the data set")
        is_same_program = self.resolved.code == self._facts.get("code")
        self.require_same("data", fingerprint, "the data set" if is_same_program else
                          "the data set, or what this version of the program reads of it,")

    def keep_resolved(self) -> None:
        """Write RUN/auto.json; before the first step."""
        self.write_json("auto.json", self.resolved.as_dict())

    def follow(self, state: TrainState) -> None:
        """From here on the status says at which step `state` is."""
        self._state = state

    @property
    def progress(self) -> Progress | None:
        """Where the run is; None before its state is loaded."""
        return self._state.progress if self._state else None

    def write_json(self, name: str, values: Mapping[str, Any]) -> None:
        """Write RUN/name."""
        if self.writes:
            with self._writing:  # the watchdog's thread and the main thread may both be ending the process
                write_atomically(self.path / name, json.dumps(values, indent=1))

    def replace_folder(self, name: str, write: Callable[[Path], None]) -> None:
        """Write RUN/name again, see utils.files.replace_folder."""
        replace_folder(self.path / name, write)

    def status(self, state: str, code: int | None = None, message: str = "") -> None:
        """Write RUN/status.json. state: running, finished, stopped or failed."""
        step, epoch = (self.progress.step, self.progress.epoch) if self.progress else (0, 0)
        self.write_json("status.json", {
            "state": state, "exit_code": code, "step": step, "epoch": epoch, "message": message, **self._facts,
            "pid": os.getpid(), "host": socket.gethostname(), "time": datetime.now(UTC).isoformat(timespec="seconds")})

    def end(self, state: str, code: int, message: str) -> None:
        """The status of a start that fails or is stopped; but one that evaluated nothing and took no step leaves no new
        run directory.
        """
        is_new = self._state is None or (self.progress.step == 0 and not self._state.best)
        if is_new and self._lock is not None and self._lock.discard(self.note):
            self.writes = False
        else:
            self.status(state, code, message)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None and not isinstance(error, SystemExit):
            message, code = explain(error)
            with suppress(OSError):  # the disk may be full: the error itself is more important
                self.end("stopped" if code == Exit.STOPPED else "failed", code, message or repr(error))
        if self._lock is not None:
            self._lock.close()


def open_run(config: Config, world: World, note: Callable[[str], None]) -> Run:
    """Open the run directory, new or used; with --eval-only just to read. Collective.

    Raises UserError on every rank: 78 if it was created with different settings or is in use, 73 if it cannot be
    created.
    """
    if config.run.output and not config.run.eval_only:
        raise UserError(f"--output {config.run.output}: a training writes RUN/eval; --output is for --eval-only"
                        " and --check")
    if config.run.split != "val" and not config.run.eval_only:
        raise UserError(f"--split {config.run.split}: a training evaluates val; --split is for --eval-only")
    path, lock = run_path(config), RunLock()

    # --eval-only reads: no lock, no status
    if config.run.eval_only:
        kept, facts = world.on_rank_zero(lambda: _read(config, path, world, note))  # Collective.
        return Run(path, kept, facts, note, lock=None)

    if tasks := words_about_tasks():
        note(f"warning: {tasks}")

    # rank 0 locks the directory, compares it with this command, and describes the run in it
    launches = world.gather(launch_id())  # Collective.

    def prepare() -> tuple[dict, dict]:
        try:
            _acquire(config, path, lock, launches, note)
        except OSError as error:
            raise UserError(f"cannot create the run directory {path}: {error.strerror}; use another --run-dir",
                            Exit.CANNOT_CREATE) from None
        if config.beginning and not (path / "auto.json").exists():
            import_module(config.beginning).begin(config, path, note)
        last, kept = read_json(path / "status.json"), read_json(path / "auto.json")
        compare(config, path, note)
        describe_run(config, path)
        with (path / "command.txt").open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"# {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC, {world.world_size} processes\n"
                       f"{shlex.join(sys.argv)}\n")
        starts = [last.get("start", 0), *(line["start"] for line in json_lines(path / "starts.jsonl"))]
        facts = _facts(world, launches, 1 + max(starts))
        _note_changes(config, kept, last, facts, note)
        return {"code": facts["code"], **fixed_values(config, path), **kept}, facts

    try:
        kept, facts = world.on_rank_zero(prepare)  # Collective.

        require_shared(path / "command.txt", (path / "command.txt").read_text, world)  # Collective.
    except Exception:
        with suppress(OSError):
            lock.discard(note)
        raise
    run = Run(path, kept, facts, note, lock)
    run.status("running")
    return run


def require_shared(path: Path, read: Callable[[], str], world: World) -> str:
    """read() on rank 0, once every rank gets the same: of `path`, to which rank 0 may just have written. Collective.

    Raises UserError (74) on every rank if a node does not see it: the run directory is not shared.
    """
    written = world.on_rank_zero(read)  # Collective.

    def look() -> None:
        if not wait_to_see(lambda: read() == written, path):
            raise UserError(f"this node does not see {path.absolute()} as rank 0 wrote it: on several nodes the run"
                            " directory must be shared; give a --run-dir on a disk that all nodes mount", Exit.IO)

    world.everywhere(look, takes_long=True)  # Collective.
    return written


def _read(config: Config, path: Path, world: World, note: Callable[[str], None]) -> tuple[dict, dict]:
    """What RUN/auto.json holds, and the facts of a start that only reads; without a run, weights as they are."""
    if not (path / "auto.json").exists():
        if not config.run.run_dir and (config.model.pretrained or getattr(config.model, "weights", None)):
            return {}, _facts(world) | {"is_there": False}
        raise UserError(f"{path} holds no checkpoint: train first; or evaluate weights as they are, with --model and"
                        " --pretrained and without --run-dir", Exit.NO_INPUT)
    compare(config, path, note)
    kept, facts, last = fixed_values(config, path) | read_json(path / "auto.json"), _facts(world), {}
    with suppress(UserError, OSError):  # an evaluation does not need it
        last = read_json(path / "status.json")
    if last.get("code", facts["code"]) != facts["code"]:
        note(f"warning: the program changed since the last start of {path}; figures may differ from those it recorded")
    return kept, facts


def _acquire(config: Config, path: Path, lock: RunLock, launches: list[str | None],
             note: Callable[[str], None]) -> None:
    """Lock the run directory. Where --fresh acts, move the old run away first."""
    path = path.resolve() if path.is_symlink() else path  # the link stays, and the old run on its disk
    old = path.parent / ".old" / f"{path.name}-{datetime.now(UTC):%Y%m%d-%H%M%S-%f}"
    lock.acquire(path, note)
    if acts_fresh(config, launches):  # asked with the lock held: another --fresh may have cleared it a moment ago
        lock.move_away(path, old)
        note(f"--fresh: the old run is in {old}")
    elif config.run.fresh and (path / "auto.json").exists():
        note("--fresh has cleared the run directory at this launch's first start; this start continues the run")


def _note_changes(config: Config, kept: dict[str, Any], last: Mapping[str, Any], facts: Mapping[str, Any],
                  note: Callable[[str], None]) -> None:
    """Tell what may round differently since the start before, whose facts are `last`."""
    strategy = config.device.strategy
    for name in ("processes", "devices_per_process"):
        before, now = last.get(name), facts[name]
        if kept and not load_strategy(strategy).is_invariant and before not in (None, now):
            words = counted(before, "process") if name == "processes" else f"devices per process: {before}"
            note(f"{words} before, {now} now: with --strategy {strategy} sums are rounded"
                 " differently from here on; a new run with --strategy exact avoids this")
    if kept.get("code", facts["code"]) != facts["code"] and last.get("code") != facts["code"]:
        note(f"warning: the program changed since {run_path(config)} was created; results may differ from here on; for"
             " the same bits, continue with the program that began the run")


def _facts(world: World, launches: Sequence[str | None] = (), start: int = 1) -> dict[str, Any]:
    """What status.json says of this start, which is that number of the run's."""
    return {"start": start, "launch": sorted({*filter(None, launches), *slurm_starts()[-1:]}),
            "processes": world.world_size, "devices_per_process": len(world.devices),
            "cores_per_process": world.cores, "code": code_digest(), "version": utils.__version__}


def describe_run(config: Config, path: Path) -> None:
    """Write config.yaml and env.txt, until training begins."""
    if not (path / "auto.json").exists():
        # env.txt: versions, and the environment without secrets
        about = [found.metadata for found in metadata.distributions()]
        packages = sorted({(each["Name"], each["Version"]) for each in about})
        names = [name for name in sorted(os.environ)
                 if re.match(f"{ENVIRONMENT}|GLOO|OMP|MKL|TORCH|PET|SLURM|LOCKSTEP|XDG|WORLD", name)]
        shown = {name: "(redacted)" if re.search("TOKEN|KEY|SECRET|PASS", name) else os.environ[name] for name in names}
        lines = [f"lockstep {utils.__version__}", f"python {platform.python_version()}", platform.platform(),
                 *(f"{name} {version}" for name, version in packages),
                 *(f"{name}={value}" for name, value in shown.items()), ""]
        text = "\n".join(lines).encode(errors="backslashreplace")  # a path may be in any encoding
        write_atomically(path / "env.txt", text.decode(), is_private=True)
        write_atomically(path / "config.yaml", yaml.safe_dump(kept_settings(config), sort_keys=False))


def command(name: str) -> str:
    """A program of this environment, as a shell takes it here: its name if the shell finds it, else its path."""
    path = Path(sys.executable).with_name(name)
    if shutil.which(name) == str(path):
        return name
    return shlex.quote(os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path))
