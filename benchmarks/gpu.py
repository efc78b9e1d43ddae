"""`make gpu-bench`: Lockstep's speed, MFU, data wait and memory on this machine's accelerator, against a bare loop.

Lockstep is train.py as a user starts it, in a process of its own; its figures are those of its train records. The bare
loop is in this file: the same model, precision, batch and device, fused AdamW; no records, no checks, no saves. Both
are one process. They alternate (A B A B); figures are medians over the second half of every turn's steps.

    row     Lockstep reads                                    the bare loop reads
    image   uncompressed images of the model's size, moved    one batch that stays on the device
            (--augmentation shift): little work to load
    jpeg    JPEGs of 500 x 375 px, random crops, flips        the same files by torchvision's ImageFolder (Pillow),
                                                              with as many processes as Lockstep's --workers auto
    text    texts of random words, to classify                one batch that stays on the device
    mlm     the same texts, 15 % of the tokens to predict     one batch that stays on the device
    ...-compiled: the same with --compile, and with model.compile()

It makes all data itself. Without a package index and without .venv: python3 -m benchmarks.gpu
"""

import argparse
import copy
import csv
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
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageChops
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode
from torchvision import datasets, transforms
from transformers import PreTrainedTokenizerFast

from data.tokenizer import SPECIAL, load_tokenizer
from models.bert import EncoderSpec, SparsePrediction, build_encoder
from models.tasks import load_task
from models.vision import build_classifier
from utils.errors import Exit
from utils.hardware.cores import available_cores
from utils.settings.config import TextModelOptions

ROOT = Path(__file__).parents[1]
ROWS = ("image", "text", "mlm", "jpeg", "image-compiled", "text-compiled", "mlm-compiled", "jpeg-compiled")
TASKS = {"text": "text-classification", "mlm": "masked-lm"}
LATEST_S = 420  # no row begins later unless --rows names it, so that all ends within ten minutes
DISTINCT = 128  # image files; the others are links to them
PEAKS = {  # dense bf16 FLOP/s by the makers' data sheets; the first name that is in the device's counts
    "B200": 2250e12, "H200 NVL": 835e12, "H100 NVL": 835e12, "H100 PCIe": 756e12, "H200": 989e12, "H100": 989e12,
    "A100": 312e12, "L40S": 362e12, "L4": 121e12, "MI300X": 1307e12}
FORM = "{:<14} {:<16} {:>10} {:>8} {:>22} {:>12} {:>6} {:>9} {:>15}".format
HEAD = ("row", "model x batch", "Lockstep/s", "bare/s", "ratio", "GFLOP/sample", "MFU", "data wait", "MiB, bare's")
Batch = tuple[dict[str, Tensor], Tensor]  # inputs by name, targets


@dataclass(frozen=True)
class Sizes:
    """How large models and data are, and how long it takes."""

    image_model: str = "resnet50"
    side: int = 224  # px
    classes: int = 1000
    image_batch: int = 256
    text_model: str = "bert-base"
    tokens: int = 128
    vocabulary: int = 30522
    text_batch: int = 128
    precision: str = "bf16"
    steps: int = 80
    rounds: int = 2


TINY = Sizes("resnet18", 32, 10, 8, "bert-tiny", 16, 200, 8, "fp32", steps=8, rounds=1)


def peak_of(name: str) -> float | None:
    """Dense bf16 FLOP/s of a device by its name; None where the table lacks it."""
    return next((peak for known, peak in PEAKS.items() if re.search(rf"\b{known}\b", name)), None)


def mfu(samples_per_s: float, flop: float, peak: float) -> float:
    """Model FLOP utilisation, 0 to 1: FLOP/s that the model needs at this speed, over the peak. flop: per sample."""
    return samples_per_s * flop / peak


def flop_per_sample(model: nn.Module, batch: Batch) -> float:
    """FLOP of one forward and backward, counted on the meta device: nothing is computed."""
    inputs, targets = to_device(batch, "meta")
    with FlopCounterMode(display=False) as counter:
        loss_of(copy.deepcopy(model).to("meta"), inputs, targets).backward()
    return counter.get_total_flops() / len(next(iter(batch[0].values())))


def write_images(root: Path, sizes: Sizes, count: int, is_jpeg: bool) -> None:
    """train/CLASS/* and val/CLASS/*: smooth noise with grain; as JPEGs they are about as long as photos."""
    rng, made = np.random.default_rng(0), []
    width, height = (500, 375) if is_jpeg else (sizes.side, sizes.side)
    for number in range(count + sizes.classes):
        folder = root / ("train" if number < count else "val") / f"{number % sizes.classes:04}"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{number}.{'jpg' if is_jpeg else 'bmp'}"
        if len(made) == DISTINCT:
            os.link(made[number % DISTINCT], path)
            continue
        coarse = Image.fromarray(rng.integers(256, size=(24, 32, 3), dtype=np.uint8)).resize((width, height))
        grain = Image.fromarray(rng.integers(24, size=(height, width, 3), dtype=np.uint8))
        ImageChops.add(coarse, grain, offset=-12).save(path, quality=90)
        made.append(path)


def write_texts(root: Path, sizes: Sizes, count: int) -> None:
    """train.csv, val.csv, tokenizer/: a word is a token, and every text fills the model's input."""
    rng, words = np.random.default_rng(0), [f"w{number}" for number in range(sizes.vocabulary - len(SPECIAL))]
    root.mkdir()
    for name, rows in (("train", count), ("val", 8)):
        texts = rng.choice(words, (rows, sizes.tokens - 2))  # [CLS] and [SEP] are the other two
        with (root / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("label", "text"), *((i % 2, " ".join(text)) for i, text in enumerate(texts))])
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate([*SPECIAL, *words])}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[(name, SPECIAL.index(name)) for name in ("[CLS]", "[SEP]")])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **{f"{name.strip('[]').lower()}_token": name for name in SPECIAL},
        model_input_names=["input_ids", "token_type_ids", "attention_mask"]).save_pretrained(root / "tokenizer")


def build_model(kind: str, sizes: Sizes, data: Path) -> nn.Module:
    """Lockstep's own model of a row, on the CPU."""
    if kind not in TASKS:
        return build_classifier(sizes.image_model, sizes.classes, sizes.side).to(memory_format=torch.channels_last)
    spec = EncoderSpec(load_task(TASKS[kind]).head, load_tokenizer(str(data / "tokenizer")), sizes.tokens,
                       ("0", "1") if kind == "text" else ())
    model = build_encoder(spec, TextModelOptions(model=sizes.text_model), None, None)
    model.sparse = SparsePrediction(model) if kind == "mlm" else None
    return model


def example(kind: str, sizes: Sizes, size: int) -> Batch:
    """A batch of noise, in the shapes of those that Lockstep makes of the row's data."""
    if kind not in TASKS:
        images = torch.randn(size, 3, sizes.side, sizes.side).to(memory_format=torch.channels_last)
        return {"images": images}, torch.randint(sizes.classes, (size,))
    ids = torch.randint(len(SPECIAL), sizes.vocabulary, (size, sizes.tokens))
    inputs = {"input_ids": ids, "token_type_ids": torch.zeros_like(ids)}  # nothing is padded: no mask, as in training
    if kind == "text":
        return inputs, torch.randint(2, (size,))
    predicted = 1 + torch.arange(max(1, round(0.15 * (sizes.tokens - 2))))  # of each text
    positions = (torch.arange(size)[:, None] * sizes.tokens + predicted).flatten()  # [P], into the flattened [B x T]
    return inputs | {"positions": positions}, torch.randint(sizes.vocabulary, positions.shape)


def to_device(batch: Batch, device: torch.device | str) -> Batch:
    """The same batch there."""
    inputs = {name: tensor.to(device, non_blocking=True) for name, tensor in batch[0].items()}
    return inputs, batch[1].to(device, non_blocking=True)


def loss_of(model: nn.Module, inputs: dict[str, Tensor], targets: Tensor) -> Tensor:
    """Mean cross-entropy in float32."""
    if "images" in inputs:
        logits = model(inputs["images"])
    elif "positions" in inputs:
        tokens = {name: tensor for name, tensor in inputs.items() if name != "positions"}
        logits = model.sparse.logits(model, tokens, inputs["positions"])
    else:
        logits = model(**inputs).logits
    return F.cross_entropy(logits.float(), targets)


def jpeg_batches(folder: Path, sizes: Sizes, batch: int, device: torch.device) -> Iterator[Batch]:
    """torchvision's usual augmentation and torch's loader; for ever."""
    prepare = transforms.Compose([
        transforms.RandomResizedCrop(sizes.side), transforms.RandomHorizontalFlip(), transforms.PILToTensor()])
    workers = max(1, min(1 if device.type == "cpu" else 8, available_cores() - 1))
    loader = DataLoader(datasets.ImageFolder(folder / "train", prepare), batch, shuffle=True, drop_last=True,
                        num_workers=workers, persistent_workers=True, pin_memory=device.type != "cpu")
    while True:
        for images, targets in loader:
            inputs, targets = to_device(({"images": images}, targets), device)
            yield {"images": (inputs["images"] / 127.5 - 1).to(memory_format=torch.channels_last)}, targets


def run_bare(model: nn.Module, batches: Iterator[Batch], options: argparse.Namespace, sizes: Sizes) -> list[float]:
    """Samples per second of the later windows of `every` steps."""
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
    """The later train records of a run of train.py. Exits with its message if it fails."""
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
    """Peak memory of this process since the last call, which also frees what is cached; 0 where torch does not know."""
    try:
        peak = torch.accelerator.max_memory_allocated(device) / 2**20
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats(device)
        return peak
    except RuntimeError:
        return 0.0


def measure(row: str, options: argparse.Namespace, sizes: Sizes, root: Path) -> list[str]:
    """The row of the table."""
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
    """The arguments; `device` is resolved, `name` is its name, `peak` is in FLOP/s or None."""
    def at_least(least: float):
        def number(text: str) -> float:
            if not (value := type(least)(text)) >= least:
                raise argparse.ArgumentTypeError(f"{text}: must be at least {least}")
            return value
        return number

    parser = argparse.ArgumentParser(prog="python3 -m benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="auto", help="auto = the accelerator, else the CPU")
    parser.add_argument("--steps", type=at_least(4), help="optimizer steps of a turn; default 80; tiny: 8")
    parser.add_argument("--batch", type=at_least(2), help="samples per step; default 256 images, 128 texts; tiny: 8")
    parser.add_argument("--rows", nargs="+", choices=ROWS, metavar="ROW", help=f"of {', '.join(ROWS)}")
    parser.add_argument("--peak", type=at_least(0.001), metavar="TFLOPS", help="bf16 peak, where the table lacks it")
    parser.add_argument("--tiny", action="store_true", help="small models, images and texts, fp32: for a try anywhere")
    options = parser.parse_args(words)
    found = torch.accelerator.current_accelerator(check_available=True)
    there = {device.type: device for device in (found, torch.device("cpu")) if device}
    if options.device not in ("auto", *there):
        parser.error(f"--device {options.device}: torch {torch.__version__} sees {' and '.join(there)} here")
    options.device = there.get(options.device) or next(iter(there.values()))
    ask = getattr(torch.get_device_module(options.device), "get_device_name", None)
    options.name = ask() if ask else options.device.type
    options.peak = options.peak * 1e12 if options.peak else peak_of(options.name)
    return options


def main(options: argparse.Namespace) -> None:
    """Print the table, each row when it is done."""
    sizes, began = TINY if options.tiny else Sizes(), time.monotonic()
    options.steps = options.steps or sizes.steps
    options.every = max(1, options.steps // 8)
    torch.set_float32_matmul_precision("high")  # TF32 where bf16 is not: as Lockstep's --tf32 auto
    torch.backends.cudnn.benchmark = True
    peak = f"{options.peak / 1e12:.6g} TFLOP/s" if options.peak else "unknown (--peak)"
    print(f"{options.name}, torch {torch.__version__}, {sizes.precision}, {available_cores()} cores; rounds:"
          f" {sizes.rounds}, of {options.steps} steps\n"
          "MFU = Lockstep's samples/s x FLOP per sample / peak; FLOP of forward and backward, counted by torch's"
          f" FlopCounterMode on 2 samples; peak, dense bf16: {peak}\n{FORM(*HEAD)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for row in options.rows or [row for row in ROWS if not (options.tiny and "-" in row)]:
            if not options.rows and time.monotonic() - began > LATEST_S:
                print(f"{row:<14} left out: {LATEST_S} s are over; --rows {row} measures it", flush=True)
            else:
                print(FORM(*measure(row, options, sizes, Path(folder))), flush=True)
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main(parse(sys.argv[1:]))
