"""Every system call of a save as the last one, or as one that fails: the old or the new checkpoint must be left.

    python -m tests.faults.sweep_saves                   # all points, as a table; ends with 1 if an outcome is bad
    python -m tests.faults.sweep_saves --every 7 --json  # a sample, for tests

One process forks a child for each point. strace attaches to it and ends it with SIGKILL on entering the K-th call of a
kind (that call is not done any more), or makes that call fail; it counts per thread, and one thread writes. Calls that
change nothing (QUIET) are left out: a process that ends there leaves what it leaves at the next call that is not.
"""

import argparse
import json
import mmap
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file

from models.vision.classifier import save_model_folder
from utils.errors import Exit, UserError
from utils.files import write_atomically
from utils.rundir.chain import NO_RECORDS, Chain, read_lines, valid_links
from utils.rundir.checkpoint import SAMPLES, Checkpoints
from utils.rundir.checkpoint_folder import CheckpointFolder, find_damage, step_of
from utils.rundir.digests import Digests
from utils.rundir.lock import RunLock
from utils.rundir.resolved import Resolved
from utils.rundir.run import Run
from utils.rundir.snapshot import Beside
from utils.rundir.state import Progress, TrainState
from utils.settings.run_options import RecordOptions

QUIET = {
    "read", "pread64", "readv", "lseek", "stat", "lstat", "fstat", "newfstatat", "statx", "statfs", "fstatfs", "access",
    "faccessat", "faccessat2", "getcwd", "readlink", "readlinkat", "getdents64", "ioctl", "fcntl", "mmap", "poll",
    "ppoll", "select", "pselect6"}
ERRORS = {  # what each call may fail with, where it is meaningful
    **dict.fromkeys(["write", "writev", "pwrite64", "ftruncate", "fallocate", "fsync", "fdatasync"], ("ENOSPC", "EIO")),
    **dict.fromkeys(["openat", "mkdir", "mkdirat", "rename", "renameat", "renameat2"], ("ENOSPC", "EIO", "EROFS")),
    **dict.fromkeys(["unlink", "unlinkat", "rmdir"], ("EIO", "EROFS")), "close": ("EIO",)}
FAULTS = ("SIGKILL", "ENOSPC", "ENOSPC+", "EIO", "EROFS+")  # +: from that call on
# where these fail, something may be left until the next start
NEEDED_TO_REMOVE = {"openat", "close", "unlink", "unlinkat", "rmdir"}
LIMIT_S = 60  # of one point
WORLD = SimpleNamespace(  # of one process
    is_main=True, world_size=1, on_rank_zero=lambda work, **options: work(), all_reduce_or=lambda bits: bits,
    gather=lambda value: [value])


# --- what a run saves


def say_nothing(text: str) -> None:
    """A note that nobody reads: in a child it would be a call that writes."""


def weights_of(step: int, size: int = 5000) -> dict[str, torch.Tensor]:
    """The weights of a run at `step`, of which any byte tells the step."""
    return {"weight": torch.randn(size, generator=torch.Generator().manual_seed(step))}


def samples_of(step: int) -> torch.Tensor:
    """The digests of the samples of that run."""
    return torch.randint(256, (64, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(step))


def save(run: Path, step: int, start: int = 1, keep: int = 1, size: int = 5000, is_best: bool = True,
         awaits_evaluation: bool = False) -> None:
    """Save a run at `step` as train.py does on rank 0: RUN/model if it is the best, then the checkpoint.

    Raises UserError (74).
    """
    def beside(weights: dict[str, torch.Tensor]) -> None:
        if is_best:
            opened.replace_folder("model", lambda folder: save_model_folder(weights, {"step": step}, folder))

    opened = Run(run, {}, {"start": start, "cores_per_process": 1}, say_nothing, RunLock())
    strategy = SimpleNamespace(world=WORLD, model_state=lambda: weights_of(step, size),
                               optimizer_state=lambda optimizer: weights_of(-step, size))
    best = {"step": step, "metric": "top1", "value": float(step)} if is_best else {}
    state = TrainState(strategy, None, SimpleNamespace(state_dict=dict), Progress(step=step), best,
                       digests={"train": Digests(64)})
    state.digests["train"].load(samples_of(step))
    known = SimpleNamespace(path=run, start=start, note=say_nothing, resolved=Resolved())
    checkpoints = Checkpoints(known, WORLD, RecordOptions(keep=keep))
    checkpoints.save(state, Beside(NO_RECORDS, beside, has_model=is_best), awaits_evaluation)
    checkpoints.flush()


def step_in(folder: Path) -> int:
    """The step that every file of the checkpoint in `folder` is of.

    Raises ValueError if one is of another, or does not load.
    """
    step = json.loads((folder / "trainer.json").read_text())["progress"]["step"]
    state = torch.load(folder / "state.pt", weights_only=True)["optimizer"]
    _require_equal(load_file(folder / "model.safetensors"), weights_of(step), folder)
    _require_equal(state, weights_of(-step), folder)
    _require_equal(load_file(folder / SAMPLES), {"since": torch.tensor(0), "train": samples_of(step)}, folder)
    return step


def step_in_model(folder: Path) -> int | None:
    """The same for RUN/model; None if there is none."""
    if not folder.exists():
        return None
    step = json.loads((folder / "config.json").read_text())["step"]
    _require_equal(load_file(folder / "model.safetensors"), weights_of(step), folder)
    return step


def valid(run: Path) -> list[str]:
    """Names of the valid checkpoints."""
    folder = CheckpointFolder(run / "checkpoints", 1, say_nothing)
    return [name for name in folder.names() if find_damage(folder.path / name) is None]


def leftovers(run: Path) -> list[str]:
    """What has a temporary name, anywhere in the run directory."""
    return sorted(str(path.relative_to(run)) for path in run.rglob(".tmp-*"))


def flip(path: Path, place: int, bit: int) -> None:
    """Flip one bit of a file."""
    with path.open("r+b") as file:
        file.seek(place)
        [byte] = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1 << bit]))


def flips(folder: Path, file: str, every: int = 997, bits: int = 1) -> tuple[int, list[tuple[int, int]]]:
    """How many flips of `bits` of the 8 bits of every so-many-th byte were tried; (place, bit) of those not found."""
    path, tried, missed = folder / file, 0, []
    for place in range(0, path.stat().st_size, every):
        for bit in range(8) if bits == 8 else [place % 8]:
            flip(path, place, bit)
            tried += 1
            if find_damage(folder) is None:
                missed.append((place, bit))
            flip(path, place, bit)
    return tried, missed


def _require_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], folder: Path) -> None:
    if found.keys() != expected.keys() or any(not torch.equal(found[name], expected[name]) for name in expected):
        raise ValueError(f"{folder} is mixed")


# --- what is done until it ends, and what must be so afterwards


@dataclass(frozen=True)
class Job:
    """Something that writes into a run directory."""

    prepare: Callable[[Path], None]  # what is there before
    work: Callable[[Path], None]
    # the run directory, the outcome (None: killed), the call. Raises ValueError
    check: Callable[[Path, dict[str, Any] | None, str], None]


def prepare_three(run: Path) -> None:
    """Checkpoints of steps 1, 2 and 3; RUN/model is that of step 3."""
    run.mkdir()
    for step in (1, 2, 3):
        save(run, step, keep=3)


def prepare_after_kills(run: Path) -> None:
    """The same where earlier kills left half a checkpoint, half a removal, half of RUN/model, and no RUN/model."""
    prepare_three(run)
    shutil.copytree(run / "model", run / ".tmp-model")
    os.rename(run / "model", run / ".tmp-old-model")
    for name in (".tmp-step-0000000004-g1", ".tmp-removed-step-0000000000-g1"):
        shutil.copytree(run / "checkpoints" / "step-0000000001-g1", run / "checkpoints" / name)
        (run / "checkpoints" / name / "MANIFEST.json").unlink()


def prepare_damaged(run: Path) -> None:
    """The same, the checkpoints of steps 2 and 3 damaged, and a leftover."""
    prepare_after_kills(run)
    for step in (2, 3):
        flip(run / "checkpoints" / f"step-{step:010d}-g1" / "state.pt", 9000, 0)


def check_save(run: Path, outcome: dict[str, Any] | None, call: str) -> None:
    """The old or the new checkpoint; two valid ones if there were three; and the next start saves, RUN/model too."""
    is_first = not (run.parent / "before" / "checkpoints").exists()
    old, least = (None, 0) if is_first else (3, 2)
    model = step_in_model(run / "model")
    require(model in (None, old, 4), "RUN/model is of neither step")
    if outcome is not None:
        require(outcome["code"] in (Exit.DONE, Exit.IO), f"ends with {outcome}")
        require(outcome["code"] == Exit.DONE or str(run) in outcome["text"], f"does not name the folder: {outcome}")
        left = set(leftovers(run)) - set(leftovers(run.parent / "before")) - {".tmp-old-model"}
        require(call in NEEDED_TO_REMOVE or not left, f"leaves {left}")
        committed = any(step_of(name) == 4 for name in valid(run))
        require(committed or outcome["code"] == Exit.IO, f"nothing was saved, and no error: {outcome}")
        require(committed or len(valid(run)) == (0 if is_first else 3), f"an earlier checkpoint is gone: {valid(run)}")
    notes: list[str] = []
    folder = CheckpointFolder(run / "checkpoints", 1, notes.append)
    name = folder.newest_valid()
    found = step_in(folder.path / name) if name else None
    require(found in (old, 4) and not notes, f"newest_valid is {name} of step {found}: {notes}")
    require(found is None or found == step_of(name), f"{name} is of step {found}")
    require(found != 4 or model == 4, f"the checkpoint tells of a best model that is not in RUN/model: {model}")
    require(len(valid(run)) >= least and len(valid(run)) == len(folder.names()),
            f"valid: {valid(run)} of {folder.names()}")
    require(not list(folder.path.glob(".tmp-*")), f"{leftovers(run)} survive")
    require_links(run)
    save(run, 4, start=2)
    require(step_in(folder.path / folder.newest_valid()) == step_in_model(run / "model") == 4,
            "the next save is not whole")
    require(len(valid(run)) >= min(2, least) and not leftovers(run),
            f"after the next save: {valid(run)}, {leftovers(run)}")


def require_links(run: Path) -> None:
    """The next start completes the chain: it has the link of each step that is done, and was saved."""
    links = CheckpointFolder(run / "checkpoints", 1, say_nothing).links()
    newest = next(iter(links), None)
    Chain(run).resume(newest, newest["step"] if newest else 0)
    done, found = ({link["step"]: link["link"] for link in each if not link["awaits_evaluation"]} for each in (
        reversed(links), valid_links(read_lines(run))))
    require(done.items() <= found.items(), f"links are missing: {done}, {found}")


def prepare_unevaluated(run: Path) -> None:
    """Checkpoints of steps 1, 2 and 3, and the one of step 4 that was saved before its evaluation."""
    prepare_three(run)
    save(run, 4, keep=3, is_best=False, awaits_evaluation=True)


def check_evaluated(run: Path, outcome: dict[str, Any] | None, call: str) -> None:
    """Whatever happens to the save after an evaluation, there is a valid checkpoint of its step."""
    require(outcome is None or outcome["code"] in (Exit.DONE, Exit.IO), f"ends with {outcome}")
    notes: list[str] = []
    folder = CheckpointFolder(run / "checkpoints", 1, notes.append)
    name = folder.newest_valid()
    require(not notes and step_in(folder.path / name) == 4, f"newest_valid is {name}: {notes}")
    require(step_in_model(run / "model") in (None, 3, 4), "RUN/model is of neither step")
    require(name.endswith("-unevaluated") or step_in_model(run / "model") == 4,
            "RUN/model is not the best that is told of")
    require_links(run)
    require(len(valid(run)) >= 2 and len(valid(run)) == len(folder.names()), f"valid: {valid(run)} of {folder.names()}")
    save(run, 5, start=2)
    require(step_in(folder.path / folder.newest_valid()) == 5 and not leftovers(run),
            f"after the next save: {leftovers(run)}")


def check_start(run: Path, outcome: dict[str, Any] | None, call: str) -> None:
    """The next start finds the one valid checkpoint and sets the damaged ones aside; after an error nothing is gone."""
    folder = CheckpointFolder(run / "checkpoints", 1, say_nothing)
    if outcome is not None:  # what cannot be read counts as damaged
        known = outcome["code"] in (Exit.DONE, Exit.IO, Exit.NO_CHECKPOINT) or outcome["type"] == "OSError"
        require(known and (outcome["code"] == Exit.DONE or str(run) in outcome["text"]), f"ends with {outcome}")
        with suppress(FileNotFoundError):
            os.rename(folder.path / "damaged-step-0000000001-g1", folder.path / "step-0000000001-g1")
    require(step_in(folder.path / folder.newest_valid()) == 1, "another checkpoint than the valid one")
    expected = ["damaged-step-0000000002-g1", "damaged-step-0000000003-g1", "step-0000000001-g1"]
    require(sorted(os.listdir(folder.path)) == expected, f"left: {sorted(os.listdir(folder.path))}")


def check_status(run: Path, outcome: dict[str, Any] | None, call: str) -> None:
    """The old or the new content, never a part; the next writing is whole."""
    require(outcome is None or outcome["code"] in (Exit.DONE, Exit.IO) or outcome["type"] == "OSError",
            f"ends with {outcome}")
    require((run / "status.json").read_text() in ("old" * 9999, "new" * 9999),
            "status.json is neither the old nor the new one")
    write_atomically(run / "status.json", "newer")
    require(((run / "status.json").read_text(), leftovers(run)) == ("newer", []), "the next writing is not whole")


def require(is_so: bool, otherwise: str) -> None:
    """Raise ValueError, saying what is, unless it is so."""
    if not is_so:
        raise ValueError(otherwise)


JOBS = {
    "first save": Job(lambda run: run.mkdir(), lambda run: save(run, 4), check_save),
    "save": Job(prepare_three, lambda run: save(run, 4), check_save),
    "save after kills": Job(prepare_after_kills, lambda run: save(run, 4), check_save),
    "save after an evaluation": Job(prepare_unevaluated, lambda run: save(run, 4), check_evaluated),
    "start": Job(prepare_damaged,
                 lambda run: CheckpointFolder(run / "checkpoints", 1, say_nothing).newest_valid(), check_start),
    "status.json": Job(lambda run: (run.mkdir(), write_atomically(run / "status.json", "old" * 9999)),
                       lambda run: write_atomically(run / "status.json", "new" * 9999), check_status),
}


# --- points


@dataclass
class Row:
    """What came of the points of one kind."""

    job: str
    fault: str
    call: str
    calls: int  # that the undisturbed job makes
    points: int = 0
    bad: list[str] = field(default_factory=list)


class Sweep:
    """Runs a job again and again in children of this process."""

    def __init__(self, name: str, folder: Path):
        self.job, self.name, self._folder = JOBS[name], name, folder / name.replace(" ", "-")
        self._before, self._run, self._log = (self._folder / part for part in ("before", "run", "strace"))
        self._folder.mkdir()
        self._said = mmap.mmap(-1, 1 << 16)  # a child tells its outcome without a system call
        prepare_three(self._folder / "warm")  # so that all that is imported late is there
        self.job.prepare(self._before)
        join_threads()
        self.lines = self._counted()
        self.calls = self._most_of_one_thread()

    def rows(self, fault: str) -> list[tuple[Row, list[int]]]:
        """A row for each kind of call that can have the fault, and its points."""
        return [(Row(self.name, fault, call, count), list(range(1, count + 1)))
                for call, count in sorted(self.calls.items())
                if fault == "SIGKILL" or fault.rstrip("+") in ERRORS.get(call, ())]

    def survives_beyond(self, call: str) -> bool:
        """Whether there is no further call of this kind: the counting run missed none."""
        status, _ = self._traced(f"trace={call}", f"inject={call}:signal=SIGKILL:when={self.calls[call] + 1}")
        return status == 0

    def try_point(self, row: Row, number: int) -> None:
        """Let the fault happen at the number-th call; what is bad about what is left goes to row.bad."""
        action = "signal=SIGKILL" if row.fault == "SIGKILL" else f"error={row.fault.rstrip('+')}"
        every = "+" if row.fault.endswith("+") else ""  # from there on
        status, outcome = self._traced(f"trace={row.call}", f"inject={row.call}:{action}:when={number}{every}")
        row.points += 1
        try:
            if row.fault == "SIGKILL":
                require(os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL,
                        f"it was not killed: {status}, {outcome}")
            else:
                require("(INJECTED)" in self._log.read_text() and status == 0,
                        f"no fault happened: {status}, {outcome}")
            self.job.check(self._run, None if row.fault == "SIGKILL" else outcome, row.call)
        except Exception as error:
            said = f" ({outcome['type']}: {outcome['text'][:200]})" if outcome and row.fault != "SIGKILL" else ""
            row.bad.append(f"{self.name}, {row.fault} at {row.call} {number}{every}:"
                           f" {type(error).__name__}: {error}{said}")
        join_threads()

    def _counted(self) -> list[str]:
        """The calls of an undisturbed job: "process call(arguments) = result"."""
        status, outcome = self._traced("trace=%file,%desc", "trace=%file,%desc", "-y", "-s", "0")
        require(status == 0 and outcome["code"] == Exit.DONE, f"{self.name} does not work undisturbed: {outcome}")
        lines = [line for line in self._log.read_text().splitlines() if not re.search(r"resumed>|^\d+ +[+-]{3} ", line)]
        return [line for line in lines if _call(line) not in QUIET]

    def _most_of_one_thread(self) -> dict[str, int]:
        """Calls of each kind by the thread that writes. The others may only open files to read, and close them."""
        by_thread: dict[str, list[str]] = {}
        for line in self.lines:
            by_thread.setdefault(line.split()[0], []).append(line)
        writer = max(by_thread, key=lambda thread: len(by_thread[thread]))
        for thread, lines in by_thread.items():
            changing = [line for line in lines if _call(line) != "close" and "O_RDONLY" not in line]
            require(thread == writer or not changing, f"a second thread changes something: {changing}")
        return Counter(_call(line) for line in by_thread[writer])

    def _traced(self, *words: str) -> tuple[int, dict[str, Any]]:
        """Do the job in a new run directory in a child under strace with these expressions.

        Returns its wait status and outcome.
        """
        shutil.rmtree(self._run, ignore_errors=True)
        shutil.copytree(self._before, self._run)
        self._said[:4] = b"null"
        self._said[4:5] = b"\0"
        require(threading.active_count() == 1, "a child of several threads may hang")
        gate, release = os.pipe()
        if (child := os.fork()) == 0:
            os.read(gate, 1)
            self._work()
        expressions = [part for word in words for part in (["-e", word] if "=" in word else [word])]
        tracer = subprocess.Popen(["strace", "-f", "-o", str(self._log), *expressions, "-p", str(child)],
                                  stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            attached = tracer.stderr.readline()
            require("attached" in attached, f"cannot trace: {attached}")
            os.write(release, b"x")
            tracer.communicate(timeout=LIMIT_S)
        except BaseException:
            tracer.kill()
            tracer.communicate()
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise
        finally:
            os.close(gate)
            os.close(release)
        status = os.waitpid(child, 0)[1]
        return status, json.loads(bytes(self._said[:]).partition(b"\0")[0])

    def _work(self) -> None:
        outcome = {"type": "", "code": int(Exit.DONE), "text": ""}
        try:
            self.job.work(self._run)
        except UserError as error:
            outcome = {"type": "UserError", "code": int(error.code), "text": str(error)}
        except BaseException as error:
            outcome = {"type": type(error).__name__, "code": None, "text": str(error)}
        said = json.dumps(outcome).encode()[:len(self._said) - 1]
        self._said[:len(said) + 1] = said + b"\0"
        os._exit(0)


def sweep(name: str, faults: list[str], every: int, folder: Path) -> tuple[list[Row], list[str]]:
    """Every so-many-th point of a job (all of a small one), and the calls of the undisturbed job."""
    swept = Sweep(name, folder)
    points = [(row, number) for fault in faults for row, numbers in swept.rows(fault) for number in numbers]
    for row, number in points[::every if len(points) > 50 else 1]:
        swept.try_point(row, number)
    rows = list({id(row): row for row, _ in points}.values())
    for row in rows if every == 1 else []:
        if row.fault == "SIGKILL" and not swept.survives_beyond(row.call):
            row.bad.append(f"{name}: there are more than {row.calls} calls of {row.call}")
    return rows, swept.lines


def unsynced(lines: list[str]) -> list[str]:
    """What a power failure could undo of that which a later call builds upon.

    By POSIX, contents and names last once they are fsynced. Before something gets its final name, all in it; before a
    checkpoint gets its name, RUN/model; before an old one loses its name, the new one.
    """
    unsafe: dict[str, str] = {}  # a file, or a folder whose entries changed: since which call
    found: list[str] = []
    for line in lines:
        call, text = _call(line), line.split(maxsplit=1)[1]
        names, opened = re.findall(r'"([^"]*)"', text), re.search(r"\(\d+<([^>]*)>", text)
        if " = -1 " in text:
            continue
        if call in ("write", "writev", "pwrite64", "ftruncate") and opened:
            unsafe[opened[1]] = text
        elif call in ("fsync", "fdatasync"):
            unsafe.pop(opened[1], None)
        elif (call == "openat" and "O_CREAT" in text) or call in ("mkdir", "mkdirat"):
            unsafe[names[-1]] = unsafe[os.path.dirname(names[-1])] = text
        elif call.startswith("rename"):
            source, target = names[0], names[-1]
            parent, name = os.path.split(target)
            moved = [path for path in unsafe if path == source or path.startswith(f"{source}/")]
            needed = [] if "/.tmp" in target else moved
            if name.startswith("step-") and os.path.dirname(parent) in unsafe:
                needed = [*moved, os.path.dirname(parent)]
            if name.startswith(".tmp-removed-") and "removed" not in unsafe.get(parent, "removed"):
                needed = [parent]
            found += [f"{path} is not fsynced ({unsafe[path]}) before {text}" for path in needed]
            for path in moved:
                unsafe[target + path[len(source):]] = unsafe.pop(path)
            unsafe[parent] = text
    return found


def join_threads() -> None:
    """Wait for the threads of savers that are gone: only a process of one thread may fork."""
    for thread in threading.enumerate():
        if thread is not threading.main_thread():
            thread.join()


def can_trace() -> str | None:
    """Why no process can be traced here; None if one can."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    tracer = subprocess.Popen(["strace", "-o", os.devnull, "-p", str(child.pid)], stderr=subprocess.PIPE, text=True)
    said = tracer.stderr.readline()
    child.communicate()
    tracer.communicate()
    return None if "attached" in said else f"strace: {said.strip()}"


def _call(line: str) -> str:
    return line.split(maxsplit=1)[1].partition("(")[0]


def main() -> None:
    """Sweep, print, leave with 1 if an outcome is bad."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--every", type=int, default=1, help="of the points, try every so-many-th")
    parser.add_argument("--job", action="append", choices=JOBS, help="only these")
    parser.add_argument("--faults", default=",".join(FAULTS), help="+: from that call on")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="sweep-saves-", dir=memory if os.access(memory, os.W_OK) else None))
    began, rows, not_synced = time.monotonic(), [], []
    try:
        for name in args.job or JOBS:
            swept, lines = sweep(name, args.faults.split(","), args.every, folder)
            rows += swept
            not_synced += [f"{name}: {problem}" for problem in unsynced(lines)]
    finally:
        shutil.rmtree(folder)
    seconds, bad = time.monotonic() - began, [text for row in rows for text in row.bad]
    if args.json:
        print(json.dumps({"rows": [asdict(row) for row in rows], "unsynced": not_synced, "seconds": seconds}))
        return
    print(f"{'job':<17} {'fault':<8} {'call':<10} {'calls':>6} {'points':>6} {'bad':>4}")
    for row in rows:
        print(f"{row.job:<17} {row.fault:<8} {row.call:<10} {row.calls:>6} {row.points:>6} {len(row.bad):>4}")
    print("\n".join(["", *bad, *not_synced]))
    killed = sum(row.points for row in rows if row.fault == "SIGKILL")
    print(f"{killed} kills, {sum(row.points for row in rows) - killed} errors, {len(bad)} bad outcomes,"
          f" {len(not_synced)} things not fsynced in time; {seconds:.0f} s")
    sys.exit(bool(bad or not_synced))


if __name__ == "__main__":
    main()
