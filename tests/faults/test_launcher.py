"""launch.sh under signals and restarts: what it is sent reaches the run, and its code is the run's."""

import os
import re
import signal

import pytest

from tests.harness.launches import WORDS
from tests.harness.run_directory import outcome, status, trained_steps
from utils.errors import Exit


@pytest.mark.long
def test_signals_to_the_launcher_stop_the_run_and_a_good_restart_is_a_0(start_launcher, photos, run_dir, undisturbed):
    words = ["--nproc-per-node", 2, *WORDS, "--data", photos, "--run-dir", run_dir, "--save-every", 1]
    early = start_launcher(*words)
    early.wait_for(lambda: any("torchrun.py" in command for command in early.commands()), "torchrun")
    early.process.send_signal(signal.SIGINT)
    result = early.wait(40)
    assert result.returncode in (128 + signal.SIGINT, Exit.STOPPED), result.text
    assert not run_dir.exists()

    for number, step, code in ((signal.SIGINT, 1, Exit.STOPPED), (signal.SIGTERM, 3, 128 + signal.SIGTERM)):
        live = start_launcher(*words)
        live.wait_for(lambda least=step: trained_steps(run_dir) >= least, "a step")
        live.process.send_signal(number)
        result = live.wait()
        assert (result.returncode, status(run_dir)["state"]) == (code, "stopped"), result.text

    restarting, before = start_launcher("--max-restarts", 1, *words), status(run_dir)["step"]
    restarting.wait_for(lambda: trained_steps(run_dir) > before, "a step")
    os.kill(restarting.rank(1), signal.SIGKILL)
    result = restarting.wait()
    assert result.returncode == 0, result.text
    assert "lost its peers" in result.err
    assert outcome(run_dir) == outcome(undisturbed)


def test_a_slurm_job_out_of_time_before_its_run_began_is_requeued(start_launcher, run_dir):
    folder = run_dir.parent
    (folder / "scontrol").write_text(f'#!/bin/sh\necho "$@" >{folder}/asked\n')
    (folder / "scontrol").chmod(0o755)
    slurm = {"SLURM_JOB_ID": "7", "PATH": f"{folder}:{os.environ['PATH']}"}
    early = start_launcher("--nproc-per-node", 2, "--run-dir", run_dir, env=slurm)
    early.wait_for(lambda: any("torchrun.py" in command for command in early.commands()), "torchrun")
    early.process.send_signal(signal.SIGUSR1)
    result = early.wait(40)
    assert (result.returncode != 0, (folder / "asked").read_text()) == (True, "requeue 7\n"), result.text
    assert "job 7 goes back into the queue" in result.err and not run_dir.exists()


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_fresh_acts_at_the_first_start_of_a_launch_only(start_launcher, photos, run_dir, processes):
    words = ["--nproc-per-node", processes, "--retries", 2, "--fresh", *WORDS, "--data", photos, "--run-dir", run_dir]
    moved_aside = run_dir.parent / ".old"
    for old_runs in (0, 1):  # a second --fresh by hand starts over
        live = start_launcher(*words, "--save-every", 1)
        live.wait_for(lambda number=old_runs: len([*moved_aside.glob("*")]) == number, "a new run directory")
        live.wait_for(lambda: trained_steps(run_dir) > 2, "a step")
        children = [pid for pid, parent in live.parents().items() if parent == live.process.pid]
        os.kill(children[0] if processes == 1 else live.rank(1), signal.SIGKILL)
        result = live.wait()
        assert result.returncode == 0, result.text
        assert "retry 1 of 2" in result.err and re.search(r"resumed at step [1-9]", result.out), result.text
        assert (status(run_dir)["start"], len([*moved_aside.glob("*")])) == (2, old_runs), result.text
