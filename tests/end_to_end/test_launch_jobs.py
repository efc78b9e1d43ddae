"""launch/: the jobs for Slurm and Kubernetes. tests/faults/test_slurm.py submits the first."""

import yaml
from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob

from tests.conftest import ROOT


def test_the_trainjob_is_one_that_kubeflow_accepts():
    job = yaml.safe_load((ROOT / "launch" / "trainjob.yaml").read_text())
    assert TrainerV1alpha1TrainJob.from_dict(job).to_dict() == job  # its own types drop unknown keys
    trainer = job["spec"]["trainer"]
    assert trainer["numProcPerNode"] == trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]
