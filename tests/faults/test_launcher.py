"""launch.sh under signals and restarts: what it is sent reaches the run, and its code is the run's."""

import os
import signal

from tests.faults.launches import WORDS
from tests.run_directory import outcome, status, trained_steps
from utils.errors import Exit


def test_what_the_launcher_is_sent_stops_the_run_and_a_restart_that_ends_well_is_a_0(start_launcher, photos, run_dir, undisturbed):
    words = ["--nproc-per-node", 2, *WORDS, "--data", photos, "--run-dir", run_dir, "--save-every", 1]
    early = start_launcher(*words)
    early.wait_for(lambda: any("torch.distributed.run" in command for command in early.commands()), "torchrun")
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


def test_a_job_of_slurm_whose_time_is_over_before_its_run_began_goes_back_into_the_queue(start_launcher, run_dir):
    folder = run_dir.parent
    (folder / "scontrol").write_text(f'#!/bin/sh\necho "$@" >{folder}/asked\n')
    (folder / "scontrol").chmod(0o755)
    slurm = {"SLURM_JOB_ID": "7", "PATH": f"{folder}:{os.environ['PATH']}"}
    early = start_launcher("--nproc-per-node", 2, "--run-dir", run_dir, env=slurm)
    early.wait_for(lambda: any("torch.distributed.run" in command for command in early.commands()), "torchrun")
    early.process.send_signal(signal.SIGUSR1)
    result = early.wait(40)
    assert (result.returncode != 0, (folder / "asked").read_text()) == (True, "requeue 7\n"), result.text
    assert "job 7 goes back into the queue" in result.err and not run_dir.exists()
