"""`python -m benchmarks.training`: training speed of train.py's defaults beside what people would use instead.

Each contender is a process of its own, as a user starts it; they take turns. Rows: resnet18 and resnet50 from JPEGs of
500 x 375 at 224 px; sst2, a pretrained MiniLM on sentences; mlm, its masked tokens, LENGTH at a time. All have the same
cores and batch, and compute in bf16 where the hardware does, but torchvision's reference in fp32, as it does on a CPU.
Ratios are to the fastest peer first, then to the others.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from statistics import median

import torch

from benchmarks.in_turn import in_turn, report
from benchmarks.made_images import write_images
from benchmarks.pretrained import minilm_folder
from benchmarks.processes import output, torchrun
from data.sampler import WINDOW
from utils.hardware.cores import available_cores
from utils.numerics.precision import hardware_precision

ROWS = {  # what is trained, and the unit of its speed
    "resnet18": ("resnet18 at 224 px", "images/s"),
    "resnet50": ("resnet50 at 224 px", "images/s"),
    "sst2": ("MiniLM on SST-2", "samples/s"),
    "mlm": ("masked tokens with MiniLM", "samples of 128 tokens/s")}
IMAGE_BATCH, TEXT_BATCH = 32, 32
IMAGES = IMAGE_BATCH * 12  # on disk: no epoch ends while it is measured
LOGGED_EVERY = 10  # steps of train.py, as by default

# Batch; steps that warm up; steps that are measured. Of sentences these are a whole window: train.py has batches of all
# lengths in it, in random order, and the Trainer, whose windows are as large, begins each with the longest.
OF_IMAGES = {"batch": IMAGE_BATCH, "warm_up": 2, "steps": 10}
OF_SENTENCES = {"batch": TEXT_BATCH, "warm_up": WINDOW, "steps": WINDOW}
OF_MASKED = {"batch": TEXT_BATCH, "warm_up": LOGGED_EVERY, "steps": 20}
LENGTH = 128  # tokens


def main(rows: list[str], rounds: int, data: Path | None) -> None:
    """Measure and report the rows. data: a folder with sst2 and wikitext2, which two of them read."""
    precision = hardware_precision(torch.device("cpu"))
    with tempfile.TemporaryDirectory() as temporary:
        for row in rows:
            if data is None and not row.startswith("resnet"):
                print(f"{row} is left out: it needs --data DIR")
                continue
            words, steps = of_train(row, Path(temporary), data)
            contenders, peers = {"ours": ours(*words, **steps)}, peers_of(row, words, steps, precision)
            if row == "sst2":  # the same cores: each of the two has half of the threads
                contenders["ours, 2 processes"] = ours(*words, **steps, processes=2)
            found = in_turn(contenders | peers, rounds)
            fastest_first = sorted(peers, key=lambda name: median(found[name]), reverse=True)
            what, unit = ROWS[row]
            report(f"training, {what}, batch {steps['batch']}, {precision}", unit, found, *fastest_first,
                   *(["ours"] if len(contenders) > 1 else []))


def peers_of(row: str, words: list[object], steps: dict[str, int], precision: str) -> dict[str, Callable[[], float]]:
    """What train.py is compared with. words, steps: as `of_train` gives them."""
    if row.startswith("resnet"):
        return {f"{name}, {kind}": peer(name, *words, "--precision", kind, **steps)
                for name, kind in (("bare", precision), ("timm", precision), ("torchvision", "fp32"))}
    words = [*words, "--precision", precision, "--attention"]
    return {f"Trainer, {attention}": peer("trainer", *words, attention, **steps) for attention in ("sdpa", "eager")}


def of_train(row: str, temporary: Path, data: Path | None) -> tuple[list[object], dict[str, int]]:
    """train.py's words for a row, and the batch and steps of `ours`. What it reads is written if need be."""
    if row.startswith("resnet"):
        if not (folder := temporary / "images").exists():
            write_images(folder, IMAGES, classes=100)
        return ["--data", folder, "--model", row], OF_IMAGES
    if row == "sst2":
        return ["--task", "text-classification", "--data", data / row, "--model", minilm_folder()], OF_SENTENCES
    blocks = write_blocks(data / "wikitext2", temporary)
    return ["--task", "masked-lm", "--data", blocks, "--model", minilm_folder()], OF_MASKED


def write_blocks(source: Path, target: Path) -> Path:
    """wikitext2 as texts that fill LENGTH tokens each, so that all train on as many; their folder, `target`/blocks."""
    from transformers import AutoTokenizer
    tokenizer, width = AutoTokenizer.from_pretrained(minilm_folder()), LENGTH - 2  # [CLS] and [SEP] are the other two
    (folder := target / "blocks").mkdir()
    for split in ("train", "val"):
        ids = tokenizer((source / f"{split}.txt").read_text(), add_special_tokens=False)["input_ids"]
        texts = [tokenizer.decode(ids[at:at + width]) for at in range(0, len(ids) - width, width)]
        full = [text for text in texts if len(tokenizer(text)["input_ids"]) == LENGTH]  # a few change on the way
        (folder / f"{split}.txt").write_text("\n".join(full) + "\n")
    return folder


def ours(*words: object, batch: int, warm_up: int, steps: int, processes: int = 1) -> Callable[[], float]:
    """Samples per second of `steps` steps of train.py, after those that warm up."""
    every = min(LOGGED_EVERY, warm_up)  # the last that warms up is logged, and the last

    def measure() -> float:
        launcher = [sys.executable] if processes == 1 else torchrun(processes)
        with tempfile.TemporaryDirectory() as run:
            output([*launcher, "train.py", *words, "--run-dir", run, "--max-steps", warm_up + steps,
                    "--log-every", every, "--global-batch-size", batch, "--eval-every", 10**6, "--save-every", 10**6,
                    "--device", "cpu"],
                   available_cores() // processes)
            records = map(json.loads, (Path(run) / "metrics.jsonl").read_text().splitlines())
            ends = {record["step"]: datetime.fromisoformat(record["time"]) for record in records
                    if record["split"] == "train"}
        return steps * batch / (ends[warm_up + steps] - ends[warm_up]).total_seconds()

    return measure


def peer(*words: object, batch: int, warm_up: int, steps: int) -> Callable[[], float]:
    """Samples per second of `steps` steps of a process of benchmarks/peers.py, after those that warm up."""
    def measure() -> float:
        with tempfile.TemporaryDirectory() as scratch:
            text = output([sys.executable, "-m", "benchmarks.peers", *words, "--batch", batch, "--warm-up",
                           warm_up, "--steps", steps, "--scratch", scratch], available_cores())
        return json.loads(text.splitlines()[-1])["samples_per_s"]

    return measure


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training")
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--data", type=Path, help="a folder with sst2 and wikitext2, as in benchmarks/accuracy.py")
    arguments = parser.parse_args()
    main(arguments.rows.split(","), arguments.rounds, arguments.data)
