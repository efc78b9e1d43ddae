"""The image task on an index that is mapped read-only."""

import warnings

import pytest

from models.tasks import load_task
from tests.conftest import COUNTS
from utils.rundir.lock import RunLock
from utils.rundir.run import Run
from utils.settings.command_line import parse_command_line


def test_the_most_frequent_class_of_train_is_the_baseline(photos, world, tmp_path, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    config = parse_command_line(["--data", str(photos)], {})
    run = Run(tmp_path, {}, {"start": 1, "cores_per_process": 1}, print, RunLock())
    with warnings.catch_warnings(action="error"):  # torch warns of arrays that cannot be written
        baselines = load_task("image-classification")(config, run, world).baselines()
    most = max(range(3), key=lambda label: COUNTS["train"][label])
    assert baselines == {"always the most frequent class": pytest.approx(COUNTS["val"][most] / sum(COUNTS["val"]))}
