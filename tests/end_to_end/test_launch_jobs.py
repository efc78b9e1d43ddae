"""launch.sh --print: the jobs that it prints for Slurm and Kubernetes, and those that it refuses to print."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob

from tests.conftest import ROOT
from tests.end_to_end.test_launch import launch
from utils.errors import Exit

SETTINGS = ["--data", "/da ta", "--lr=1e-3"]


def test_the_printed_slurm_job_starts_this_launcher():
    """With the options and settings that were given."""
    script = launch("--print", "slurm", "--nnodes", 2, "--nproc-per-node", 8, *SETTINGS).stdout
    asked = {line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")}
    assert {"--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=8", "--signal=B:USR1@120", "--requeue"} <= asked
    [step] = [shlex.split(line) for line in script.splitlines() if line.startswith("srun ")]
    assert step[3:-1] == [str(ROOT / "launch.sh"), "--nproc-per-node", "8", "--", *SETTINGS]
    shellcheck = Path(sys.executable).with_name("shellcheck")
    checked = subprocess.run([shellcheck, "-"], input=script, capture_output=True, text=True)
    assert (checked.returncode, checked.stdout) == (0, "")


def test_a_slurm_job_without_gpus_requests_none():
    assert "gpu" not in launch("--print", "slurm", "--nproc-per-node", 2, "--device", "cpu").stdout


def test_the_printed_trainjob_is_one_that_kubeflow_accepts():
    """With the options and settings that were given."""
    text = launch("--print", "trainjob", "--nnodes", 2, "--nproc-per-node", 8, "--retries", 3, "--master-port", 1234,
                  *SETTINGS, IMAGE="registry/lockstep:1", RUNS_CLAIM="mine").stdout
    job = yaml.safe_load(text)
    assert TrainerV1alpha1TrainJob.from_dict(job).to_dict() == job  # its own types drop unknown keys
    trainer = job["spec"]["trainer"]
    assert (trainer["image"], trainer["command"]) == ("registry/lockstep:1", ["./launch.sh"])
    assert trainer["args"] == ["--master-port", "1234", "--retries", "3", "--", *SETTINGS]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 8)
    assert trainer["resourcesPerNode"]["limits"] == {"nvidia.com/gpu": 8}
    assert "claimName: mine" in text
    assert trainer["env"] == [{"name": "LOCKSTEP_CACHE", "value": "/app/runs/.cache"}]  # on the volume of the runs


@pytest.mark.parametrize("kind", ["slurm", "trainjob"])
@pytest.mark.parametrize(("words", "said"), [
    (["--nproc-per-node", 2, "--fresh"], "--fresh could start over each time the platform"),
    (["--nnodes", "2:4"], "has a fixed number of nodes"),
    (["--nnodes", 2, "--node-rank", 1], "are set by the scheduler"),
    (["--nnodes", 2, "--master-addr", "a"], "are set by the scheduler")])
def test_a_job_with_impossible_options_is_refused(kind, words, said):
    refused = launch("--print", kind, *words)
    assert (refused.returncode, refused.stdout) == (Exit.USAGE, "")
    assert said in refused.stderr
