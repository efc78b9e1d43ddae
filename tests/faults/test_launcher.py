"""launch.sh under signals and restarts: what it is sent reaches the run, and its code is the run's."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.conftest import LIMIT_S, ROOT
from tests.faults.launches import WORDS
from tests.run_directory import outcome, status, trained_steps
from utils.errors import Exit


@pytest.fixture
def launch_sh(run_dir, photos, session_dir):
    """launch_sh(**environment): the script under way on two processes."""
    launches = []

    def start(**environment):
        words = ["./launch.sh", *map(str, [*WORDS, "--data", photos, "--run-dir", run_dir, "--save-every", 1])]
        inherited = os.environ | {"NPROC_PER_NODE": "2", "LOCKSTEP_CACHE": str(session_dir / "cache")}
        launches.append(subprocess.Popen(words, cwd=ROOT, env=inherited | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                         text=True, start_new_session=True))
        return launches[-1]

    yield start
    for launch in launches:
        if launch.poll() is None:
            launch.terminate()
        launch.communicate()


def reach(launch, run, step):
    """Wait until this many steps are on record."""
    deadline = time.monotonic() + LIMIT_S
    while trained_steps(run) < step:
        assert launch.poll() is None and time.monotonic() < deadline, launch.communicate()[0]
        time.sleep(0.005)


def children(pid):
    """Process ids of a process's children."""
    return [int(word) for task in Path(f"/proc/{pid}/task").iterdir() for word in read(task / "children").split()]


def read(path):
    """The text of a file of a process, which may have ended."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def test_what_the_launcher_is_sent_stops_the_run_and_a_restart_that_ends_well_is_a_0(launch_sh, run_dir, undisturbed):
    early = launch_sh()
    while not any("torch.distributed.run" in read(f"/proc/{pid}/cmdline") for pid in children(early.pid)):
        assert early.poll() is None, early.communicate()[0]
    early.send_signal(signal.SIGINT)
    assert early.wait(LIMIT_S / 6) in (128 + signal.SIGINT, Exit.STOPPED)
    assert not run_dir.exists()

    for number, step in ((signal.SIGINT, 1), (signal.SIGTERM, 3)):
        live = launch_sh()
        reach(live, run_dir, step)
        live.send_signal(number)
        out, _ = live.communicate(timeout=LIMIT_S)
        assert (live.returncode, status(run_dir)["state"]) == (Exit.STOPPED, "stopped"), out

    restarting = launch_sh(PET_MAX_RESTARTS="1")
    reach(restarting, run_dir, status(run_dir)["step"] + 1)
    [torchrun] = [pid for pid in children(restarting.pid) if len(children(pid)) == 2]
    os.kill(children(torchrun)[1], signal.SIGKILL)
    out, _ = restarting.communicate(timeout=LIMIT_S)
    assert restarting.returncode == 0, out
    assert "lost its peers" in out
    assert outcome(run_dir) == outcome(undisturbed)
