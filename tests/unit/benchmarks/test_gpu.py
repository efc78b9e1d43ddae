"""`make gpu-bench`: its formulas, its errors, one tiny run. `make gpu-wheels`: the packages that it downloads."""

import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from torch import nn

from benchmarks import gpu, gpu_rows, in_turn

ROOT = Path(__file__).parents[3]


def test_mfu_is_what_the_model_needs_over_what_the_device_has():
    assert gpu.mfu(samples_per_s=500, flop=24e9, peak=48e12) == 0.25  # 12 of 48 TFLOP/s


def test_flop_are_those_of_forward_and_backward():
    """4 -> 8 -> 3 has 32 + 24 params. Each costs a multiplication and an addition in the forward, the same again for
    its gradient, and in the second layer the same again for the input's gradient."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    batch = {"images": torch.zeros(5, 4)}, torch.zeros(5, dtype=torch.int64)
    assert gpu_rows.flop_per_sample(model, batch) == 2 * (32 + 24) + 2 * (32 + 24) + 2 * 24
    assert next(model.parameters()).device.type == "cpu"  # a copy was counted


@pytest.mark.parametrize(("name", "peak"), [
    ("NVIDIA H200", 989e12), ("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA L4", 121e12),
    ("NVIDIA L40S", 362e12), ("NVIDIA A100-SXM4-80GB", 312e12), ("AMD Instinct MI300X", 1307e12),
    ("NVIDIA L400", None), ("cpu", None)])
def test_the_peak_is_found_by_the_whole_name(name, peak):
    assert gpu.peak_of(name) == peak


def test_arguments_are_resolved():
    options = gpu.parse(["--device", "cpu", "--peak", "2.5", "--rows", "jpeg", "mlm", "--steps", "16"])
    assert (options.device, options.peak, options.steps) == (torch.device("cpu"), 2.5e12, 16)
    assert options.rows == ["jpeg", "mlm"]


@pytest.mark.parametrize(("words", "message"), [
    (["--steps", "3"], "argument --steps: 3: must be at least 4"), (["--batch", "1"], "--batch: 1: must be at least"),
    (["--peak", "nan"], "--peak: nan: must be at least"), (["--rows", "video"], "--rows: invalid choice: 'video'"),
    (["--device", "abacus"], "--device abacus: torch"), (["image"], "unrecognized arguments: image")])
def test_wrong_arguments_are_one_error(words, message, capsys):
    with pytest.raises(SystemExit) as left:
        gpu.parse(words)
    assert left.value.code == 2 and message in capsys.readouterr().err.splitlines()[-1]


def test_it_names_no_vendors_interface():
    assert "cuda" not in (Path(gpu.__file__).read_text() + Path(gpu_rows.__file__).read_text()).lower()


@pytest.mark.parametrize("name", gpu.ROWS)
def test_a_row_is_its_name(name):
    row = gpu_rows.Row(name)
    sizes = row.sizes(gpu_rows.Sizes())
    assert f"{'vit-' if sizes.image_model == 'vit_b_16' else ''}{row.kind}{'-compiled' * row.is_compiled}" == name
    assert sizes.tokens * sizes.text_batch == 128 * 128  # as many tokens in a step, of either length


@pytest.mark.parametrize("name", gpu.ROWS)
def test_a_row_outlasts_what_was_loaded_before_its_first_step(name):
    """32 batches at most: two of each of 16 processes. The second half of the steps is measured."""
    steps = gpu_rows.Row(name).steps(gpu_rows.Sizes())
    assert steps % 4 == 0 and (steps // 2 >= 32 or gpu_rows.Row(name).kind == "image")


def test_rows_beyond_the_time_limit_are_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "measure", lambda row, *given: ["-"] * 12 if row.name == "image" else interrupt())
    options = gpu.parse(["--tiny", "--device", "cpu", "--rows", "image", "text", "mlm", "--time-limit", "1000"])
    gpu.main(options)
    assert re.search(r"interrupted\n\d+ s; not measured: --rows text mlm\n$", capsys.readouterr().out)


def interrupt():
    raise KeyboardInterrupt


@pytest.mark.long
def test_contenders_go_back_and_forth(tmp_path, monkeypatch):
    """A machine that grows slower favours nobody: each contender is as early as it is late."""
    order = []
    records = [{"step": step, "time": f"2026-01-01T00:00:{step}+00:00", "data_wait": 0.25} for step in (10, 14, 18)]
    monkeypatch.setattr(gpu, "run_lockstep", lambda *given: order.append("ours") or records)
    monkeypatch.setattr(gpu, "run_bare", lambda *given: order.append("bare") or 4.0)
    monkeypatch.setattr(gpu, "run_peer", lambda *given: order.append("peer") or 2.0)
    monkeypatch.setattr(in_turn, "RESULTS", tmp_path / "results.jsonl")
    options = gpu.parse(["--device", "cpu", "--steps", "8", "--batch", "8"])
    cells = gpu.measure(gpu_rows.Row("image"), options, replace(gpu_rows.TINY, rounds=2), tmp_path)
    assert order == ["ours", "bare", "peer", "peer", "bare", "ours"]
    assert cells[2:7] == ["8.0", "4.0", "2.00 (2.00 to 2.00)", "2.0", "4.00 (4.00 to 4.00)"]  # a batch of 8 a second
    kept = json.loads((tmp_path / "results.jsonl").read_text())
    assert (kept["what"], kept["hardware"]) == ("gpu, image, resnet18 x 8", "cpu")
    assert kept["ratios"] == {"ours": [2, 2, 2], "bare": [1, 1, 1], "peer": [0.5, 0.5, 0.5]}
    assert list(kept["products"]) == ["fp32"] and kept["products"]["fp32"] > 1e9


def test_every_class_has_images_to_train_on_and_to_evaluate(tmp_path):
    data = gpu.lay_out(gpu_rows.Row("vit-packed"), replace(gpu_rows.TINY, classes=30), 8, tmp_path)
    assert [len(list(data.glob(f"{split}/*"))) for split in ("train", "val")] == [30, 30]
    assert len(list(data.glob("train/*/*.jpg"))) == 60


@pytest.mark.long
@pytest.mark.parametrize(("row", "model", "has_peer"), [
    ("image", "resnet18 x 8", False), ("packed", "resnet18 x 8", True), ("mlm", "bert-tiny x 4", True)])
def test_a_tiny_run_prints_its_rows_and_keeps_nothing(row, model, has_peer):
    before = in_turn.RESULTS.read_bytes()
    words = ["--tiny", "--device", "cpu", "--peak", "0.1", "--rows", row]
    done = subprocess.run([sys.executable, "-m", "benchmarks.gpu", *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert in_turn.RESULTS.read_bytes() == before
    about, formula, _, head, line, _ = done.stdout.splitlines()
    assert about.startswith("cpu, python ") and f", torch {metadata.version('torch')}, " in about
    assert head.startswith("row")
    assert formula.startswith("MFU = ") and formula.endswith(" 0.1 TFLOP/s")
    ratio = r" +([\d.]+) +([\d.]+) \(.*?\)"
    figures = re.fullmatch(rf"{row} +{model} +([\d.]+){ratio}{ratio if has_peer else ' +- +-()()'} +([\d.]+)"
                           r" +([\d.]+) % +([\d.]+) % +[\d.]+ % +-, -", line).groups()
    own, bare, to_bare, peer, to_peer, gflop, of_peak, of_matrices = (float(figure or 0) for figure in figures)
    for found, other in ((to_bare, bare), (to_peer, peer)) if has_peer else ((to_bare, bare),):
        rounding = (0.05 / own + 0.05 / other) * own / other + 0.005  # speeds have one decimal, ratios two
        assert found == pytest.approx(own / other, abs=1.1 * rounding)  # 1.1: 0.05 / other may be up to a tenth
    expected, rounding = own * gflop * 1e9 / 0.1e12, 0.05 / own + 0.005  # one decimal, and three digits
    assert of_peak / 100 == pytest.approx(expected, abs=0.0005 + rounding * expected)
    assert 0 < of_matrices < 100


def needs_of(*names):
    """Normalised names of packages and of all packages that these need, as they are installed."""
    found, queue = set(), list(names)
    while queue:
        name = re.sub(r"[-_.]+", "-", queue.pop()).lower()
        if name not in found:
            found.add(name)
            try:
                needs = map(Requirement, metadata.requires(name) or ())
            except metadata.PackageNotFoundError:  # an optional one of another system
                continue
            queue += [need.name for need in needs if not need.marker or need.marker.evaluate({"extra": ""})]
    return found


def test_the_wheels_for_a_gpu_machine_are_all_that_it_lacks():
    """The GPU machine has torch, torchvision, transformers, tensorboard of any version, pytest, and what they need."""
    planned = subprocess.run(["make", "--dry-run", "gpu-wheels"], cwd=ROOT, capture_output=True, text=True, check=True)
    [download] = [line for line in planned.stdout.replace("\\\n", " ").splitlines() if " pip download " in line]
    brought = {Requirement(word).name for word in shlex.split(download.partition("--dest wheels")[2])}
    lines = [line.partition("#")[0].strip() for line in (ROOT / "requirements.txt").read_text().splitlines()]
    tools = ("pytest-timeout", "pytest-xdist", "timm", "accelerate")
    wanted = needs_of(*tools, *(Requirement(line).name for line in lines if line))
    there = needs_of("torch", "torchvision", "transformers", "tensorboard", "pytest")
    assert brought == wanted - there | {"tensorboard"}  # the machine's may be too old
