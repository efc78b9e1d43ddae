"""An open run directory: its lock, its records, its status. The same command continues the same run.

    with open_run(config, world, note) as run: ...

What is kept here is a contract: docs/run-directory.md.
"""

import errno
import fcntl
import json
import os
import platform
import re
import shlex
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Self

import yaml

from utils.errors import Exit, UserError, explain
from utils.files import read_json, sync, write_atomically
from utils.hardware.vendor import ENVIRONMENT
from utils.rundir.identity import code_digest, compare, kept_settings, run_path
from utils.rundir.restart import acts_fresh, launch_id, slurm_starts
from utils.settings.config import Config
from utils.strategies import load_strategy

LOCK_WAIT_S = 15  # a preempted start may need a moment to leave
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # Lustre that is mounted without flock; NFS without its lock daemon


class Run:
    """An open run directory. Rank 0 alone writes; the others hold the same facts."""

    def __init__(self, path: Path, kept: dict[str, Any], writes: bool, note: Callable[[str], None], facts: Mapping[str, Any],
                 is_read_only: bool = False):
        self.path, self.kept, self.note, self.is_read_only = path, kept, note, is_read_only
        self.start: int = facts["start"]  # starts of this run, counted from 1
        self.cores_per_process: int = facts["cores_per_process"]  # of rank 0's node
        self.where: Callable[[], Any] = lambda: None  # the run's Progress, once it has one
        self._writes, self._facts, self._lock = writes, dict(facts), None
        self._writing = threading.Lock()

    def resolve(self, name: str, given: Any, derive: Callable[[], Any]) -> Any:
        """What a setting whose value may be `auto` means in this run: resolved at the first start, kept from then on."""
        kept = self.kept.get(name)
        if given == "auto":
            self.kept[name] = derive() if kept is None else kept
        else:
            if kept is not None and kept != given:
                self.note(f"{name} was {kept} in this run and is {given} from here on: not bit-exact from here")
            self.kept[name] = given
        return self.kept[name]

    def require_same(self, name: str, value: str, what: str) -> None:
        """Raise UserError (78) if the run began with another value."""
        if self.kept.setdefault(name, value) != value:
            raise UserError(f"{what} changed since {self.path} began; restore it, or use another --run-dir or --fresh", Exit.OTHER_RUN)

    def keep_resolved(self) -> None:
        """Write RUN/auto.json; before the first step."""
        self.write_json("auto.json", self.kept)

    def write_json(self, name: str, values: Mapping[str, Any]) -> None:
        """Write RUN/name."""
        if self._writes:
            with self._writing:  # the watchdog may end the process while the main thread does, too
                write_atomically(self.path / name, json.dumps(values, indent=1))

    def replace_folder(self, name: str, write: Callable[[Path], None]) -> None:
        """Write RUN/name anew under a temporary name and rename it into place."""
        folder, partial, old = (self.path / part for part in (name, f".tmp-{name}", f".tmp-old-{name}"))
        for leftover in (partial, old):
            shutil.rmtree(leftover, ignore_errors=True)
        try:
            partial.mkdir()
            write(partial)
            for path in (*partial.rglob("*"), partial):
                sync(path)
            if folder.exists():
                os.rename(folder, old)
            os.rename(partial, folder)
            sync(self.path)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        shutil.rmtree(old, ignore_errors=True)

    def status(self, state: str, code: int | None = None, message: str = "") -> None:
        """Write RUN/status.json. state: running, finished, stopped or failed."""
        progress = self.where()
        self.write_json("status.json", {
            "state": state, "exit_code": code, "step": getattr(progress, "step", 0), "epoch": getattr(progress, "epoch", 0),
            "message": message, **self._facts,
            "pid": os.getpid(), "host": socket.gethostname(), "time": datetime.now(UTC).isoformat(timespec="seconds")})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        if error is not None and not isinstance(error, SystemExit):
            message, code = explain(error)
            with suppress(OSError):  # a disk that is full is no reason to hide what is being told
                self.status("stopped" if code == Exit.STOPPED else "failed", code, message=message or repr(error))
        if self._lock is not None:
            self._lock.close()


def open_run(config: Config, world: Any, note: Callable[[str], None]) -> Run:
    """Open the run directory, new or used; with --eval-only just to read. Collective.

    Raises UserError on every rank: 78 if it belongs to other settings or is in use, 73 if it cannot be made.
    """
    path, lock = run_path(config), []
    if config.run.eval_only:
        def read() -> dict[str, Any]:
            if not (path / "auto.json").exists():
                raise UserError(f"{path} holds no checkpoint: train first", Exit.NO_INPUT)
            compare(config, path, note)
            return {"kept": read_json(path / "auto.json"), "facts": _facts({}, world, [])}

        found = world.on_rank_zero(read)
        return Run(path, found["kept"], writes=False, note=note, facts=found["facts"], is_read_only=True)

    launches = world.gather(launch_id())

    def prepare() -> dict[str, Any]:
        old = path.parent / ".old" / f"{path.name}-{datetime.now(UTC):%Y%m%d-%H%M%S-%f}"
        try:
            lock.append(_acquire(path, note))
            if is_fresh := acts_fresh(config, launches):  # asked by who has the lock: another --fresh may just have been here
                old.parent.mkdir(exist_ok=True)
                os.rename(path, old)
                lock.append(_acquire(path))
        except OSError as error:
            raise UserError(f"cannot make the run directory {path}: {error.strerror}; give another --run-dir", Exit.CANNOT_CREATE) from None
        if is_fresh:
            note(f"--fresh: the old run is in {old}")
        elif config.run.fresh and (path / "auto.json").exists():
            note("--fresh has cleared the run directory at this launch's first start; this one continues")
        compare(config, path, note)
        last, kept = read_json(path / "status.json"), read_json(path / "auto.json")
        _describe(config, path, world.world_size)
        processes = last.get("processes")
        if kept and not load_strategy(config.device.strategy).is_invariant and processes not in (None, world.world_size):
            note(f"{processes} processes before, {world.world_size} now: under {config.device.strategy}, unlike exact, sums are rounded differently from here")
        facts = _facts(last, world, launches)
        if kept.setdefault("code", facts["code"]) != facts["code"] and last.get("code") != facts["code"]:
            note(f"warning: the program changed since {path} began")
        return {"kept": kept, "facts": facts}

    found = world.on_rank_zero(prepare)
    for host in filter(None, world.gather(None if (path / "config.yaml").exists() else socket.gethostname())):
        raise UserError(f"{host} does not see {path.absolute()}: on several nodes the run directory must be shared", Exit.IO)
    run = Run(path, found["kept"], world.is_main, note, found["facts"])
    run._lock = lock[-1] if lock else None
    run.status("running")
    return run


def _facts(last: Mapping[str, Any], world: Any, launches: list[str | None]) -> dict[str, Any]:
    """What status.json says of a start; last: of the one before."""
    return {"start": last.get("start", 0) + 1, "launch": sorted({*filter(None, launches), *slurm_starts()[-1:]}),
            "processes": world.world_size, "cores_per_process": world.cores, "code": code_digest()}


def _acquire(path: Path, note: Callable[[str], None] = lambda text: None) -> Any:
    """The lock of a run directory, which is made if need be; held until closed. lockf: workers would inherit a flock."""
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = (path / ".lock").open("a+")
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file.fileno()), os.stat(file.name)):  # else a --fresh has just moved it aside
                break
        except (BlockingIOError, FileNotFoundError):
            if time.monotonic() > deadline:
                file.seek(0)
                raise UserError(f"{path} is in use by {file.read().strip() or 'another process'}; wait, stop it, or use another --run-dir",
                                Exit.OTHER_RUN) from None
            time.sleep(0.1)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            note(f"warning: {path} lies on a file system without locks ({error.strerror}): nothing keeps a second start from"
                 " writing there, too")
            break
        file.close()
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()} since {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC\n")
    file.flush()
    return file


def _describe(config: Config, path: Path, processes: int) -> None:
    """config.yaml and env.txt until training begins; a line of command.txt at each start."""
    if not (path / "auto.json").exists():
        lines = [f"{name} {version}" for name, version in sorted({(d.name, d.version) for d in metadata.distributions()})]
        names = [name for name in sorted(os.environ) if re.match(f"{ENVIRONMENT}|GLOO|OMP|MKL|TORCH|PET|SLURM|LOCKSTEP|XDG|WORLD", name)]
        lines += [f"{name}={'(redacted)' if re.search('TOKEN|KEY|SECRET|PASS', name) else os.environ[name]}" for name in names]
        write_atomically(path / "env.txt", "\n".join([f"python {platform.python_version()}", platform.platform(), *lines, ""]))
        write_atomically(path / "config.yaml", yaml.safe_dump(kept_settings(config), sort_keys=False))
    with (path / "command.txt").open("a") as file:
        file.write(f"# {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC, {processes} processes\n{shlex.join(sys.argv)}\n")


def command(name: str) -> str:
    """A program of this environment as the user can type it here: its name if that finds it, else its path."""
    path = Path(sys.executable).with_name(name)
    if shutil.which(name) == str(path):
        return name
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
