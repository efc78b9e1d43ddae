"""A real Slurm of two nodes, each a host of its own.

launch/slurm.sh is cancelled, submitted again, preempted, and requeued when its time is over.
"""

import os
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager

import pytest

from tests.conftest import LIMIT_S, ROOT
from tests.harness.hosts import hosts
from tests.harness.launches import WORDS
from tests.harness.run_directory import outcome, status, trained_steps

pytestmark = pytest.mark.slow
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(10.77.0.1)
SlurmUser=root
AuthInfo=socket={folder}/munge.sock,cred_expire=5
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmdSpoolDir={folder}/%n
StateSaveLocation={folder}/state
NodeName=n1 NodeHostname={host} NodeAddr=10.77.0.1 Port=17001
NodeName=n2 NodeHostname={host} NodeAddr=10.77.0.2 Port=17002
PartitionName=all Nodes=n1,n2 Default=YES State=UP PriorityTier=1
PartitionName=urgent Nodes=n1,n2 State=UP PriorityTier=2
"""


@contextmanager
def slurm(folder):
    """The cluster.

    slurm(folder)(*words) runs one of its commands on the first node, from `folder`, and returns what it prints.
    """
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        pytest.skip(f"needs Slurm (slurmctld, slurmd, slurm-client, munge): no {', '.join(missing)}")
    folder.mkdir()
    for name in ("state", "n1", "n2"):
        (folder / name).mkdir()
    (folder / "slurm.conf").write_text(CONFIGURATION.format(host=os.uname().nodename, folder=folder))
    (folder / "key").write_bytes(os.urandom(1024))
    (folder / "key").chmod(0o600)
    environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "LOCKSTEP_PYTHON": sys.executable,
                                "LOCKSTEP_CACHE": str(folder / "cache")}
    with ExitStack() as stack:
        nodes = stack.enter_context(hosts(2))

        def start(*words):
            with (folder / "daemons").open("a") as log:
                daemon = subprocess.Popen(words, env=environment, stdout=log, stderr=log)
            stack.callback(daemon.wait)
            stack.callback(daemon.terminate)

        def run(*words):
            return subprocess.run(nodes[0].inside(*words), cwd=folder, env=environment, check=True,
                                  capture_output=True, text=True).stdout

        start("munged", "--foreground", "--force", *(f"--{name}={folder / file}" for name, file in (
            ("socket", "munge.sock"), ("key-file", "key"), ("log-file", "munge.log"), ("pid-file", "munge.pid"),
            ("seed-file", "seed"))))
        start(*nodes[0].inside("slurmctld", "-D"))
        for number, node in enumerate(nodes, 1):
            start(*node.inside("slurmd", "-D", "-N", f"n{number}"))
        wait_for(lambda: "2   idle" in quietly(run, "sinfo"), (folder / "daemons").read_text)
        yield run


def quietly(run, *words):
    try:
        return run(*words)
    except subprocess.CalledProcessError:  # it is not up yet
        return ""


def wait_for(is_so, log):
    deadline = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < deadline, log()
        time.sleep(0.05)


def test_a_cancelled_preempted_and_requeued_job_ends_as_if_undisturbed(
        run_dir, photos, run_torchrun):
    words = [*map(str, WORDS), "--epochs", "20", "--data", str(photos), "--device", "cpu", "--save-every", "1000"]
    straight = run_dir.with_name("straight")
    assert run_torchrun(2, *words, "--run-dir", straight).returncode == 0

    folder = run_dir.with_name("slurm")
    with slurm(folder) as run:
        job_file = (ROOT / "launch" / "slurm.sh").read_text()
        (folder / "job.sh").write_text(job_file.replace("#SBATCH --gpus-per-node=8\n", ""))

        def submitted():
            job = run("sbatch", "--parsable", f"--chdir={ROOT}", f"--output={folder}/lockstep-%j.log", "job.sh", *words,
                      "--run-dir", run_dir).strip()
            return job, lambda: (folder / f"lockstep-{job}.log").read_text() + (folder / "daemons").read_text()

        job, log = submitted()
        wait_for(lambda: trained_steps(run_dir) >= 2, log)
        run("scancel", job)
        wait_for(lambda: not run("squeue", "--noheader"), log)
        stops = [status(run_dir)]

        job, log = submitted()
        wait_for(lambda: trained_steps(run_dir) > stops[-1]["step"] + 2, log)
        run("scancel", "--signal=TERM", "--batch", job)  # the script alone gets the signal
        wait_for(lambda: not run("squeue", "--noheader"), log)
        stops.append(status(run_dir))

        job, log = submitted()
        wait_for(lambda: trained_steps(run_dir) > stops[-1]["step"] + 2, log)
        run("sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--wrap=true")
        wait_for(lambda: status(run_dir)["state"] == "stopped", log)  # and Slurm itself puts it back into the queue
        stops.append(status(run_dir))

        wait_for(lambda: trained_steps(run_dir) > stops[-1]["step"] + 2, log)
        run("scancel", "--signal=USR1", "--batch", job)  # as `--signal=B:USR1@120` has it sent
        wait_for(lambda: "goes back into the queue" in log(), log)
        stops.append(status(run_dir))
        wait_for(lambda: not run("squeue", "--noheader"), log)

    assert [(stop["state"], stop["message"].split()[0], stop["exit_code"]) for stop in stops] == [
        ("stopped", "SIGTERM", 75)] * 4, stops
    assert (status(run_dir)["state"], status(run_dir)["start"]) == ("finished", 5), log()
    steps = [stop["step"] for stop in stops]
    assert 0 < steps[0] < steps[1] < steps[2] < steps[3] < 60, steps
    assert outcome(run_dir) == outcome(straight)
