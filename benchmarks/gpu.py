"""`make gpu-bench`: Lockstep's speed, MFU, data wait and memory on this machine's accelerator, against a bare loop.

Lockstep is train.py as a user starts it, in its own process; its figures come from its train records. The bare loop is
in this file: the same model, precision, batch and device, fused AdamW; no records, checks or saves. Each is one
process. They alternate (A B A B); figures are medians over the second half of the steps of every turn.

    row     Lockstep reads                                    the bare loop reads
    image   uncompressed images of the model's size, moved    one batch that stays on the device
            (--augmentation shift): little work to load
    jpeg    JPEGs of 500 x 375 px, random crops, flips        the same files by torchvision's ImageFolder (Pillow),
                                                              with as many processes as Lockstep's --workers auto
    text    texts of random words, to classify                one batch that stays on the device
    mlm     the same texts, 15 % of the tokens to predict     one batch that stays on the device
    ...-compiled: the same with --compile, and with model.compile()

All data is generated (gpu_rows.py). Without a package index and without .venv: python3 -m benchmarks.gpu
"""

import argparse
import itertools
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn

from benchmarks.gpu_rows import (
    TASKS,
    TINY,
    Batch,
    Sizes,
    build_model,
    example,
    flop_per_sample,
    jpeg_batches,
    loss_of,
    to_device,
    write_images,
    write_texts,
)
from utils.errors import Exit
from utils.hardware.cores import available_cores

ROOT = Path(__file__).parents[1]
ROWS = ("image", "text", "mlm", "jpeg", "image-compiled", "text-compiled", "mlm-compiled", "jpeg-compiled")
LATEST_S = 420  # no row starts later unless --rows names it, so that the benchmark ends within ten minutes
PEAKS = {  # dense bf16 FLOP/s by the vendors' data sheets; the first name that occurs in the device's name counts
    "B200": 2250e12, "H200 NVL": 835e12, "H100 NVL": 835e12, "H100 PCIe": 756e12, "H200": 989e12, "H100": 989e12,
    "A100": 312e12, "L40S": 362e12, "L4": 121e12, "MI300X": 1307e12}
FORM = "{:<14} {:<16} {:>10} {:>8} {:>22} {:>12} {:>6} {:>9} {:>15}".format
HEAD = ("row", "model x batch", "Lockstep/s", "bare/s", "ratio", "GFLOP/sample", "MFU", "data wait", "MiB, bare's")


def peak_of(name: str) -> float | None:
    """Dense bf16 FLOP/s of the device with this name; None if PEAKS lacks it."""
    return next((peak for known, peak in PEAKS.items() if re.search(rf"\b{known}\b", name)), None)


def mfu(samples_per_s: float, flop: float, peak: float) -> float:
    """Model FLOP utilization, 0 to 1. flop: of a sample's forward and backward. peak: FLOP/s."""
    return samples_per_s * flop / peak


def run_bare(model: nn.Module, batches: Iterator[Batch], options: argparse.Namespace, sizes: Sizes) -> list[float]:
    """Train with the bare loop. Returns samples per second, one value per `every` steps, second half only."""
    optimizer, rates, device = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), [], options.device
    for _ in range(options.steps // options.every):
        samples, began = 0, time.perf_counter()
        for inputs, targets in itertools.islice(batches, options.every):
            with torch.autocast(device.type, torch.bfloat16) if sizes.precision == "bf16" else nullcontext():
                loss = loss_of(model, inputs, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            samples += len(next(iter(inputs.values())))
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        rates.append(samples / (time.perf_counter() - began))
    return rates[len(rates) // 2:]


def run_lockstep(row: str, data: Path, batch: int, options: argparse.Namespace, sizes: Sizes) -> list[dict]:
    """Train with train.py. Returns its train records, second half only; exits with its message if it fails."""
    kind, run = row.partition("-")[0], data.parent / "run"
    settings = {
        "data": data, "run-dir": run, "device": options.device.type, "precision": sizes.precision, "strategy": "ddp",
        "global-batch-size": batch, "micro-batch-size": batch, "epochs": options.steps, "stop-after": options.steps,
        "log-every": options.every, "eval-every": 10**6, "save-every": 10**6, "threads": torch.get_num_threads()}
    settings |= {
        "task": TASKS[kind], "model": sizes.text_model, "max-length": sizes.tokens, "tokenizer": data / "tokenizer",
    } if kind in TASKS else {
        "model": sizes.image_model, "image-size": sizes.side, "augmentation": "photo" if kind == "jpeg" else "shift"}
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    words += ["--compile"] if row.endswith("-compiled") else []
    environment = {name: value for name, value in os.environ.items() if "RANK" not in name and "WORLD_SIZE" not in name}
    done = subprocess.run([sys.executable, "train.py", *words], cwd=ROOT, capture_output=True, text=True,
                          env=environment | {"LOCKSTEP_CACHE": str(data.parent / "cache")})
    if done.returncode != Exit.STOPPED:
        sys.exit(f"{row}: train.py ended with {done.returncode}:\n{done.stdout[-500:]}\n{done.stderr[-3000:]}")
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    shutil.rmtree(run)
    return [record for record in records if record["split"] == "train" and record["step"] > options.steps // 2]


def take_peak_mib(device: torch.device) -> float:
    """Peak memory of this process since the last call, in MiB; also frees the cache. 0 if torch cannot tell."""
    try:
        peak = torch.accelerator.max_memory_allocated(device) / 2**20
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats(device)
        return peak
    except RuntimeError:
        return 0.0


def measure(row: str, options: argparse.Namespace, sizes: Sizes, root: Path) -> list[str]:
    """Measure one row; returns its cells."""
    kind, device = row.partition("-")[0], options.device
    batch = options.batch or (sizes.text_batch if kind in TASKS else sizes.image_batch)
    data = root / ("texts" if kind in TASKS else kind)
    if not data.exists():
        write_texts(data, sizes, 4 * batch) if kind in TASKS else write_images(data, sizes, 4 * batch, kind == "jpeg")
    model = build_model(kind, sizes, data)
    flop = flop_per_sample(model, example(kind, sizes, 2))
    model = model.to(device)
    if row.endswith("-compiled"):
        model.compile()
    batches = (jpeg_batches(data, sizes, batch, device) if kind == "jpeg"
               else itertools.repeat(to_device(example(kind, sizes, batch), device)))

    records, bare, ratios, peaks = [], [], [], [0.0]
    for _ in range(sizes.rounds):
        take_peak_mib(device)
        found = run_lockstep(row, data, batch, options, sizes)
        rates = run_bare(model, batches, options, sizes)
        peaks.append(take_peak_mib(device))
        ratios.append(statistics.median(record["samples_per_s"] for record in found) / statistics.median(rates))
        records, bare = records + found, bare + rates

    speed, wait = (statistics.median(record[name] for record in records) for name in ("samples_per_s", "data_wait"))
    memory = [max(record.get("memory", 0.0) for record in records), max(peaks)]
    return [row, f"{sizes.text_model if kind in TASKS else sizes.image_model} x {batch}", f"{speed:.1f}",
            f"{statistics.median(bare):.1f}",
            f"{speed / statistics.median(bare):.3f} ({min(ratios):.3f} to {max(ratios):.3f})", f"{flop / 1e9:.3g}",
            f"{100 * mfu(speed, flop, options.peak):.1f} %" if options.peak else "-", f"{100 * wait:.1f} %",
            ", ".join(f"{mib:.0f}" if mib else "-" for mib in memory)]


def parse(words: list[str]) -> argparse.Namespace:
    """The arguments: `device` is resolved, `name` is the device's, `peak` is in FLOP/s or None."""
    def at_least(least: float):
        def number(text: str) -> float:
            if not (value := type(least)(text)) >= least:
                raise argparse.ArgumentTypeError(f"{text}: must be at least {least}")
            return value
        return number

    parser = argparse.ArgumentParser(prog="python3 -m benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="auto", help="auto = the accelerator, or else the CPU")
    parser.add_argument("--steps", type=at_least(4), help="optimizer steps per turn; default 80; tiny: 8")
    parser.add_argument("--batch", type=at_least(2), help="samples per step; default 256 images, 128 texts; tiny: 8")
    parser.add_argument("--rows", nargs="+", choices=ROWS, metavar="ROW", help=f"of {', '.join(ROWS)}")
    parser.add_argument("--peak", type=at_least(0.001), metavar="TFLOPS", help="bf16 peak, if the table lacks it")
    parser.add_argument("--tiny", action="store_true", help="small models, images and texts, fp32: runs anywhere")
    options = parser.parse_args(words)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    available = {device.type: device for device in (accelerator, torch.device("cpu")) if device}
    if options.device not in ("auto", *available):
        parser.error(f"--device {options.device}: torch {torch.__version__} finds only {' and '.join(available)} here")
    options.device = available.get(options.device) or next(iter(available.values()))
    ask = getattr(torch.get_device_module(options.device), "get_device_name", None)
    options.name = ask() if ask else options.device.type
    options.peak = options.peak * 1e12 if options.peak else peak_of(options.name)
    return options


def main(options: argparse.Namespace) -> None:
    """Print the table, each row when it is measured."""
    sizes, began = TINY if options.tiny else Sizes(), time.monotonic()
    options.steps = options.steps or sizes.steps
    options.every = max(1, options.steps // 8)
    torch.set_float32_matmul_precision("high")  # TF32 where bf16 is not used, as Lockstep's --tf32 auto
    torch.backends.cudnn.benchmark = True
    peak = f"{options.peak / 1e12:.6g} TFLOP/s" if options.peak else "unknown (--peak)"
    print(f"{options.name}, torch {torch.__version__}, {sizes.precision}, {available_cores()} cores; rounds:"
          f" {sizes.rounds}, of {options.steps} steps\n"
          "MFU = Lockstep's samples/s x FLOP per sample / peak; FLOP of forward and backward, counted by torch's"
          f" FlopCounterMode on 2 samples; peak, dense bf16: {peak}\n{FORM(*HEAD)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for row in options.rows or [row for row in ROWS if not (options.tiny and "-" in row)]:
            if not options.rows and time.monotonic() - began > LATEST_S:
                print(f"{row:<14} left out after {LATEST_S} s; --rows {row} measures it", flush=True)
            else:
                print(FORM(*measure(row, options, sizes, Path(folder))), flush=True)
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main(parse(sys.argv[1:]))
