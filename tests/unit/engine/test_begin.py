"""engine/begin.py: the first moments of a start."""

import subprocess
import sys
from pathlib import Path

import pytest

from utils.errors import Exit

ROOT = Path(__file__).parents[3]
# Python as another system has it: without what only Linux, or only Unix, has
ELSEWHERE = """
import os, runpy, signal, sys
sys.platform, sys.path[0] = sys.argv.pop(1), os.getcwd()
del os.sched_getaffinity, signal.SIGUSR1, signal.SIGHUP, signal.pthread_sigmask
sys.modules |= dict.fromkeys(("fcntl", "resource"))
runpy.run_path("train.py", run_name="__main__")
"""


@pytest.mark.parametrize("system", ["darwin", "win32"])
@pytest.mark.parametrize("rank", ["0", "1"])
def test_another_system_than_linux_is_refused_in_one_line(system, rank):
    done = subprocess.run([sys.executable, "-c", ELSEWHERE, system, "--help"], cwd=ROOT, capture_output=True, text=True,
                          env={"LOCAL_RANK": rank})
    lines = [f"train.py: this system is {system}, and train.py needs Linux: use a Linux machine, a container"
             " (Dockerfile), or WSL 2 on Windows\n"]
    assert (done.returncode, done.stdout, done.stderr) == (Exit.USAGE, "", lines[0] if rank == "0" else "")


def test_a_python_that_is_too_old_is_refused_in_one_line():
    older = ("import os, runpy, sys; sys.version_info, sys.path[0] = (3, 10, 14), os.getcwd();"
             " runpy.run_path('train.py', run_name='__main__')")
    done = subprocess.run([sys.executable, "-c", older], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (Exit.USAGE, "")
    [line] = done.stderr.splitlines()
    assert line.startswith("train.py: this is Python 3.") and "needs 3.11 or newer" in line


def test_what_is_written_to_a_closed_console_goes_into_no_file(tmp_path):
    work = ("import os; from engine.begin import begin_process; begin_process(); file = open(os.sys.argv[1], 'w');"
            " print('out'); os.write(1, b'1'); os.write(2, b'2'); file.write('kept');"
            " os.sys.exit(os.system('echo 3') > 0)")  # what it starts can write there, too
    command = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", sys.executable, "-c", work, tmp_path / "file"]
    assert subprocess.run(command, cwd=ROOT).returncode == 0
    assert (tmp_path / "file").read_text() == "kept"
