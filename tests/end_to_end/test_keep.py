"""ask.verify --keep: the checkpoint of a step is made again, if what the run saved next says that it is the same."""

import json
import shutil

import pytest

from ask.integrity import findings
from tests.harness.forging import changed_weights, rehash
from utils.errors import Exit

WORDS = ["--model", "small-cnn", "--image-size", "16", "--epochs", "3", "--global-batch-size", "24",
         "--micro-batch-size", "4", "--save-every", "2", "--keep", "9", "--threads", "1", "--workers", "0",
         "--precision", "fp32", "--strategy", "exact"]
VERIFY = {"script": "ask/verify.py"}


@pytest.fixture(scope="module")
def whole(session_dir, run_train, photos):
    """A run with a checkpoint of each 2nd step of 9, and of each 3rd, which it evaluates."""
    run = session_dir / "to-keep"
    assert run_train(*WORDS, "--data", photos, "--run-dir", run).returncode == 0
    return run


def checkpoints(run):
    return {path.name: json.loads((path / "MANIFEST.json").read_text())["link"] for path in run.glob("checkpoints/s*")}


@pytest.mark.parametrize("processes", [1, 2])
def test_a_checkpoint_that_was_removed_is_made_again(processes, whole, run_torchrun, tmp_path):
    """Of an evaluation: with its own link. The leavings of a killed command are no hindrance."""
    run = shutil.copytree(whole, tmp_path / "run")
    before, name = checkpoints(run), "step-0000000006-g1"
    shutil.rmtree(run / "checkpoints" / name)
    shutil.copytree(whole / "checkpoints" / name, run / ".kept" / name)
    result = run_torchrun(processes, run, "--keep", 6, **VERIFY)
    assert (result.returncode, f"kept: {run}/checkpoints/{name}" in result.out) == (0, True), result.text
    assert (checkpoints(run), findings(run), (run / ".kept").exists()) == (before, [], False)


def test_a_step_that_is_not_what_it_was_is_not_kept(whole, run_train, tmp_path):
    run = shutil.copytree(whole, tmp_path / "run")
    for file in run.glob("checkpoints/step-0000000004-*/model.safetensors"):
        changed_weights(file)
    rehash(run)
    before = checkpoints(run)
    result = run_train(run, "--keep", 5, **VERIFY)
    assert (result.returncode, "kept" in result.out, checkpoints(run)) == (Exit.DIFFERS, False, before), result.text
