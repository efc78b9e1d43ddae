"""--cache: the same training from packed images, on any number of processes, and they are packed once."""

import json
import shutil

import numpy as np
import pytest
from PIL import Image

from tests.conftest import COUNTS
from tests.harness.run_directory import records, weights_sha256
from utils.errors import Exit

WORDS = ["--model", "mobilenet_v3_small", "--image-size", 32, "--global-batch-size", 24, "--micro-batch-size", 4,
         "--epochs", 2, "--threads", 1, "--strategy", "exact", "--bad-samples", "skip"]
NUM = sum(sum(counts) for counts in COUNTS.values())


@pytest.mark.long
def test_raw_pixels_that_are_not_resized_train_the_same_model(own_photos, run_dir, run_torchrun, run_train):
    """Also with an image that cannot be read, images of 12 bits, after a stop, and on other numbers of processes."""
    sorted(own_photos.glob("train/*/*.png"))[0].write_bytes(b"")
    for split in ("train", "val"):
        for path in sorted(own_photos.glob(f"{split}/*/*.png"))[1::2]:
            Image.fromarray(np.array(Image.open(path).convert("L")).astype(np.uint16) * 10).save(path)
    environment = {"LOCKSTEP_CACHE": str(run_dir.parent / "cache")}
    words = [*WORDS, "--data", own_photos, "--run-dir"]
    assert run_train(*words, run_dir / "none", env=environment).returncode == 0
    begun = run_torchrun(2, *words, run_dir / "raw", "--cache", "raw", "--stop-after", 2, env=environment)
    assert begun.code == Exit.STOPPED and f"packing {NUM} images" in begun.out, begun.text
    resumed = run_train(*words, run_dir / "raw", "--cache", "raw", env=environment)
    assert resumed.returncode == 0 and "packing" not in resumed.out, resumed.text
    words += [run_dir / "raw", "--cache", "raw", "--eval-only"]
    evaluated = [run_train(*words, env=environment) for _ in range(2)]
    assert f"packing {sum(COUNTS['val'])} images" in evaluated[0].text, evaluated[0].text  # what it reads, once
    assert "packing" not in evaluated[1].text, evaluated[1].text
    figures = [json.loads(result.out) | {"time": None} for result in evaluated]
    assert figures[0] == figures[1]
    assert weights_sha256(run_dir / "raw") == weights_sha256(run_dir / "none")
    assert records(run_dir / "raw") == records(run_dir / "none")
    listed = [(run_dir / name / "bad_samples.txt").read_text() for name in ("raw", "none")]
    assert listed[0] == listed[1] != ""
    assert json.loads((run_dir / "raw/model/config.json").read_text())["white_value"] == 4095  # for models.predict


@pytest.mark.long
def test_what_the_task_refuses_is_refused_before_packing(own_photos, run_dir, run_train):
    cache = run_dir.parent / "cache"
    environment = {"LOCKSTEP_CACHE": str(cache)}
    words = [*WORDS, "--data", own_photos, "--run-dir", run_dir, "--cache", "raw"]

    # settings that are wrong
    result = run_train(*words, "--model", "resnt18", env=environment)
    assert result.returncode == Exit.USAGE and not list(cache.glob("*packed*")), result.text

    # other data than the run's
    assert run_train(*words, "--stop-after", 1, env=environment).code == Exit.STOPPED
    shutil.rmtree(cache)
    (first := min(own_photos.glob("train/*/*.png"))).rename(first.with_name("other.png"))
    result = run_train(*words, env=environment)
    assert result.returncode == Exit.OTHER_RUN and "the data set changed" in result.text, result.text
    assert not list(cache.glob("*packed*"))
