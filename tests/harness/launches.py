"""What the tests of faults share: the run that all disturb, what is asked of every end, how a moment is held.

    launch = start_torchrun(2, *WORDS, "--data", photos, "--run-dir", run)    # nine steps, three an epoch
    ...                                                                       # a fault
    assert_failed(launch, run, Exit.LOST_PEERS, "lost its peers")
    assert_as_undisturbed(run_torchrun(2, ...), run, undisturbed)             # the same command, to its end
"""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from data.sampler import epoch_order
from tests.conftest import COUNTS, Launch, Result
from tests.harness.run_directory import curves, newest_checkpoint, outcome, records, status, trained_steps
from utils.errors import SIGNALS, Exit
from utils.rundir.checkpoint_folder import find_damage, step_of

# Steps of 24, 17 and 16 samples in six micro-batches.
WORDS = ["--model", "mobilenet_v3_small", "--image-size", "32", "--global-batch-size", "24", "--micro-batch-size", "4",
         "--epochs", "3", "--threads", "1", "--precision", "bf16", "--log-every", "1"]
NUM_TRAIN, EPOCHS, STEPS_PER_EPOCH, STEPS = sum(COUNTS["train"]), 3, 3, 9
MICRO_BATCHES, BOUNDS = 6, (0, 24, 41, 57)  # of an epoch's global batches
LEFT_S = 5  # in which all processes must be gone
OWN_STACK = 'train.py", line '  # in a traceback of ours; torchrun's own report is one of torchrun's
SHARED_MEMORY = Path("/dev/shm")
LEFT_BEFORE = {path.name for path in SHARED_MEMORY.glob("torch_*")}  # by what was killed before these tests


def assert_failed(launch: Launch, run: Path, code: Exit, *parts: str, says: str = "failed", has_stacks: bool = False,
                  within_s: float = 60) -> Result:
    """It ends with `code` and exactly one message over all ranks, which has all `parts`; nothing is left.

    says: state in status.json; "running" = rank 0 was killed and could not write. has_stacks: where the main thread
    stood is shown too. within_s: from now on.
    """
    result = assert_gone(launch, run, within_s)
    assert result.code == code, result.text
    assert len(messages(result)) == 1, result.text
    assert all(part in messages(result)[0] for part in parts), f"{messages(result)[0]}\nlacks one of {parts}"
    assert (OWN_STACK in result.err) == has_stacks, result.text
    if not run.exists():
        return result  # it failed before its first step
    found = status(run)
    assert (found["state"], found["exit_code"]) == (says, None if says == "running" else code), found
    return result


def assert_stopped(launch: Launch, run: Path, reason: str, within_s: float = 60) -> int:
    """It saves after the step that it was in, says so once and ends with 75; nothing is left. Returns the step."""
    result = assert_gone(launch, run, within_s)
    found = status(run)
    assert (result.code, found["state"], found["exit_code"], found["message"]) == (
        Exit.STOPPED, "stopped", Exit.STOPPED, reason), (found, result.text)
    assert not messages(result), result.text
    assert OWN_STACK not in result.err, result.text
    assert result.out.count(
        f"stopped at step {found['step']} ({reason}) and saved; the same command continues") == 1, result.text
    assert step_of(newest_checkpoint(run).name) == found["step"] == trained_steps(run)
    return found["step"]


def assert_gone(launch: Launch, run: Path, within_s: float = 60) -> Result:
    """The launch ends; of its processes and their shared memory nothing is left, and every checkpoint is valid."""
    result = launch.wait(within_s)
    assert_no_process(launch)
    assert not orphaned_memory(), result.text
    assert {path.name: find_damage(path) for path in (run / "checkpoints").glob("step-*") if find_damage(path)} == {}
    return result


def assert_no_process(launch: Launch, within_s: float = LEFT_S) -> None:
    """Soon no process of the launch is left."""
    deadline = time.monotonic() + within_s
    while left := launch._processes():
        if time.monotonic() > deadline:
            names = {pid: Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") for pid in left}
            launch.kill_all()
            pytest.fail(f"left behind: {names}\n{launch._result().text}")
        time.sleep(0.01)


def assert_as_undisturbed(result: Result, run: Path, undisturbed: Path) -> None:
    """The run is finished: every sample once per epoch, nothing unfinished about, and all as in the undisturbed run."""
    assert result.returncode == 0, result.text
    assert status(run)["state"] == "finished"
    assert not list(run.rglob(".tmp-*"))
    assert trained(run) == [NUM_TRAIN] * EPOCHS
    assert outcome(run) == outcome(undisturbed)
    assert curves(run) == curves(undisturbed)


def trained(run: Path) -> list[int]:
    """Of each epoch that is over, how many different samples it trained on."""
    return [record["trained"] for record in records(run) if record["split"] == "epoch"]


def messages(result: Result) -> list[str]:
    """What the ranks said on the way out, a line each."""
    return [line for line in (result.out + result.err).splitlines() if line.startswith("train.py: ")]


def orphaned_memory() -> list[str]:
    """Tensors that data loading left in /dev/shm: torch_PID_..., where there is no such process any more.

    An empty one may be left of a process that was killed as it made it, between torch's shm_open and its ftruncate.
    """
    names = {path.name for path in SHARED_MEMORY.glob("torch_*") if path.stat().st_size} - LEFT_BEFORE
    return [name for name in names if not Path(f"/proc/{name.split('_')[1]}").exists()]


def is_watched(pid: int) -> bool:
    """Whether a rank has come so far that signals are its watchdog's business: it blocks them."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    blocked = int(next(line for line in lines if line.startswith("SigBlk:")).split()[1], 16)
    return all(blocked >> (number - 1) & 1 for number in SIGNALS)


def has_passed_on(launch: Launch, name: str) -> bool:
    """Whether torchrun has passed signal `name` on to both ranks."""
    return launch._err.read_text().count(f"closing signal {name}") == 2


def image_of(root: Path, split: str, index: int) -> Path:
    """The image with this index in its split."""
    return sorted((root / split).glob("*/*.png"))[index]


def sample_of(rank: int, step: int, place: int = 0) -> int:
    """Index of a training sample that `rank` of two reads for optimizer step `step` (1 to 3)."""
    positions = [position for position in range(*BOUNDS[step - 1:step + 1]) if position % MICRO_BATCHES % 2 == rank]
    return int(epoch_order(0, 0, NUM_TRAIN)[positions[place]])


class HeldImage:
    """An image in whose place stands a FIFO: who reads it waits until it is given, and the test knows that he does.

    It has a JPEG's name: other files are read at the start of a run, to see how many bits they have.
    """

    def __init__(self, image: Path):
        self.image, self._data, self._end = image.with_suffix(".jpg"), image.read_bytes(), None
        image.unlink()
        os.mkfifo(self.image)

    def is_wanted(self) -> bool:
        """Whether a process waits for it; from then on that process alone gets it."""
        if self._end is None:
            try:
                self._end = os.open(self.image, os.O_WRONLY | os.O_NONBLOCK)
            except OSError:  # ENXIO: nobody reads
                return False
        return True

    def give(self) -> None:
        """Let it be read: by the one who waits, and as a file from now on."""
        whole = self.image.with_name(".whole")
        whole.write_bytes(self._data)
        os.replace(whole, self.image)
        if self._end is not None:
            with suppress(BrokenPipeError):  # who waited is gone
                os.write(self._end, self._data)
            os.close(self._end)


@contextmanager
def traced(pid: int, folder: Path, injection: str) -> Iterator[None]:
    """strace holds a process and its threads, and spoils system calls: "fsync:error=EIO". Skips where it may not."""
    if shutil.which("strace") is None:
        pytest.skip("needs strace")
    log = folder / "strace"
    with log.open("w") as file:
        tracer = subprocess.Popen(
            ["strace", "-f", "-qq", "-e", "trace=fsync", "-e", f"inject={injection}", "-p", str(pid)], stderr=file)
    try:
        deadline = time.monotonic() + 20
        while f"TracerPid:\t{tracer.pid}" not in Path(f"/proc/{pid}/status").read_text():
            if tracer.poll() is not None:
                pytest.skip(f"strace: {log.read_text()}")
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.01)
        yield
    finally:
        tracer.send_signal(signal.SIGINT)  # it detaches
        tracer.wait(10)
