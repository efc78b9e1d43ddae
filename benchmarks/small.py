"""`make small DATA=DIR`: what small data reach: with the defaults, with former ones, and with what a user might try.

Twelve cells of real data. A row is one command, or one yardstick that needs no training: it is measured once, and
appended to small.jsonl beside this file, so that the same command goes on. A figure is top1 of RUN/model on val, in
percent. The best of six settings is chosen on val, too: it flatters them.
Folders in DIR: sst2, agnews, ants_bees, cifar10, imagenet_samples; see accuracy.py. Of the ImageNet photos the classes
are groups of ten: hardly anything can be learnt.
"""

import argparse
import csv
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from benchmarks.pretrained import minilm_folder, write_lite0
from benchmarks.processes import ROOT

RUNS = ROOT / "runs" / "small"
LITE0 = RUNS / "lite0.pth"
TEXT, IMAGE = "--task text-classification --model MINILM", f"--model timm/tf_efficientnet_lite0 --weights {LITE0}"
FORMER = {  # the defaults up to 0.13; of these two models the rate is what it was
    TEXT: "--head-init random --epochs 3 --global-batch-size 32",
    IMAGE: "--head-init random --epochs 30 --global-batch-size 64"}
SIX = {  # what a patient user might try, besides the former defaults
    TEXT: ("--epochs 10", "--epochs 10 --global-batch-size 8", "--epochs 20 --global-batch-size 16",
           "--epochs 10 --lr 1e-4", "--epochs 20 --layer-decay 0.9", "--epochs 20 --freeze backbone --lr 1e-3"),
    IMAGE: ("--freeze backbone --lr 1e-3", "--freeze backbone --lr 3e-3", "--lr 1e-3", "--global-batch-size 16",
            "--lr 1e-3 --global-batch-size 16", "--epochs 60")}
SEEDS = 3  # in the cells that have several


@dataclass(frozen=True)
class Cell:
    """Data, cut to a size, and the model that is fine-tuned on them."""

    name: str
    source: str  # a folder in DIR
    each: int  # training samples of each class
    words: str
    num_val: int | None = None  # None: all
    columns: tuple[str, ...] = ()  # of texts
    has_seeds: bool = False

    @property
    def kind(self) -> str:
        """TEXT or IMAGE."""
        return TEXT if self.words.startswith(TEXT) else IMAGE


CELLS = (
    Cell("sst2-200", "sst2", 100, TEXT, columns=("text",), has_seeds=True),
    Cell("sst2-1000", "sst2", 500, TEXT, columns=("text",)),
    Cell("ag-80", "agnews", 20, TEXT, 300, ("title",)),
    Cell("ag-200", "agnews", 50, TEXT, 300, ("title",), has_seeds=True),
    Cell("ag-pairs-200", "agnews", 50, f"{TEXT} --text-column title,description", 300, ("title", "description")),
    Cell("ag-pairs-1000", "agnews", 250, f"{TEXT} --text-column title,description", 300, ("title", "description")),
    Cell("ants-96", "ants_bees", 20, f"{IMAGE} --image-size 96", has_seeds=True),
    Cell("ants-224", "ants_bees", 20, IMAGE, has_seeds=True),
    Cell("ants-50-96", "ants_bees", 50, f"{IMAGE} --image-size 96"),
    Cell("cifar-200", "cifar10", 20, f"{IMAGE} --image-size 64", 500, has_seeds=True),
    Cell("cifar-500", "cifar10", 50, f"{IMAGE} --image-size 64", 500),
    Cell("photos", "imagenet_samples", 8, f"{IMAGE} --image-size 96"),
)


def seeds_of(cell: Cell, setting: str) -> range:
    """Those with which a setting is measured; the six with one."""
    return range(SEEDS if cell.has_seeds and setting in ("", "former") else 1)


def rows_of(cell: Cell) -> Iterator[tuple[str, int]]:
    """(setting, seed) of each row; "" = the defaults."""
    settings = ("", "former", *SIX[cell.kind], "embeddings", *(("tfidf",) if cell.kind is TEXT else ()))
    return ((setting, seed) for setting in settings for seed in seeds_of(cell, setting))


def lay_out(cell: Cell, data: Path) -> Path:
    """RUNS/data/CELL: the first samples of each class, in a random order of its own; what is there is complete."""
    folder, source = RUNS / "data" / cell.name, data / cell.source
    partial = folder.with_suffix(".tmp")
    if folder.exists():
        return folder
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for split in ("train", "val"):
        if cell.kind is TEXT:
            _write_table(cell, source, split, partial)
            continue
        is_held_out = not (source / "val").is_dir()  # the ImageNet photos have no val
        for folder_of_class in sorted((source / ("train" if is_held_out else split)).iterdir()):
            files = sorted(folder_of_class.iterdir())
            random.Random(0).shuffle(files)
            if split == "train":
                files = files[:cell.each]
            else:
                files = files[cell.each:] if is_held_out else files[:cell.num_val and cell.num_val // 10]
            (partial / split / folder_of_class.name).mkdir(parents=True)
            for file in files:
                shutil.copy(file, partial / split / folder_of_class.name)
    partial.rename(folder)
    return folder


def _write_table(cell: Cell, source: Path, split: str, folder: Path) -> None:
    [file] = source.glob(f"{split}.*")
    with file.open(newline="") as opened:
        rows = list(csv.DictReader(opened, delimiter="\t", quoting=csv.QUOTE_NONE) if file.suffix == ".tsv" else
                    csv.DictReader(opened))
    random.Random(0).shuffle(rows)
    chosen, counts = [], dict.fromkeys({row["label"] for row in rows}, 0)
    most = cell.each if split == "train" else (cell.num_val or len(rows)) // (len(counts) if cell.num_val else 1)
    for row in rows:
        if counts[row["label"]] < most:
            counts[row["label"]] += 1
            chosen.append(row)
    with (folder / f"{split}.csv").open("w", newline="") as opened:
        writer = csv.DictWriter(opened, [*cell.columns, "label"], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(chosen)


def measure(cell: Cell, setting: str, seed: int, data: Path) -> dict:
    """A row: top1 in percent, seconds, steps; of a run with a fitted head that of step 0, too."""
    folder, began = lay_out(cell, data), time.monotonic()
    if setting == "tfidf":
        return {"top1": tfidf(folder, cell.columns), "s": time.monotonic() - began}
    if setting == "embeddings":
        return {"top1": frozen(cell, folder), "s": time.monotonic() - began}
    run = RUNS / "run" / re.sub(r"[^\w.]+", "-", f"{cell.name} {setting} {seed}")
    train(run, words_of(cell, folder, run, setting, seed))
    seconds = time.monotonic() - began
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    values = [(record["step"], 100 * record["top1"]) for record in records if record["split"] == "val"]
    shutil.rmtree(run)
    row = {"top1": max(top1 for _, top1 in values), "s": seconds, "steps": values[-1][0]}
    return row | ({"head": values[0][1]} if values[0][0] == 0 else {})


def words_of(cell: Cell, data: Path, run: Path, setting: str, seed: int) -> list[str]:
    """The command line of a row, on one core; of a flag that is given twice the last one counts."""
    words = cell.words + (f" {FORMER[cell.kind]}" if setting else "") + (f" {setting}" if setting != "former" else "")
    words = [minilm_folder() if word == "MINILM" else word for word in words.split()]
    flags = dict(zip(words[::2], words[1::2], strict=True)) | {
        "--data": str(data), "--run-dir": str(run), "--seed": str(seed), "--threads": "1", "--workers": "0",
        "--device": "cpu"}
    return [word for pair in flags.items() for word in pair]


def train(run: Path, words: list[str]) -> None:
    """One run. Exits if it fails."""
    shutil.rmtree(run, ignore_errors=True)
    command = [sys.executable, "train.py", *words]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"{' '.join(command)}\n{result.stdout[-2000:]}{result.stderr[-2000:]}")


def texts_of(folder: Path, split: str, columns: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Texts and labels of a table that lay_out wrote."""
    with (folder / f"{split}.csv").open(newline="") as opened:
        rows = list(csv.DictReader(opened))
    return [" ".join(row[name] for name in columns) for row in rows], [row["label"] for row in rows]


def tfidf(folder: Path, columns: tuple[str, ...]) -> float:
    """Words and pairs of words, and a linear model."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    model = make_pipeline(TfidfVectorizer(ngram_range=(1, 2)), LogisticRegression(max_iter=1000))
    model.fit(*texts_of(folder, "train", columns))
    return 100 * model.score(*texts_of(folder, "val", columns))


def frozen(cell: Cell, folder: Path) -> float:
    """A logistic regression on the features that models.predict --model writes; its C by five folds."""
    import numpy as np
    from sklearn.linear_model import LogisticRegressionCV

    features, labels = {}, {}
    for split in ("train", "val"):
        name, source = RUNS / f"{cell.name}-{split}.npy", folder / (split if cell.kind is IMAGE else f"{split}.csv")
        size = cell.words.partition("--image-size ")[2]
        model = ["--model", minilm_folder()] if cell.kind is TEXT else [
            "--model", "timm/tf_efficientnet_lite0", "--weights", LITE0, *(["--image-size", size] if size else [])]
        subprocess.run([sys.executable, "-m", "models.predict", *model, source, "--text-column", ",".join(cell.columns),
                        "--embeddings", name, "--output", f"{name}.csv"], cwd=ROOT, check=True, capture_output=True)
        features[split] = np.load(name)
        labels[split] = texts_of(folder, split, cell.columns)[1] if cell.kind is TEXT else [
            path.parent.name for path in sorted(source.rglob("*")) if path.is_file()]
    model = LogisticRegressionCV(Cs=[0.01, 0.1, 1, 10, 100], cv=5, max_iter=2000)
    model.fit(features["train"], labels["train"])
    return 100 * model.score(features["val"], labels["val"])


def table(rows: list[dict]) -> str:
    """In Markdown, a line for each cell: means over seeds, the best of six by its name, seconds."""
    lines = ["| cell | former | now | head | frozen features | TF-IDF | best of six | s before, now |",
             "|---" * 8 + "|"]
    for cell in CELLS:
        found = {}
        for row in rows:
            if row["cell"] == cell.name:
                found.setdefault(row["setting"], []).append(row)
        tried = {name: of[0]["top1"] for name, of in found.items() if name in SIX[cell.kind]}
        best = max(tried, key=tried.get, default="")

        def figure(name: str, key: str = "top1", found: dict = found) -> str:
            values = [row[key] for row in found.get(name, ()) if key in row]
            spread = f" ({min(values):.1f} to {max(values):.1f})" if len(values) > 1 else ""
            return f"{mean(values):.1f}{spread}" if values else ""

        cells = (figure("former"), figure(""), figure("", "head"), figure("embeddings"), figure("tfidf"),
                 f"{tried[best]:.1f} `{best}`" if best else "", f"{figure('former', 's')}, {figure('', 's')}")
        lines.append(f"| {cell.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(data: Path, only: str, setting: str | None, jobs: int) -> None:
    """Measure what is not in the file yet, and print the table."""
    file = Path(__file__).with_name("small.jsonl")
    RUNS.mkdir(parents=True, exist_ok=True)
    if not LITE0.exists():
        write_lite0(str(LITE0))
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    done = {(row["cell"], row["setting"], row["seed"]) for row in rows}

    def work(what: tuple[Cell, str, int]) -> None:
        cell, setting, seed = what
        row = {"cell": cell.name, "setting": setting, "seed": seed, **measure(*what, data)}
        rows.append(row)
        with file.open("a") as opened:
            opened.write(json.dumps(row) + "\n")
        print(row, file=sys.stderr, flush=True)

    for cell in CELLS:
        lay_out(cell, data)
    wanted = [(cell, name, seed) for cell in CELLS if only in cell.name for name, seed in rows_of(cell)
              if (cell.name, name, seed) not in done and setting in (None, name)]
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(work, wanted))
    print(table(rows))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="make small DATA=DIR SMALL='...'")
    parser.add_argument("data", type=Path, help="a folder with sst2, agnews, ants_bees, cifar10, imagenet_samples")
    parser.add_argument("--only", default="", help="cells whose name has this in it")
    parser.add_argument("--setting", help='this setting alone: "" = the defaults, former, tfidf, embeddings, or flags')
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="runs at a time")
    arguments = parser.parse_args()
    main(arguments.data, arguments.only, arguments.setting, arguments.jobs)
