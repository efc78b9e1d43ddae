"""A run directory: its name, its lock, its settings, its status. The same command continues the same run.

    with open_run(config, world, note) as run: ...

What is kept here is a contract: docs/run-directory.md. No torch at module level: a finished run says so in a moment.
"""

import fcntl
import hashlib
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

from utils.config import DEFINING, NOT_KEPT, OPERATIONAL, TOLERATED, Config, kinds, settings
from utils.errors import Exit, UserError, explain, record_exit

LOCK_WAIT_S = 15  # a preempted start may need a moment to leave
FINAL = (Exit.USAGE, Exit.BAD_DATA, Exit.NO_INPUT, Exit.CANNOT_CREATE, Exit.OTHER_RUN, Exit.DIVERGED, Exit.NO_CHECKPOINT)


def identity(config: Config) -> dict[str, Any]:
    """The settings that make a run what it is, with paths made absolute."""
    values = {name: value for name, value in settings(config).items() if kinds(config)[name] != OPERATIONAL}
    if values["data"] != "demo":
        values["data"] = os.path.abspath(values["data"])
    for name in ("model", "tokenizer", "weights"):
        if values.get(name) and Path(values[name]).exists():  # else a library's name, which may have a slash in it too
            values[name] = os.path.abspath(values[name])
    return values


def run_path(config: Config) -> Path:
    """--run-dir, or runs/TASK-MODEL-DATA-HASH."""
    if config.run.run_dir:
        return Path(config.run.run_dir)
    values = identity(config)
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]
    names = [re.sub(r"[^A-Za-z0-9._-]", "-", os.path.basename(str(part))) for part in (values["task"], values["model"], values["data"])]
    return Path("runs") / "-".join([*names, digest])


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from `path`; empty if there is none. Raises UserError (74)."""
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); restore it, or use another --run-dir or --fresh", Exit.IO) from None


def sync(path: Path) -> None:
    """fsync a file or folder: what is renamed into place must have reached the disk before."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, text: str) -> None:
    """Write a small file so that a reader sees the old or the new content, never a part."""
    partial = path.with_name(f".tmp-{path.name}")
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def early_device(config: Config) -> str:
    """--device, or what this run kept for `auto`: asked before there is a process group."""
    kept = {} if acts_fresh(config) else read_json(run_path(config) / "auto.json")
    return config.device.device if config.device.device != "auto" else kept.get("device", "auto")


def finish_early(config: Config) -> None:
    """If this very run is finished already, say so and leave with 0, before torch is imported.

    If torchrun restarts what no restart mends, leave with the same code as the start before: torchrun cannot be told not to. (After
    a SIGTERM it restarts only if it sent that itself: another node came or went.)
    """
    path = run_path(config)
    try:
        last = read_json(path / "status.json")
        is_final = last.get("exit_code") in FINAL or (
            last.get("exit_code") == Exit.STOPPED and not re.search("SIGTERM(?! to rank)", last["message"]))
        if _is_restart() and _is_same_launch(last) and is_final:
            if os.environ.get("RANK", "0") == "0":
                print(f"train.py: no restart: {last['state']}, {last['message']}", file=sys.stderr)
            record_exit(last["exit_code"])
            raise SystemExit(last["exit_code"])
        if acts_fresh(config) or config.run.eval_only or last.get("state") != "finished":
            return
        _compare(config, path)
        if yaml.safe_load((path / "config.yaml").read_text())["data"] != identity(config)["data"]:
            return  # which may be the same data in another place: that takes a look at them
    except UserError:
        return  # open_run says so to all ranks
    summary = read_json(path / "summary.json")
    figures = ", ".join(f"{name} {value:.4f}" for name, value in summary.items() if isinstance(value, float))
    if os.environ.get("RANK", "0") == "0":
        print(f"{path} is finished: step {summary.get('step')}, {figures}\n"
              f"--fresh starts over; to train on, start a new run from it: --model {path / 'model'} --pretrained")
    raise SystemExit(0)


class Run:
    """An open run directory. Rank 0 alone writes; the others hold the same facts."""

    def __init__(self, path: Path, kept: dict[str, Any], writes: bool, note: Callable[[str], None], facts: Mapping[str, Any]):
        self.path, self.kept, self.note = path, kept, note
        self.start: int = facts["start"]  # starts of this run, counted from 1
        self.cores_per_process: int = facts["cores_per_process"]  # of rank 0's node
        self.where: Callable[[], Any] = lambda: None  # the run's Progress, once it has one
        self._writes, self._facts, self._lock = writes, dict(facts), None
        self._writing = threading.Lock()

    def settle(self, name: str, given: Any, derive: Callable[[], Any]) -> Any:
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

    def keep_settled(self) -> None:
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
        if not (path / "auto.json").exists():
            raise UserError(f"{path} holds no checkpoint: train first", Exit.NO_INPUT)
        _compare(config, path, note)
        return Run(path, read_json(path / "auto.json"), writes=False, note=note, facts=_facts({}, world))

    def prepare() -> dict[str, Any]:
        is_fresh, old = acts_fresh(config), path.parent / ".old" / f"{path.name}-{datetime.now(UTC):%Y%m%d-%H%M%S-%f}"
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock.append(_acquire(path))
            if is_fresh:
                old.parent.mkdir(exist_ok=True)
                os.rename(path, old)
                path.mkdir(mode=0o700)
                lock.append(_acquire(path))
        except OSError as error:
            raise UserError(f"cannot make the run directory {path}: {error.strerror}; give another --run-dir", Exit.CANNOT_CREATE) from None
        if is_fresh:
            note(f"--fresh: the old run is in {old}")
        elif config.run.fresh and (path / "auto.json").exists():
            note("--fresh has cleared the run directory at this launch's first start; this one continues")
        _compare(config, path, note)
        last, kept = read_json(path / "status.json"), read_json(path / "auto.json")
        _describe(config, path, world.world_size)
        processes = last.get("processes")
        if kept and config.device.strategy == "ddp" and processes not in (None, world.world_size):
            note(f"{processes} processes before, {world.world_size} now: under ddp, unlike exact, sums are rounded differently from here")
        facts = _facts(last, world)
        if kept.setdefault("code", facts["code"]) != facts["code"] and last.get("code") != facts["code"]:
            note(f"warning: the program changed since {path} began")
        return {"kept": kept, "facts": facts}

    found = world.once(prepare)
    for host in filter(None, world.gather(None if (path / "config.yaml").exists() else socket.gethostname())):
        raise UserError(f"{host} does not see {path.absolute()}: on several nodes the run directory must be shared", Exit.IO)
    run = Run(path, found["kept"], world.is_main, note, found["facts"])
    run._lock = lock[-1] if lock else None
    run.status("running")
    return run


def require_same_program(config: Config, world: Any) -> None:
    """Raise UserError (65) on every rank where settings, code or torch differ between nodes: each would compute its own. Collective."""
    of_a_node = ("data", "config", "run_dir", "workers", "nproc_per_node")  # paths may differ, and data are compared by content
    values = {name: value for name, value in settings(config).items() if name not in of_a_node}
    world.require_same(json.dumps(values, sort_keys=True), "the settings")
    world.require_same(_code_digest(), "the program")
    world.require_same(metadata.version("torch"), "torch's version")


def _facts(last: Mapping[str, Any], world: Any) -> dict[str, Any]:
    """What status.json says of a start; last: of the one before."""
    cores = len(os.sched_getaffinity(0)) // world.local_world_size
    return {"start": last.get("start", 0) + 1, "launch": _launch(), "processes": world.world_size, "cores_per_process": max(1, cores),
            "code": _code_digest()}


def acts_fresh(config: Config) -> bool:
    """Whether --fresh clears the run directory at this start: at the first of a launch, not when torchrun restarts it."""
    path = run_path(config)
    return (config.run.fresh and (path / "config.yaml").exists()
            and not _is_restart() and not _is_same_launch(read_json(path / "status.json")))


def _is_restart() -> bool:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0


def _is_same_launch(status: Mapping[str, Any]) -> bool:
    return _launch() is not None and status.get("launch") == _launch()


def _launch() -> str | None:
    """What torchrun's starts of one launch share: its id and, on one node, where ids may be used again, its own process."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    if name != "none" and os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
        with open(f"/proc/{os.getppid()}/stat") as file:
            return f"{name} {os.getppid()} {file.read().rpartition(')')[2].split()[19]}"  # the last: when it began
    return None if name == "none" else name


def command(name: str) -> str:
    """A program of this environment as the user can type it here: its name if that finds it, else its path."""
    path = Path(sys.executable).with_name(name)
    if shutil.which(name) == str(path):
        return name
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def _acquire(path: Path) -> Any:
    """The lock of a run directory, held until closed. lockf, for data loading processes would inherit a flock."""
    file = (path / ".lock").open("a+")
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                file.seek(0)
                raise UserError(f"{path} is in use by {file.read().strip() or 'another process'}; wait, stop it, or use another --run-dir",
                                Exit.OTHER_RUN) from None
            time.sleep(0.1)
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()} since {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC\n")
    file.flush()
    return file


def _compare(config: Config, path: Path, note: Callable[[str], None] = lambda text: None) -> None:
    """Raise UserError (78) if the run in `path` has other defining settings; note other tolerated ones."""
    file = path / "config.yaml"
    if not (path / "auto.json").exists():  # it never came to training: whoever mends a wrong setting may go on here
        if any(path.glob("checkpoints/step-*")):
            raise UserError(f"{path} has checkpoints and no auto.json: it is no run directory of this program", Exit.OTHER_RUN)
        return
    unset = {name: None for name, value in settings(type(config)()).items() if value is None}  # what is off is not in the file
    old, new = unset | yaml.safe_load(file.read_text()), json.loads(json.dumps(identity(config)))
    apart = ("data", "device", "threads", "precision", "micro_batch_size")  # by content (require_same); by what auto became (settle)
    differ = {kind: [f"{name} is {old[name]} there and {new[name]} here" for name in new
                     if name in old and old[name] != new[name] and kinds(config)[name] == kind and name not in apart]
              for kind in (DEFINING, TOLERATED)}
    if differ[DEFINING]:
        longer = " To train past the end, start a new run from it: --model RUN/model --pretrained." if "epochs is" in str(differ) else ""
        raise UserError(f"{path} belongs to other settings: {'; '.join(differ[DEFINING])}."
                        f" Use these, another --run-dir, or --fresh.{longer}", Exit.OTHER_RUN)
    if differ[TOLERATED]:
        note(f"{'; '.join(differ[TOLERATED])}: not bit-exact from here")


def _describe(config: Config, path: Path, processes: int) -> None:
    """config.yaml and env.txt until training begins; a line of command.txt at each start."""
    if not (path / "auto.json").exists():
        values = settings(config) | identity(config)
        kept = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()
                if name not in NOT_KEPT and value is not None}
        lines = [f"{name} {version}" for name, version in sorted({(d.name, d.version) for d in metadata.distributions()})]
        names = [name for name in sorted(os.environ) if re.match("CUDA|NCCL|GLOO|OMP|MKL|TORCH|PET|SLURM|LOCKSTEP|XDG|WORLD", name)]
        lines += [f"{name}={'(redacted)' if re.search('TOKEN|KEY|SECRET|PASS', name) else os.environ[name]}" for name in names]
        write_atomically(path / "env.txt", "\n".join([f"python {platform.python_version()}", platform.platform(), *lines, ""]))
        write_atomically(path / "config.yaml", yaml.safe_dump(kept, sort_keys=False))
    with (path / "command.txt").open("a") as file:
        file.write(f"# {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC, {processes} processes\n{shlex.join(sys.argv)}\n")


def _code_digest() -> str:
    root = Path(__file__).parent.parent
    files = sorted([root / "train.py", *(file for folder in ("data", "models", "utils") for file in (root / folder).rglob("*.py"))])
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def cache_path() -> Path:
    """Where indexes and the built-in data are cached: $LOCKSTEP_CACHE, else $XDG_CACHE_HOME/lockstep, else ~/.cache/lockstep."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("LOCKSTEP_CACHE") or home / "lockstep")

