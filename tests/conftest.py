"""Launches for tests: `python train.py` and torchrun, in processes of their own that never outlive the test.

    result = run_torchrun(2, "--data", data, ...)        # waits; result.code is the code that launch.sh would give
    launch = start_torchrun(2, ...)                      # live: launch.rank(1) is a process id; launch.kill_all()

    launch = start_launcher("--nproc-per-node", 2, ...)  # the same by launch.sh

Every process of a launch carries its folder in its environment or writes there, and is found by it: torchrun gives its
workers sessions of their own, so a process group would not do.

train.py alone, torchrun and its ranks are forks of a process that has imported torch (tests/harness/forked.py). What a
fork would not show starts for real: real=True, `command`, or an environment that libraries read when they are imported.
"""

import contextlib
import csv
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.harness.forked import Forked, forking_torchrun_main, script_main, torchrun_main

ROOT = Path(__file__).parent.parent
LIMIT_S = 240  # of one launch
# Under nohup, or in a shell's background, launches would inherit that they are ignored.
for number in (signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
TORCHRUN = ("--standalone", "--local-addr=127.0.0.1")  # a free port, and no name resolution
READ_WHEN_USED = {"LOCKSTEP_CACHE", "LOCKSTEP_SCRIPT", "NAN_SAMPLES", "FAULT"}  # by train.py or a test's script
COUNTS = {"train": (17, 19, 21), "val": (40, 47, 60)}  # images per class: sizes that divide nothing


def pytest_addoption(parser: pytest.Parser) -> None:
    """Here and not in tests/device, whose conftest.py is read after the command line."""
    parser.addoption("--device", help="of tests/device: sim, or a real one (cuda); default: sim, where it can be made")


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test that is marked rows(n), all rows are long but the first n that are not slow."""
    num_rows: Counter[tuple[Path, str]] = Counter()
    for item in items:
        marker = item.get_closest_marker("rows")
        if marker and not item.get_closest_marker("slow"):
            num_rows[item.path, item.originalname] += 1
            if num_rows[item.path, item.originalname] > marker.args[0]:
                item.add_marker("long")


@dataclass(frozen=True)
class Result:
    """What a launch left."""

    returncode: int  # of the process that was started; torchrun's is 1 for any failure of a worker
    code: int  # of the first worker that ended abnormally, by LOCKSTEP_EXIT_FILE; else 0
    out: str
    err: str
    seconds: float

    @property
    def text(self) -> str:
        """Everything, for the message of a failed assertion."""
        return f"returncode {self.returncode}, code {self.code}\n{self.out}\n{self.err}"


class Launch:
    """A live launch of a command or, by `program`, of a fork with these words; all that it started."""

    def __init__(self, program: Callable[[list[str]], None] | None, words: list[str], environment: dict[str, str],
                 folder: Path):
        self.folder, self._exit_file, self._out, self._err = (
            folder, folder / "exit-code", folder / "out", folder / "err")
        self._mark = f"LOCKSTEP_TEST={folder}".encode()
        self._began = time.monotonic()
        self._out.touch()  # a forked one may be killed before it does
        self._err.touch()
        environment = environment | {"LOCKSTEP_TEST": str(folder), "LOCKSTEP_EXIT_FILE": str(self._exit_file)}
        if program:
            self.process = Forked(program, words, ROOT, environment, self._out, self._err)
            return
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process = subprocess.Popen(words, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL,
                                            stdout=out, stderr=err, start_new_session=True)

    def wait(self, limit_s: float = LIMIT_S) -> Result:
        """Its result, once it has ended."""
        try:
            self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self._show_stacks()
            self.kill_all()
            pytest.fail(f"still running after {limit_s} s\n{self._result().text}")
        except BaseException:
            self.kill_all()
            raise
        return self._result()

    def wait_for(self, is_so: Callable[[], bool], what: str, limit_s: float = LIMIT_S) -> None:
        """Look until something is so; the launch must live until then."""
        deadline = time.monotonic() + limit_s
        while not is_so():
            has_ended, is_late = self.process.poll() is not None, time.monotonic() > deadline
            if (has_ended and not is_so()) or is_late:
                self.kill_all()
                pytest.fail(f"{what}: {'it ended before' if has_ended else f'not within {limit_s} s'}\n"
                            f"{self._result().text}")
            time.sleep(0.005)

    def parents(self) -> dict[int, int]:
        """{process: its parent} of all that live: torchrun, its ranks, their data loading processes."""
        stats = {pid: _read(f"/proc/{pid}/stat").rpartition(b")")[2].split() for pid in self._processes()}
        return {pid: int(stat[1]) for pid, stat in stats.items() if stat and stat[0] != b"Z"}

    def commands(self) -> list[str]:
        """The command line of each, its words one after the other."""
        return [_read(f"/proc/{pid}/cmdline").replace(b"\0", b" ").decode() for pid in self._processes()]

    def rank(self, number: int) -> int:
        """Process id of a rank. Its data loading processes have its environment, too, but so has their parent."""
        parents = self.parents()
        ranks = {pid for pid in parents if _rank_of(pid) == number}
        return next(pid for pid in ranks if parents[pid] not in ranks)

    def kill_rank(self, number: int) -> None:
        """SIGKILL for one rank."""
        os.kill(self.rank(number), signal.SIGKILL)

    def _show_stacks(self) -> None:
        """Have ranks and data loading processes (else whatever lives) say on standard error where they are.

        SIGABRT ends a process, and faulthandler shows its stacks.
        """
        processes = self._processes()
        stuck = [pid for pid in processes if _rank_of(pid) is not None] or processes
        for pid in stuck:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGABRT)
        deadline = time.monotonic() + 10
        while set(stuck) & set(self._processes()) and time.monotonic() < deadline:
            time.sleep(0.005)

    def kill_all(self) -> None:
        """SIGKILL for torchrun, its workers and theirs."""
        while processes := self._processes():
            for number in (signal.SIGSTOP, signal.SIGKILL):  # else a worker may save as torchrun is gone already
                for pid in processes:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
            self.process.poll()
            time.sleep(0.005)  # until they are gone
        self.process.wait()

    def _processes(self) -> list[int]:
        names = [name for name in os.listdir("/proc") if name.isdigit()]
        own = [self.process.pid] if self.process.poll() is None else []
        return own + [pid for pid in map(int, names) if self._is_ours(pid) and pid not in own]

    def _is_ours(self, pid: int) -> bool:
        if self._mark in _read(f"/proc/{pid}/environ").split(b"\0"):
            return True
        with contextlib.suppress(OSError):  # what a fork forks has its parent's environment there, and our output
            return os.readlink(f"/proc/{pid}/fd/1") == str(self._out)
        return False

    def _result(self) -> Result:
        code = int(self._exit_file.read_text()) if self._exit_file.exists() else 0
        out, err = (file.read_text(errors="replace") for file in (self._out, self._err))
        return Result(self.process.returncode, code, out, err, time.monotonic() - self._began)


def _rank_of(pid: int) -> int | None:
    """Of a rank or what it has forked."""
    found = (re.match(rb"rank(\d+)\n", _read(f"/proc/{pid}/comm"))  # a fork's environment is its parent's there
             or re.search(rb"\0RANK=(\d+)\0", _read(f"/proc/{pid}/environ")))
    return int(found[1]) if found else None


def _read(path: str) -> bytes:
    with contextlib.suppress(OSError):  # it has ended, or is another user's
        return Path(path).read_bytes()
    return b""


@pytest.fixture(scope="session")
def session_dir() -> Iterator[Path]:
    """A folder for the whole session, in memory where that has room: many checkpoints are synced to disk."""
    memory = Path("/dev/shm")
    has_room = os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 4 * 2**30
    folder = Path(tempfile.mkdtemp(prefix="lockstep-tests-", dir=memory if has_room else None))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def run_dir(session_dir) -> Iterator[Path]:
    """A run directory that does not exist yet."""
    folder = Path(tempfile.mkdtemp(prefix="test-", dir=session_dir))
    yield folder / "run"
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def launch(session_dir) -> Iterator[Callable[..., Launch]]:
    """Start a script with words. processes: None = directly, else under torchrun, with its flags in `torchrun`.

    command: what is started instead, with the words. real: the processes that train are no forks.
    """
    launches: list[Launch] = []
    inherited = {name: value for name, value in os.environ.items()
                 if not name.startswith(("LOCKSTEP", "TORCHELASTIC", "PET_", "GLOO_SOCKET"))
                 and "RANK" not in name and "WORLD_SIZE" not in name}
    inherited |= {"LOCKSTEP_CACHE": str(session_dir / "cache"), "LOCKSTEP_PYTHON": sys.executable,
                  "OMP_NUM_THREADS": "1",
                  "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}

    def start(processes: int | None, *words: object, env: dict[str, str] | None = None, script: str = "train.py",
              torchrun: tuple[str, ...] = (), command: tuple[object, ...] = (), real: bool = False) -> Launch:
        is_real = real or command or script == "-m" or not set(env or {}) <= READ_WHEN_USED
        if processes is not None:
            program = torchrun_main if is_real else forking_torchrun_main
            before = (*TORCHRUN, f"--nproc-per-node={processes}", *torchrun, script)
        else:
            program, before = (None, command or (sys.executable, script)) if is_real else (script_main, (script,))
        started = Launch(program, [str(word) for word in (*before, *words)], inherited | (env or {}),
                         Path(tempfile.mkdtemp(prefix="launch-", dir=session_dir)))
        launches.append(started)
        return started

    yield start
    for started in launches:
        started.kill_all()


@pytest.fixture(scope="session")
def run_torchrun(launch) -> Callable[..., Result]:
    """run_torchrun(processes, *words, env=None, script="train.py", torchrun=()): its Result, once it has ended."""
    return lambda processes, *words, **options: launch(processes, *words, **options).wait()


@pytest.fixture(scope="session")
def run_train(launch) -> Callable[..., Result]:
    """run_train(*words, env=None, script="train.py", real=False): one process without torchrun."""
    return lambda *words, **options: launch(None, *words, **options).wait()


@pytest.fixture
def start_torchrun(launch) -> Iterator[Callable[..., Launch]]:
    """A live launch; killed with all that it started when the test ends. processes=None: without torchrun."""
    started: list[Launch] = []

    def start(processes: int | None, *words: object, **options: object) -> Launch:
        started.append(launch(processes, *words, **options))
        return started[-1]

    yield start
    for live in started:
        live.kill_all()


@pytest.fixture
def start_launcher(start_torchrun) -> Callable[..., Launch]:
    """start_launcher(*words, inside=(), env=None): a live launch by launch.sh; inside: what starts it elsewhere."""
    return lambda *words, inside=(), **options: start_torchrun(
        None, *words, command=(*inside, ROOT / "launch.sh"), **options)


@pytest.fixture
def in_control_group() -> Iterator[Callable[..., list[str]]]:
    """in_control_group(cores, *words): the words as a command with a CPU quota, in a real control group.

    Skips where none can be made.
    """
    name, folders = f"lockstep-test-{os.getpid()}", []

    def command(cores: float, *words: object) -> list[str]:
        quota = f"{cores * 100_000:.0f}"
        for root, file, text in (("", "cpu.max", f"{quota} 100000"), ("cpu", "cpu.cfs_quota_us", quota)):
            with contextlib.suppress(OSError):
                folder = Path("/sys/fs/cgroup", root, name)
                if not folder.exists():
                    folder.mkdir()
                    folders.append(folder)
                if (folder / file).exists():  # else the controller is not there: it belongs to the other version
                    (folder / file).write_text(text)
                    return ["sh", "-c", f'echo $$ >{folder}/cgroup.procs && exec "$@"', "sh", *map(str, words)]
        pytest.skip("needs to be permitted control groups")

    yield command
    for folder in folders:
        folder.rmdir()


@pytest.fixture(scope="session")
def photos(session_dir) -> Path:
    """Noise of three tints, 16 px: 57 images to train on and 147 to evaluate. Read only: write_photos makes copies."""
    return write_photos(session_dir / "photos")


@pytest.fixture(scope="session")
def photo_tables(session_dir, photos) -> Path:
    """train.csv and val.csv about `photos`: image, mask (another photo), label, labels, brightness, number."""
    root = session_dir / "photo-tables"
    root.mkdir()
    for split, counts in COUNTS.items():
        paths = sorted((photos / split).rglob("*.png"))
        with (root / f"{split}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["image", "mask", "label", "labels", "brightness", "number"])
            for number, path in enumerate(paths):
                tint, light = path.parent.name, float(np.asarray(Image.open(path)).mean())
                names = [tint, *(["odd"] if number % 2 else [])]
                writer.writerow([os.path.relpath(each, root) for each in (path, paths[number - 1])]
                                + [tint, "|".join(names), light, number / 10])
        assert sum(counts) == len(paths)
    return root


@pytest.fixture(scope="session")
def text_tables(session_dir, texts) -> Path:
    """The rows of `texts` with the columns labels and length besides."""
    root = session_dir / "text-tables"
    root.mkdir()
    for split in COUNTS:
        rows = list(csv.DictReader((texts / f"{split}.csv").open(encoding="utf-8")))
        with (root / f"{split}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [*rows[0], "labels", "length"])
            writer.writeheader()
            for row in rows:
                length = len(row["text"].split())
                writer.writerow(row | {"length": length, "labels": row["label"] + "|long" * (length > 10)})
    return root


@pytest.fixture(scope="session")
def texts(session_dir) -> Path:
    """train.csv and val.csv with the columns text, more and label: as many samples as photos, of 3 to 20 words each."""
    return write_texts(session_dir / "texts")


@pytest.fixture(scope="session")
def data_of(photos, texts, photo_tables, text_tables) -> dict[str, Path]:
    """What to train on, by task."""
    return {"image-classification": photos, "tables": photo_tables, "text-classification": texts, "masked-lm": texts,
            "image-regression": photo_tables, "text-regression": text_tables}


def write_texts(root: Path) -> Path:
    """Write the texts under `root`, the same ones every time."""
    root.mkdir()
    generator = np.random.default_rng(0)
    words = ["".join(generator.choice(list("abcdefghij"), 4)) for _ in range(60)]
    for split, counts in COUNTS.items():
        with (root / f"{split}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["text", "more", "label"])
            for label, count in enumerate(counts):
                for _ in range(count):
                    chosen = generator.choice(words[20 * label:][:30], generator.integers(3, 21))
                    writer.writerow([" ".join(chosen), chosen[0], f"topic{label}"])
    return root


@pytest.fixture
def own_photos(run_dir) -> Path:
    """The same images in a folder that the test may spoil."""
    return write_photos(run_dir.parent / "photos")


def write_photos(root: Path) -> Path:
    """Write the images under `root`, the same ones every time."""
    generator = np.random.default_rng(0)
    for split, counts in COUNTS.items():
        for label, count in enumerate(counts):
            folder = root / split / f"tint{label}"
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = generator.integers(0, 160, (16, 16, 3))
                pixels[..., label] += 95
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number:03d}.png")
    return root


@pytest.fixture(scope="session")
def demo_run(session_dir, run_torchrun) -> tuple[Path, Result]:
    """Two epochs of the built-in digits on two processes, by a script that writes down every sample that is read."""
    run = session_dir / "demo"
    words = ["--run-dir", run, "--workers", "0", "--epochs", "2", "--log-every", "10"]
    result = run_torchrun(2, *words, script="tests/end_to_end/train_and_count.py")
    assert result.returncode == 0, result.text
    return run, result
