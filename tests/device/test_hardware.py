"""What a real device shows best: its kernels made deterministic, torch.compile, full memory, processes that share it.

A simulated one with other random numbers runs the rows that it can.
"""

import json
import re
import sys

import pytest

from tests.device.runs import CLOSE, COARSE
from tests.harness.run_directory import outcome, records, status
from utils.errors import Exit

pytestmark = pytest.mark.slow
IMAGES = "image-classification"
SHARING = "tests/device/train_on_one_device.py"


@pytest.mark.needs("other numbers")
def test_the_digits_train_in_the_default_precision(accelerator, run_dir, figure):
    result = accelerator.run(None, "--max-steps", 10, "--log-every", 3, "--run-dir", run_dir)
    assert result.returncode == 0, result.text
    losses = [record["loss"] for record in records(run_dir) if record["split"] == "train"]
    precision = json.loads((run_dir / "auto.json").read_text())["precision"]
    figure(f"{precision}, losses {losses[0]:.2f} to {losses[-1]:.2f}")
    assert losses[-1] < losses[0]


@pytest.mark.needs("other numbers")
@pytest.mark.parametrize("task, strategy, precision", [
    (IMAGES, "ddp", "fp32"), (IMAGES, "exact", "fp32"), ("masked-lm", "ddp", "fp32"), ("masked-lm", "exact", "fp32"),
    ("masked-lm", "ddp", "bf16")])
def test_deterministic_runs_have_the_same_bits(accelerator, runs, run_dir, task, strategy, precision):
    words = [*runs.words(task, strategy, precision), "--deterministic", "--log-every", 1]
    found = []
    for name in ("a", "b"):
        result = accelerator.run(None, *words, "--run-dir", run_dir.parent / name)
        assert result.returncode == 0, result.text
        found.append(outcome(run_dir.parent / name))
    assert found[0] == found[1]


@pytest.mark.needs("other numbers")
@pytest.mark.parametrize("task", [IMAGES, "masked-lm"])
def test_two_processes_share_a_device_with_the_bits_of_one_by_exact(accelerator, runs, run_dir, task):
    words, found = [*runs.words(task, "exact"), "--deterministic"], []
    for processes, script in ((None, "train.py"), (2, SHARING)):
        run = run_dir.parent / f"by-{processes}"
        result = accelerator.run(processes, *words, "--run-dir", run, script=script)
        assert result.returncode == 0, result.text
        found.append(outcome(run))
    assert f" on 2 x {accelerator.name};" in result.out and found[0] == found[1]


@pytest.mark.needs("other numbers")
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("task", [IMAGES, "masked-lm"])
def test_two_processes_share_a_device_with_the_losses_of_the_cpu(
        runs, losses_beside_the_cpu, no_dropout, task, precision):
    words = [*runs.words(task, "ddp", precision), *no_dropout[task], "--log-every", 1]
    found, expected = losses_beside_the_cpu(words, 2, script=SHARING)
    assert found == pytest.approx(expected, abs=CLOSE if precision == "fp32" else COARSE[precision])


@pytest.mark.needs("hardware")
@pytest.mark.parametrize("task", [IMAGES, "masked-lm"])
def test_fsdp_of_one_process_has_the_losses_of_the_cpu(runs, losses_beside_the_cpu, no_dropout, task):
    found, expected = losses_beside_the_cpu([*runs.words(task, "fsdp"), *no_dropout[task], "--log-every", 1])
    assert found == pytest.approx(expected, abs=CLOSE)


@pytest.mark.needs("hardware", "cuda")
def test_memory_that_really_runs_out_is_refused_with_a_size_that_fits(accelerator, photos, run_dir, figure):
    words = ["--data", photos, "--model", "resnet18", "--image-size", 512, "--global-batch-size", 57, "--max-steps", 2,
             "--precision", "fp32", "--eval-batch-size", 2, "--workers", 0]
    script = "tests/device/train_in_little_memory.py"
    result = accelerator.run(None, *words, "--micro-batch-size", 57, "--run-dir", run_dir, script=script)
    assert result.returncode == Exit.USAGE, result.text
    assert "micro-batches of 57 samples do not fit into memory" in result.err
    fits = re.search(r"--micro-batch-size (\d+) fits", result.err)[1]
    for size in (fits, "auto"):  # that advice is true, and auto finds a size by itself
        run = run_dir.parent / size
        result = accelerator.run(None, *words, "--micro-batch-size", size, "--run-dir", run, script=script)
        assert result.returncode == 0, result.text
    figure(f"{fits} samples fit; auto: {json.loads((run / 'auto.json').read_text())['micro_batches']} micro-batches")
    assert status(run)["state"] == "finished"


@pytest.mark.needs("other numbers")
def test_a_run_is_evaluated_on_the_device_with_the_digits_of_training(accelerator, runs):
    run = runs.on_device(1, IMAGES, "ddp")
    result = accelerator.run(None, *runs.words(IMAGES), "--run-dir", run, "--eval-only")
    assert result.returncode == 0, result.text
    found = json.loads(result.out)
    trained = next(record for record in records(run) if record["split"] == "val" and record["step"] == found["step"])
    assert found["loss"] == pytest.approx(trained["loss"], abs=1e-5)  # kernels may be chosen anew


@pytest.mark.needs("hardware")
@pytest.mark.parametrize("task", [IMAGES, "text-classification"])
def test_a_model_predicts_on_the_device_what_it_predicts_on_the_cpu(accelerator, runs, photos, texts, task):
    run, inputs = runs.on_device(1, task, "ddp"), photos / "val" if task == IMAGES else texts / "val.csv"
    found = []
    for device in (accelerator.name, "cpu"):
        result = accelerator.run(None, run, inputs, "--device", device, "--format", "jsonl",
                                 command=(sys.executable, "-m", "models.predict"))
        assert result.returncode == 0, result.text
        rows = [json.loads(line)["probabilities"] for line in result.out.splitlines()]
        found.append([value for row in rows for value in row.values()])
    assert len(found[0]) == 147 * 3 and found[0] == pytest.approx(found[1], abs=0.01)  # convolutions may be in TF32


@pytest.mark.needs("hardware", "two devices")
def test_exact_has_the_same_bits_on_one_device_and_on_two(accelerator, runs, run_dir):
    words = [*runs.words(IMAGES, "exact"), "--deterministic"]
    found = []
    for processes in (None, 2):
        run = run_dir.parent / f"on-{processes}"
        result = accelerator.run(processes, *words, "--run-dir", run)
        assert result.returncode == 0, result.text
        found.append(outcome(run))
    assert found[0] == found[1]


@pytest.mark.needs("hardware", "two devices")
@pytest.mark.parametrize("model", ["wide", "wide-norm"])
def test_dp_classic_gives_the_gradient_of_torchs_data_parallel(accelerator, figure, model):
    result = accelerator.run(None, model, script="tests/device/check_data_parallel.py")
    assert result.returncode == 0, result.text
    figure(f"relative difference {result.out.strip()}")
    assert float(result.out) < 1e-5


@pytest.mark.needs("hardware")
def test_an_operator_that_is_not_deterministic_is_refused_by_name(accelerator, photos, run_dir):
    """Adaptive pooling of 1 x 1 maps to 7 x 7: its backward adds in any order."""
    result = accelerator.run(None, "--data", photos, "--model", "vgg11", "--image-size", 32,
                             "--deterministic", "--run-dir", run_dir)
    assert result.returncode == Exit.USAGE, result.text
    assert "--deterministic: adaptive_avg_pool2d_backward" in result.err
    assert "leave --deterministic out" in result.err


@pytest.mark.needs("hardware")
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


@pytest.mark.needs("hardware")
def test_devices_that_the_environment_hides_are_not_used(accelerator, runs, run_dir):
    hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "ZE_AFFINITY_MASK": ""}
    words = [*runs.words(IMAGES), "--max-steps", 1, "--run-dir", run_dir]
    result = accelerator.run(None, *words, "--device", accelerator.name, env=hidden)
    assert result.returncode == Exit.USAGE and "finds no accelerator here; use --device cpu" in result.err, result.text
    result = accelerator.run(None, *words, env=hidden)
    assert result.returncode == 0 and " on 1 x cpu;" in result.out, result.text
