"""A run that is started again: under other tolerated settings, without what it began from, by other ways to start."""

import json
import subprocess

import pytest
import torch
import torchvision

from tests.conftest import ROOT
from tests.harness.run_directory import records, status
from utils.errors import Exit

SMALL = ["--model", "mobilenet_v3_small", "--image-size", "32", "--global-batch-size", "24", "--micro-batch-size", "12",
         "--epochs", "1", "--threads", "1", "--workers", "0"]


@pytest.fixture(scope="module")
def begun(session_dir, run_train, photos):
    """A run from given weights in fp32, stopped after a step by the clock's option, the weights' file gone since."""
    weights, run = session_dir / "weights.pth", session_dir / "begun"
    torch.save(torchvision.models.mobilenet_v3_small(num_classes=1000).state_dict(), weights)
    words = [*SMALL, "--data", photos, "--weights", weights, "--run-dir", run]
    result = run_train(*words, "--precision", "fp32", "--stop-after", "0.001s")
    assert (result.returncode, status(run)["state"]) == (Exit.STOPPED, "stopped"), result.text
    weights.unlink()
    return words, run


def test_a_run_goes_on_in_fp16_and_without_the_weights_it_began_from(begun, run_train):
    words, run = begun
    result = run_train(*words, "--precision", "fp16")
    assert result.returncode == 0, result.text
    assert "precision was fp32 in this run and is now fp16; the run is not bit-exact from here on" in result.out
    assert records(run)[-1]["step"] == 3


def test_the_clock_that_stopped_a_run_does_not_stop_its_evaluation(begun, run_train):
    _, run = begun
    result = run_train("--eval-only", "--run-dir", run)
    assert (result.returncode, json.loads(result.out)["step"]) == (0, 3), result.text


def test_an_evaluation_set_without_a_readable_image_is_an_error(own_photos, run_dir, run_train):
    for image in (own_photos / "val").glob("*/*.png"):
        image.write_bytes(b"")
    result = run_train(*SMALL, "--data", own_photos, "--run-dir", run_dir, "--bad-samples", "skip")
    assert (result.returncode, status(run_dir)["state"]) == (Exit.BAD_DATA, "failed"), result.text
    assert "no sample of the evaluation set could be read" in result.err


def test_the_launcher_gives_the_code_of_a_typing_error():
    launched = subprocess.run([ROOT / "launch.sh", "--learning-rat", "1"], capture_output=True, text=True)
    assert launched.returncode == Exit.USAGE
    assert launched.stderr == "train.py: --learning-rat: use --lr\n"
