"""Only a real device shows these: its kernels made deterministic, torch.compile, devices the environment hides."""

import pytest

from tests.device.runs import CLOSE
from tests.harness.run_directory import outcome, records
from utils.errors import Exit

pytestmark = [pytest.mark.slow, pytest.mark.needs("hardware")]
IMAGES = "image-classification"


@pytest.mark.parametrize("strategy", ["ddp", "exact"])
@pytest.mark.parametrize("task", [IMAGES, "masked-lm"])
def test_deterministic_runs_have_the_same_bits(accelerator, runs, run_dir, task, strategy):
    words = [*runs.words(task, strategy), "--deterministic", "--log-every", 1]
    found = []
    for name in ("a", "b"):
        result = accelerator.run(None, *words, "--run-dir", run_dir.parent / name)
        assert result.returncode == 0, result.text
        found.append(outcome(run_dir.parent / name))
    assert found[0] == found[1]


@pytest.mark.needs("two devices")
def test_exact_has_the_same_bits_on_one_device_and_on_two(accelerator, runs, run_dir):
    words = [*runs.words(IMAGES, "exact"), "--deterministic"]
    found = []
    for processes in (None, 2):
        run = run_dir.parent / f"on-{processes}"
        result = accelerator.run(processes, *words, "--run-dir", run)
        assert result.returncode == 0, result.text
        found.append(outcome(run))
    assert found[0] == found[1]


@pytest.mark.needs("two devices")
@pytest.mark.parametrize("model", ["wide", "wide-norm"])
def test_dp_classic_gives_the_gradient_of_torchs_data_parallel(accelerator, figure, model):
    result = accelerator.run(None, model, script="tests/device/check_data_parallel.py")
    assert result.returncode == 0, result.text
    figure(f"relative difference {result.out.strip()}")
    assert float(result.out) < 1e-5


def test_an_operator_that_is_not_deterministic_is_refused_by_name(accelerator, photos, run_dir):
    """Adaptive pooling of 1 x 1 maps to 7 x 7: its backward adds in any order."""
    result = accelerator.run(None, "--data", photos, "--model", "vgg11", "--image-size", 32,
                             "--deterministic", "--run-dir", run_dir)
    assert result.returncode == Exit.USAGE, result.text
    assert "--deterministic: adaptive_avg_pool2d_backward" in result.err
    assert "leave --deterministic out" in result.err


@pytest.mark.parametrize("task", [IMAGES, "masked-lm"])
def test_a_compiled_model_has_the_losses_of_one_that_is_not(accelerator, runs, run_dir, figure, no_dropout, task):
    words = [*runs.words(task), *no_dropout[task], "--log-every", 1]
    losses = []
    for name, more in {"plain": [], "compiled": ["--compile"]}.items():
        result = accelerator.run(None, *words, *more, "--run-dir", run_dir.parent / name)
        assert result.returncode == 0, result.text
        losses.append([record["loss"] for record in records(run_dir.parent / name)])
    figure(f"largest difference {max(abs(a - b) for a, b in zip(*losses, strict=True)):.1e}")
    assert losses[1] == pytest.approx(losses[0], abs=CLOSE)


def test_devices_that_the_environment_hides_are_not_used(accelerator, runs, run_dir):
    hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "ZE_AFFINITY_MASK": ""}
    words = [*runs.words(IMAGES), "--max-steps", 1, "--run-dir", run_dir]
    result = accelerator.run(None, *words, "--device", accelerator.name, env=hidden)
    assert result.returncode == Exit.USAGE and "finds no accelerator here; use --device cpu" in result.err, result.text
    result = accelerator.run(None, *words, env=hidden)
    assert result.returncode == 0 and " on 1 x cpu;" in result.out, result.text
