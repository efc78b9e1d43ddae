"""`python -m benchmarks.shards`: the same images as a folder, in tar files and in Parquet files, beside other readers.

20,000 JPEGs of noise of 160 px, about 8 kB each. All take turns in one run, each in a process of its own: the first
and the second opening, files read in random order (webdataset: in its own), images through a DataLoader of one process
with torch's crop and flip (ours: with ours), and the memory that all this takes, as PSS. Warm; and, as root, cold: the
disk's cache is dropped before each process. Then train.py on the first three, to its first step, and on for STEPS.

Needs `pip install datasets webdataset` besides.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

from benchmarks.in_turn import about, append, in_turn
from benchmarks.made_images import photo
from benchmarks.processes import ROOT, output
from data.images.augment import PhotoTrain
from data.images.decode import EncodedImage, opened
from data.images.folder import ImageFolder
from data.shards.index import build_image_index
from data.splits import ValSplit

COUNT, CLASSES, SIDE, CROP = 20_000, 100, 160, 128
READS, LOADED, STEPS = {"warm": COUNT, "cold": 2_000}, 4_000, 100
DROP = Path("/proc/sys/vm/drop_caches")
PEERS = ("torchvision's ImageFolder", "webdataset", "Hugging Face datasets")
OURS = {"ours, folder": "folder", "ours, tar": "tar", "ours, Parquet imported": "parquet/*.parquet"}
COLUMNS = {"first": "first opening, s", "second": "second, s", "reads": "files/s", "loaded": "images/s",
           "memory": "PSS, MB"}


def write(root: Path) -> None:
    """The images in three formats: a folder; tar files by data.pack; Parquet files by Hugging Face datasets."""
    for number in range(COUNT):
        folder = root / "folder" / "train" / f"{number % CLASSES:04}"
        folder.mkdir(parents=True, exist_ok=True)
        photo(number, SIDE, SIDE).save(folder / f"{number:06}.jpg", quality=85)
    val = root / "folder" / "val" / "0000"
    val.mkdir(parents=True)
    photo(COUNT, SIDE, SIDE).save(val / "0.jpg", quality=85)
    output([sys.executable, "-m", "data.pack", root / "folder", "--output", root / "tar", "--shard-size", "20MB"], 1)
    from datasets import load_dataset
    from datasets.table import embed_table_storage

    (root / "parquet").mkdir()
    for split, num_shards in (("train", 8), ("validation", 1)):
        rows = load_dataset("imagefolder", data_dir=str(root / "folder"), cache_dir=str(root / "made"), split=split)
        rows = rows.with_format("arrow").map(embed_table_storage, batched=True)  # as push_to_hub does
        for number in range(num_shards):
            rows.shard(num_shards, number).to_parquet(root / "parquet" / f"{split}-{number}.parquet")


# --- one process

def measure(name: str, root: Path, cache: Path, state: str) -> None:
    """Print the figures of one reader as JSON."""
    before, began = pss(), time.perf_counter()
    read, load = reader(name, root, cache)
    figures = {"opening": time.perf_counter() - began}
    began = time.perf_counter()
    if {data[:2] for data in read(READS[state])} != {b"\xff\xd8"}:
        sys.exit("these are no JPEGs")
    figures["reads"] = READS[state] / (time.perf_counter() - began)
    figures["memory"] = pss() - before
    began, count = time.perf_counter(), 0
    for batch in load():
        count += len(batch)
        if count >= LOADED:
            break
    figures["loaded"] = count / (time.perf_counter() - began)
    print(json.dumps(figures))


def reader(name: str, root: Path, cache: Path) -> tuple[Callable[[int], Iterator[bytes]], Callable[[], Any]]:
    """Open a reader. Returns a function that reads a number of files, and one that returns batches of images."""
    order = np.random.default_rng(0).permutation(COUNT).tolist()
    reference = transforms.Compose([
        transforms.RandomResizedCrop(CROP), transforms.RandomHorizontalFlip(), transforms.PILToTensor()])
    batches = partial(DataLoader, batch_size=64, num_workers=1)
    if name in OURS:
        index = build_image_index(str(root / OURS[name]), ValSplit(0.1, 0), cache, lambda text: None).splits["train"]
        samples = ImageFolder(index, PhotoTrain(CROP), 0, EncodedImage)
        return (lambda count: (_bytes_at(index.path(number)) for number in order[:count]),
                lambda: batches(samples, sampler=[(0, number) for number in order],
                                collate_fn=lambda samples: samples))
    if name == PEERS[0]:
        folder = datasets.ImageFolder(root / "folder" / "train", reference)
        return (lambda count: (Path(folder.samples[number][0]).read_bytes() for number in order[:count]),
                lambda: batches(folder, sampler=order, collate_fn=lambda samples: samples))
    if name == PEERS[1]:
        import webdataset

        tars = sorted(map(str, (root / "tar" / "train").glob("*.tar")))
        stream = webdataset.WebDataset(tars, shardshuffle=False)
        images = webdataset.WebDataset(tars, shardshuffle=len(tars)).shuffle(1000).decode("pil").to_tuple("jpg", "cls")
        return (lambda count: (sample["jpg"] for sample, _ in zip(stream, range(count), strict=False)),
                lambda: batches(images.map(lambda pair: reference(pair[0])), collate_fn=lambda samples: samples))
    from datasets import Image, load_dataset

    rows = load_dataset("parquet", data_files=str(root / "parquet" / "train-*.parquet"), cache_dir=str(cache),
                        split="train")
    raw = rows.cast_column("image", Image(decode=False))
    shown = rows.with_transform(lambda batch: {"image": [reference(image.convert("RGB")) for image in batch["image"]]})
    return (lambda count: (raw[number]["image"]["bytes"] for number in order[:count]),
            lambda: batches(shown, sampler=order, collate_fn=lambda samples: samples))


def _bytes_at(path: str) -> bytes:
    with opened(path) as file:
        return file.read()


def pss() -> float:
    """MB of this process; what it shares counts in part."""
    return int(re.search(r"^Pss:\s+(\d+)", Path("/proc/self/smaps_rollup").read_text(), re.M)[1]) / 1000


# --- all of them in turn

def compared(name: str, root: Path, state: str) -> dict[str, float]:
    """The figures of COLUMNS of one reader."""
    with tempfile.TemporaryDirectory(dir=root) as cache:
        openings = []
        for _ in range(2):
            if state == "cold":
                os.sync()
                DROP.write_text("3")
            words = [sys.executable, "-m", "benchmarks.shards", "--measure", name, root, cache, state]
            openings.append(json.loads(output(words, 1).splitlines()[-1]))
    return openings[1] | {"first": openings[0]["opening"], "second": openings[1]["opening"]}


def trained(data: str, root: Path) -> dict[str, float]:
    """Seconds to the first step of a second start of train.py, and its images/s after that."""
    with tempfile.TemporaryDirectory(dir=root) as folder:
        words = [sys.executable, "train.py", "--data", root / data, "--device", "cpu", "--workers", 1, "--image-size",
                 32, "--augmentation", "photo", "--max-steps", STEPS, "--eval-every", STEPS * 10, "--log-every", 1,
                 "--global-batch-size", 64]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "LOCKSTEP_CACHE": str(root / "cache")}
        run, began, first = Path(folder) / "run", time.monotonic(), 0.0
        process = subprocess.Popen([*map(str, words), "--run-dir", str(run)], cwd=ROOT, env=environment,
                                   stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        while process.poll() is None:
            if not first and (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").stat().st_size:
                first = time.monotonic() - began
            time.sleep(0.005)
        if process.returncode:
            sys.exit(process.stderr.read())
        rates = [record["samples_per_s"] for record in map(json.loads, (run / "metrics.jsonl").open())
                 if record["split"] == "train"]
        return {"first step": first, "trained": median(rates[10:])}


def main(rounds: int) -> None:
    """Print the tables, and append their figures to results.jsonl."""
    states = ["warm", *["cold"] * os.access(DROP, os.W_OK)]
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        write(root)
        for state in states:
            rows = in_turn({name: partial(compared, name, root, state) for name in (*OURS, *PEERS)}, rounds)
            show(f"{COUNT} JPEGs of {SIDE} px, {state}", rows, COLUMNS)
        show("trainings of them", in_turn({name: partial(trained, data, root) for name, data in OURS.items()}, rounds),
             {"first step": "to the first step, s", "trained": "images/s in training"})


def show(what: str, found: dict[str, list[dict[str, float]]], columns: dict[str, str]) -> None:
    """Print a table: medians and ranges of each column."""
    print(f"\n{what}: n = {len(next(iter(found.values())))}; {about()}\n\n| | {' | '.join(columns.values())} |\n"
          + "|---" * (1 + len(columns)) + "|")
    for name, rows in found.items():
        print(f"| {name} | {' | '.join(spread([row[column] for row in rows]) for column in columns)} |", flush=True)
    for column, unit in columns.items():
        append(f"{what}: {column}", unit, {name: [row[column] for row in rows] for name, rows in found.items()})


def spread(values: list[float]) -> str:
    """The median and the range."""
    return "{} ({} to {})".format(*(f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
                                    for value in (median(values), min(values), max(values))))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shards")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--measure", nargs=4, metavar=("READER", "ROOT", "CACHE", "STATE"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        measure(given.measure[0], Path(given.measure[1]), Path(given.measure[2]), given.measure[3])
    else:
        main(given.rounds)
