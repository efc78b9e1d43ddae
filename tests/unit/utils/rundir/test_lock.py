"""utils/rundir/lock.py: one start at a time writes in a run directory."""

import errno
import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.utils.conftest import refusal, start, status
from utils.errors import Exit
from utils.rundir import lock as lock_module

ROOT = Path(__file__).parents[4]
pytestmark = pytest.mark.usefixtures("first_start_in_a_new_folder")


@pytest.fixture
def another_process(world):
    """Hold the lock of run/ in another process. then: what that process does when it gets a line."""
    start(world, "--run-dir=run")
    processes = []

    def hold(then="pass"):
        program = ("import sys, time; from pathlib import Path; from utils.rundir.lock import RunLock;"
                   "run, lock = Path(sys.argv[1]), RunLock(); lock.acquire(run);"
                   f"print('held', flush=True); sys.stdin.readline(); {then}")
        processes.append(subprocess.Popen([sys.executable, "-c", program, Path("run").resolve()], cwd=ROOT,
                                          stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0))
        assert processes[-1].stdout.readline() == b"held\n"
        return processes[-1]
    yield hold
    for process in processes:
        process.kill()
        process.communicate()


def test_who_asks_whether_a_run_is_in_use_changes_nothing(another_process):
    answers = [lock_module.is_locked(Path("run")), lock_module.is_locked(Path("none"))]
    holder = another_process()
    held = Path("run/.lock").read_text()
    answers.append(lock_module.is_locked(Path("run")))
    holder.kill()
    holder.wait()
    assert [*answers, lock_module.is_locked(Path("run"))] == [False, False, True, False]
    assert Path("run/.lock").read_text() == held


def test_a_run_in_use_is_78_and_names_its_holder(world, another_process):
    holder = another_process()
    error = refusal(world, "--run-dir=run")
    assert (error.code, f"run is in use by process {holder.pid} on " in str(error)) == (Exit.OTHER_RUN, True)


def test_a_run_in_use_is_not_moved_by_fresh(world, another_process):
    another_process()
    refusal(world, "--run-dir=run", "--fresh")
    assert not Path(".old").exists()


def test_a_start_waits_for_one_that_is_exiting(world, another_process, monkeypatch):
    monkeypatch.setattr(lock_module, "LOCK_WAIT_S", 30)
    holder, lockf, attempts = another_process(), fcntl.lockf, []

    def lock(file, how):
        if len(attempts) == 1:  # the first attempt has failed
            holder.stdin.write(b"\n")
        attempts.append(how)
        lockf(file, how)
    monkeypatch.setattr(lock_module.fcntl, "lockf", lock)
    assert (start(world, "--run-dir=run"), len(attempts) > 1) == ([], True)


@pytest.mark.rows(1)
@pytest.mark.parametrize("words", [[], ["--fresh"]])
def test_a_start_that_waits_also_waits_for_a_fresh_one(world, another_process, monkeypatch, words):
    """The other start moves the run away and locks the new directory."""
    monkeypatch.setattr(lock_module, "LOCK_WAIT_S", 2)
    holder = another_process("run.rename(run.with_name('moved')); new = RunLock(); new.acquire(run); lock.close();"
                             " time.sleep(60)")
    lockf, first = fcntl.lockf, [True]

    def lock(file, how):
        if first:  # the file is being moved; wait for it, and get it in the end
            first.clear()
            holder.stdin.write(b"\n")
            how = fcntl.LOCK_EX
        lockf(file, how)
    monkeypatch.setattr(lock_module.fcntl, "lockf", lock)
    error = refusal(world, "--run-dir=run", *words)
    assert (error.code, f"run is in use by process {holder.pid} on " in str(error)) == (Exit.OTHER_RUN, True)


def test_a_file_system_without_locks_ends_no_run(world, monkeypatch):
    def refuse(file, how):
        raise OSError(errno.ENOSYS, "Function not implemented")  # what Lustre mounted without flock answers

    monkeypatch.setattr(lock_module.fcntl, "lockf", refuse)
    [note] = start(world, "--run-dir=run")
    assert "has no locks (Function not implemented)" in note


def test_a_clean_up_that_is_cut_short_leaves_nothing_that_is_refused(tmp_path, monkeypatch):
    """Without auto.json, results would count as another program's."""
    lock, order = lock_module.RunLock(), []
    lock.acquire(tmp_path)
    for name in ("auto.json", "config.yaml", "metrics.jsonl"):
        (tmp_path / name).touch()
    unlink = Path.unlink
    monkeypatch.setattr(Path, "unlink", lambda path, **more: order.append(path.name) or unlink(path, **more))
    assert lock.discard()
    assert order[-2:] == ["auto.json", ".lock"] and set(order[:2]) == {"config.yaml", "metrics.jsonl"}


def test_a_killed_holder_leaves_no_lock(world, another_process):
    another_process().kill()
    assert start(world, "--run-dir=run") == []


def test_a_run_that_was_closed_can_be_opened_by_another_process(world, another_process):
    another_process()


def test_eval_only_takes_no_lock_and_writes_nothing(world, another_process):
    another_process()
    before = sorted(Path("run").iterdir()), status()
    start(world, "--run-dir=run", "--eval-only")
    assert (sorted(Path("run").iterdir()), status()) == before
