"""`make gpu-bench`: Lockstep's speed, MFU, data wait and memory on this machine's accelerator, beside others.

Lockstep is train.py as a user starts it, in its own process. The bare loop is in this file: the same model, precision,
batch and device, fused AdamW; no records, checks or saves. The peer is a process of peers.py: timm's model and loader
with fused SGD for images, transformers.Trainer for texts; "-" where it is not installed. The Trainer clips gradients,
passes a mask, and predicts all tokens where Lockstep predicts the masked ones.
They take turns (A B C C B A), of an epoch each; a speed is that of the second half of a turn, by the clock on the wall.

    row     Lockstep reads                                    the bare loop reads                  the peer reads
    image   uncompressed images of the model's size, moved    one batch that stays on the device   (none)
            (--augmentation shift): little work to load
    jpeg    JPEGs of 500 x 375 px, random crops, flips        the same files by torchvision's      the same files
                                                              ImageFolder (Pillow), with as many
                                                              processes as --workers auto
    packed  the same files by --cache jpeg                    as before                            as before
    text    texts of random words, to classify                one batch that stays on the device   the same texts
    mlm     the same of 512 tokens, 15 % of them to predict   one batch that stays on the device   the same texts
    vit-... ViT-B/16 instead of ResNet-50
    ...-compiled: the same with --compile; the bare loop compiles as train.py does

All data is generated (gpu_rows.py). Figures are appended to benchmarks/results.jsonl, but not with --tiny.
Without a package index and without .venv: python3 -m benchmarks.gpu
"""

import argparse
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import torch
from torch import nn

from benchmarks.gpu_rows import (
    TASKS,
    TIMMS,
    TINY,
    Batch,
    Row,
    Sizes,
    build_model,
    example,
    flop_per_sample,
    jpeg_batches,
    loss_of,
    to_device,
    write_model,
    write_texts,
)
from benchmarks.in_turn import append, matrix_rate, ranges, ratios, spread, versions
from benchmarks.made_images import write_images
from benchmarks.processes import ROOT
from utils.errors import Exit
from utils.hardware.compiling import compile_model
from utils.hardware.cores import available_cores

ROWS = (  # those that are left out first stand last
    "text", "jpeg", "image", "mlm", "packed", "image-compiled", "text-compiled", "mlm-compiled", "vit-image",
    "vit-jpeg", "vit-packed", "vit-image-compiled", "jpeg-compiled", "packed-compiled", "vit-jpeg-compiled",
    "vit-packed-compiled")
MOST_S = 570  # no row starts that may end later, unless --rows names it or --time-limit permits it
PEAKS = {  # dense bf16 FLOP/s by the vendors' data sheets; the first name that occurs in the device's name counts
    "B200": 2250e12, "H200 NVL": 835e12, "H100 NVL": 835e12, "H100 PCIe": 756e12, "H200": 989e12, "H100": 989e12,
    "A100": 312e12, "L40S": 362e12, "L4": 121e12, "MI300X": 1307e12}
FORM = "{:<19} {:<15} {:>10} {:>8} {:>21} {:>8} {:>21} {:>12} {:>6} {:>11} {:>9} {:>14}".format
HEAD = ("row", "model x batch", "Lockstep/s", "bare/s", "ratio", "peer/s", "ratio", "GFLOP/sample", "MFU",
        "of matrices", "data wait", "MiB, bare's")


def peak_of(name: str) -> float | None:
    """Dense bf16 FLOP/s of the device with this name; None if PEAKS lacks it."""
    return next((peak for known, peak in PEAKS.items() if re.search(rf"\b{known}\b", name)), None)


def mfu(samples_per_s: float, flop: float, peak: float) -> float:
    """Model FLOP utilization, 0 to 1. flop: of a sample's forward and backward. peak: FLOP/s."""
    return samples_per_s * flop / peak


def run_bare(model: nn.Module, batches: Iterator[Batch], options: argparse.Namespace, sizes: Sizes) -> float:
    """Train with the bare loop. Returns samples per second of the second half of the steps."""
    optimizer, device = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), options.device
    for part in (options.steps - options.steps // 2, options.steps // 2):
        samples, began = 0, time.perf_counter()
        for inputs, targets in itertools.islice(batches, part):
            with torch.autocast(device.type, torch.bfloat16) if sizes.precision == "bf16" else nullcontext():
                loss = loss_of(model, inputs, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            samples += len(next(iter(inputs.values())))
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        taken_s = time.perf_counter() - began
    return samples / taken_s


def run_lockstep(row: Row, data: Path, batch: int, options: argparse.Namespace, sizes: Sizes) -> list[dict]:
    """Train with train.py. Returns its train records from the middle on; exits with its message if it fails."""
    kind, run = row.kind, data.parent / "run"
    settings = {
        "data": data, "run-dir": run, "device": options.device.type, "precision": sizes.precision, "strategy": "ddp",
        "global-batch-size": batch, "micro-batch-size": batch, "epochs": options.steps, "stop-after": options.steps,
        "log-every": options.steps // 4, "eval-every": 10**6, "save-every": 10**6,
        "threads": torch.get_num_threads()}
    settings |= {
        "task": TASKS[kind], "model": sizes.text_model, "max-length": sizes.tokens, "tokenizer": data / "tokenizer",
    } if kind in TASKS else {
        "model": sizes.image_model, "image-size": sizes.side, "augmentation": "shift" if kind == "image" else "photo"}
    settings |= {"cache": "jpeg"} if kind == "packed" else {}
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    words += ["--compile"] if row.is_compiled else []
    environment = {name: value for name, value in os.environ.items() if "RANK" not in name and "WORLD_SIZE" not in name}
    done = subprocess.run([sys.executable, "train.py", *words], cwd=ROOT, capture_output=True, text=True,
                          env=environment | {"LOCKSTEP_CACHE": str(data.parent / "cache")})
    if done.returncode != Exit.STOPPED:
        sys.exit(f"{row.name}: train.py ended with {done.returncode}:\n{done.stdout[-500:]}\n{done.stderr[-3000:]}")
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    shutil.rmtree(run)
    return [record for record in records if record["split"] == "train" and record["step"] >= options.steps // 2]


def speed_of(records: list[dict], batch: int) -> float:
    """Samples per second from the first of these train records to the last."""
    first, last = records[0], records[-1]
    began, ended = (datetime.fromisoformat(record["time"]) for record in (first, last))
    return (last["step"] - first["step"]) * batch / (ended - began).total_seconds()


def take_peak_mib(device: torch.device) -> float:
    """Peak memory of this process since the last call, in MiB; also frees the cache. 0 if torch cannot tell."""
    try:
        peak = torch.accelerator.max_memory_allocated(device) / 2**20
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats(device)
        return peak
    except (RuntimeError, ValueError):  # torch 2.11 on the CPU: ValueError
        return 0.0


def run_peer(row: Row, data: Path, batch: int, options: argparse.Namespace, sizes: Sizes) -> float | None:
    """Train with the row's peer. Returns samples per second of the second half; None if it has no peer here."""
    name, packages = ("trainer", ("transformers", "accelerate")) if row.kind in TASKS else ("timm", ("timm",))
    if row.kind == "image" or not all(map(find_spec, packages)):
        return None
    words = ["--data", data, "--batch", batch, "--steps", options.steps // 2, "--warm-up", options.steps // 2,
             "--precision", sizes.precision, "--device", options.device.type, "--scratch", data.parent / "scratch"]
    words += (["--task", TASKS[row.kind], "--model", data / "model", "--length", sizes.tokens] if row.kind in TASKS
              else ["--model", TIMMS.get(sizes.image_model, sizes.image_model), "--side", sizes.side])
    words += ["--compile"] if row.is_compiled else []
    done = subprocess.run([sys.executable, "-m", "benchmarks.peers", name, *map(str, words)], cwd=ROOT,
                          capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{row.name}: {name} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])["samples_per_s"]


def lay_out(row: Row, sizes: Sizes, count: int, root: Path) -> Path:
    """The folder of the row's data, written if it is missing; with texts also model/, which the peer trains.

    count: samples to train on; images at least two of each class.
    """
    data = root / f"{'jpeg' if row.kind == 'packed' else row.kind}-{count}"
    if not data.exists() and row.kind in TASKS:
        write_texts(data, sizes, count, row.kind == "text")
        write_model(row.kind, sizes, data)
    elif not data.exists():
        write_images(data, max(2 * sizes.classes, count), sizes.classes, sizes.side if row.kind == "image" else None)
    return data


def measure(row: Row, options: argparse.Namespace, sizes: Sizes, root: Path) -> list[str]:
    """Measure one row; returns its cells."""
    kind, device = row.kind, options.device
    batch = options.batch or (sizes.text_batch if kind in TASKS else sizes.image_batch)
    data = lay_out(row, sizes, options.steps * batch, root)
    model = build_model(kind, sizes, data)
    flop = flop_per_sample(model, example(kind, sizes, 2))
    model = model.to(device)
    if row.is_compiled:
        torch.compiler.reset()  # what an earlier row has compiled, train.py and the peer do not know
        compile_model(model)
    batches = (jpeg_batches(data, sizes, batch, device) if kind in ("jpeg", "packed")
               else itertools.repeat(to_device(example(kind, sizes, batch), device)))

    records, peaks, found = [], [0.0], {"ours": [], "bare": [], "peer": []}
    for number in range(sizes.rounds):
        for name in list(found)[::-1 if number % 2 else 1]:
            if name == "ours":
                records += (new := run_lockstep(row, data, batch, options, sizes))
                found[name].append(speed_of(new, batch))
            elif name == "bare":
                found[name].append(run_bare(model, batches, options, sizes))
                peaks.append(take_peak_mib(device))
            elif speed := run_peer(row, data, batch, options, sizes):
                found[name].append(speed)

    what = f"{sizes.text_model if kind in TASKS else sizes.image_model} x {batch}"
    switches = "".join(f", {name}={value}" for name, value in os.environ.items() if name.startswith("TORCH_"))
    rate = matrix_rate(device, sizes.precision)
    if not options.tiny:
        measured = {name: each for name, each in found.items() if each}
        append(f"gpu, {row.name}, {what}{switches}", "samples/s", measured, against="bare",
               ratios=ranges(measured, "bare"), hardware=options.name, products={sizes.precision: rate})
    ours, wait = median(found["ours"]), median(record["data_wait"] for record in records)
    memory = [max(record.get("memory", 0.0) for record in records), max(peaks)]
    beside = [cell for name in ("bare", "peer") for cell in (
        (f"{median(found[name]):.1f}", spread(ratios(found["ours"], found[name]))) if found[name]
        else ("-", "-"))]
    return [row.name, what, f"{ours:.1f}", *beside,
            f"{flop / 1e9:.3g}", f"{100 * mfu(ours, flop, options.peak):.1f} %" if options.peak else "-",
            f"{100 * mfu(ours, flop, rate):.1f} %", f"{100 * wait:.1f} %",
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
    parser.add_argument("--steps", type=at_least(4), help="optimizer steps per turn; default 40, 120 from files,"
                        " 160 of texts; tiny: 8")
    parser.add_argument("--batch", type=at_least(2), help="samples per step; default 256 images, 128 texts; tiny: 8")
    parser.add_argument("--rows", nargs="+", choices=ROWS, metavar="ROW", help=f"of {', '.join(ROWS)}")
    parser.add_argument("--time-limit", type=at_least(1.0), metavar="S", help="leave out rows that may end later")
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
    steps, left = options.steps, list(options.rows or [row for row in ROWS if not (options.tiny and "-" in row)])
    limit_s = options.time_limit or (float("inf") if options.rows else MOST_S)
    torch.set_float32_matmul_precision("high")  # TF32 where bf16 is not used, as Lockstep does
    torch.backends.cudnn.benchmark = True
    peak = f"{options.peak / 1e12:.6g} TFLOP/s" if options.peak else "unknown (--peak)"
    packages = ", ".join(f"{name} {number}" for name, number in versions().items())
    print(f"{options.name}, {packages}, {sizes.precision}, {available_cores()} cores; rounds: {sizes.rounds}, of"
          f" {steps or f'{sizes.steps} steps, {sizes.loaded_steps} from files, {sizes.text_steps} of texts'}\n"
          "MFU = Lockstep's samples/s x FLOP per sample / peak; FLOP of forward and backward, counted by torch's"
          f" FlopCounterMode on 2 samples; peak, dense bf16: {peak}\n"
          "of matrices: the same over what a product of large matrices reaches when the row is measured\n"
          f"{FORM(*HEAD)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        longest_s = 0.0
        try:
            while left:
                row, start_s = Row(left[0]), time.monotonic() - began
                if start_s + longest_s > limit_s:
                    break
                options.steps = (steps or row.steps(sizes)) // 4 * 4  # so that records fall on the middle and the end
                print(FORM(*measure(row, options, row.sizes(sizes), Path(folder))), flush=True)
                longest_s = max(longest_s, time.monotonic() - began - start_s)
                left.pop(0)
        except KeyboardInterrupt:  # a time limit from outside
            print("interrupted", flush=True)
    taken_s = time.monotonic() - began
    print(f"{taken_s:.0f} s{f'; not measured: --rows {chr(32).join(left)}' if left else ''}", flush=True)


if __name__ == "__main__":
    main(parse(sys.argv[1:]))
