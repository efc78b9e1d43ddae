"""`make recipes DATA=DIR`: what the techniques of docs/recipes.md do on small real data, beside what was expected.

A row is two commands that differ in one technique, on the same seeds. What was expected is written here before a row is
measured. A run takes about a minute of one core, and there are as many at a time as there are cores. Finished ones stay
in runs/recipes: the same command continues, and computes nothing twice. A row whose runs are all new is appended to
results.jsonl, because older runs may be another version's.
Folders in DIR: cifar10, agnews, sst2, ants_bees; see accuracy.py.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Literal

from benchmarks.in_turn import append
from benchmarks.pretrained import minilm_folder, write_lite0
from benchmarks.processes import ROOT

RUNS = ROOT / "runs" / "recipes"
LITE0 = RUNS / "lite0.pth"
PHOTOS = {"train": 50, "val": 100}  # files of each class of CIFAR-10
UNEVEN_PHOTOS = (10, 100)  # to train on where the classes are imbalanced: of the first class, the second, and so on
LINES = {"agnews": {"train": 2000, "val": 1000}, "sst2": {"train": 400, "val": 400}}  # a line is a row
TEXT = "--task text-classification"


@dataclass(frozen=True)
class Base:
    """What a technique is tried on."""

    what: str  # docs/recipes.md explains it
    data: str  # a folder that lay_out makes
    words: str


SMALL = Base("photos", "cifar", "--epochs 12 --eval-every 1000")  # evaluated at the end alone
STEADY = Base("photos, `constant`", "cifar", f"{SMALL.words} --schedule constant")
UNEVEN = Base("uneven photos", "imbalanced", SMALL.words)
NEWS = Base("titles", "agnews", f"{TEXT} --text-column title --model bert-tiny --epochs 9")
STEADY_NEWS = Base("titles, `constant`", "agnews",
                   NEWS.words.replace("--epochs 9", "--epochs 18 --schedule constant"))
LARGE = Base("large photos", "ants_bees", f"--model timm/tf_efficientnet_lite0 --weights {LITE0} --epochs 5"
             " --head-init random --global-batch-size 32 --eval-every 1000")
FILMS = Base("sentences", "sst2", f"{TEXT} --model MINILM --head-init random --epochs 3 --eval-every 1000")


@dataclass(frozen=True)
class Recipe:
    """A row."""

    technique: str  # settings
    base: Base
    expected: Literal["higher", "equal", "lower"]  # the figure with it, to that without it
    figure: str = "top1"  # of the last evaluation; best: of RUN/model


RECIPES = [
    Recipe("--schedule constant", SMALL, "lower"),
    Recipe("--schedule cosine", NEWS, "equal"),
    Recipe("--schedule step", NEWS, "equal"),
    Recipe("--ema-decay 0.99", STEADY, "higher", "ema_top1"),
    Recipe("--augmentation shift", SMALL, "lower"),
    Recipe("--auto-augment trivialaugment", SMALL, "lower"),
    Recipe("--auto-augment randaugment", SMALL, "lower"),
    Recipe("--random-erasing 0.25", SMALL, "equal"),
    Recipe("--mixup 0.2", SMALL, "equal"),
    Recipe("--cutmix 1", SMALL, "lower"),
    Recipe("--label-smoothing 0.1", SMALL, "equal"),
    Recipe("--loss bce", SMALL, "equal"),
    Recipe("--class-weights balanced", UNEVEN, "higher", "macro_f1"),
    Recipe("--dropout 0.3", NEWS, "higher"),
    Recipe("--early-stop-patience 2", STEADY_NEWS, "equal", "best"),
    Recipe("--freeze backbone --lr 1e-3", FILMS, "lower"),
    Recipe("--freeze 3", FILMS, "equal"),
    Recipe("--layer-decay 0.8", FILMS, "equal"),
    Recipe("--cache jpeg", LARGE, "equal"),
    Recipe("--cache raw", LARGE, "equal"),
]
Run = tuple[Base, str, int]  # base, technique, seed


def main(data: Path, seeds: int, only: str) -> None:
    """Train what is not trained yet, and print the table."""
    rows = [recipe for recipe in RECIPES if only in recipe.technique]
    for base in {row.base.data: row.base for row in rows}.values():
        lay_out(base.data, data)
        if base is LARGE and not LITE0.exists():
            write_lite0(str(LITE0))
    runs: dict[Run, None] = dict.fromkeys(
        (row.base, technique, seed) for row in rows for technique in ("", row.technique) for seed in range(seeds))
    old = {run for run in runs if folder_of(run).exists()}
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for number, folder in enumerate(pool.map(train, runs), 1):
            print(f"{number} of {len(runs)}: {folder.name}", file=sys.stderr, flush=True)
    summaries = {run: json.loads((folder_of(run) / "summary.json").read_text()) for run in runs}
    print(table(rows, summaries))
    for row in rows:
        if not any((row.base, technique, seed) in old for technique in ("", row.technique) for seed in range(seeds)):
            without, having = values(row.figure, pairs_of(row, summaries))
            append(f"recipe, {row.technique}, {row.base.what}", f"100 x {row.figure}",
                   {"without": without, "with": having})


def lay_out(name: str, data: Path) -> None:
    """Make RUNS/data/NAME from the folders in `data`; what is there is complete, and stays."""
    folder, partial = RUNS / "data" / name, RUNS / "data" / f"{name}.tmp"
    if folder.exists():
        return
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    if name in LINES:
        for split, count in LINES[name].items():
            [file] = (data / name).glob(f"{split}.*")
            lines = file.read_text().splitlines(keepends=True)
            (partial / file.name).write_text("".join(lines[:count + 1]))
    elif name == LARGE.data:
        shutil.copytree(data / name, partial, dirs_exist_ok=True)
    else:
        for split, count in PHOTOS.items():
            for number, source in enumerate(sorted((data / "cifar10" / split).iterdir())):
                is_uneven = (name, split) == ("imbalanced", "train")
                (partial / split / source.name).mkdir(parents=True)
                for file in sorted(source.iterdir())[:UNEVEN_PHOTOS[number % 2] if is_uneven else count]:
                    shutil.copy(file, partial / split / source.name)
    partial.rename(folder)


def train(run: Run) -> Path:
    """Train it on one core, from where it is; its folder. Exits if it fails."""
    base, technique, seed = run
    words = f"--precision fp32 {base.words} {technique}".replace("MINILM", minilm_folder()).split()
    command = [sys.executable, "train.py", "--data", RUNS / "data" / base.data, "--run-dir", folder_of(run), *words,
               "--seed", str(seed), "--device", "cpu", "--threads", "1", "--workers", "0"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{result.stdout[-2000:]}{result.stderr[-2000:]}")
    return folder_of(run)


def folder_of(run: Run) -> Path:
    """Of its settings, so that other settings are other runs."""
    base, technique, seed = run
    return RUNS / re.sub(r"[^\w.]+", "-", f"{base.data} {base.words} {technique} {seed}")


def table(rows: list[Recipe], summaries: dict[Run, dict]) -> str:
    """In Markdown. Rows whose runs are missing have their expectations alone."""
    lines = ["| technique | on | expected | without | found |", "|---|---|---|---|---|"]
    lines += [f"{beginning(row)} {' | '.join(_cells(row.figure, pairs_of(row, summaries)))} |" for row in rows]
    return "\n".join(lines)


def pairs_of(row: Recipe, summaries: dict[Run, dict]) -> list[tuple[dict, dict]]:
    """Summaries of its runs without its technique and with it, seed by seed."""
    return [(summary, summaries[row.base, row.technique, seed]) for (base, technique, seed), summary
            in summaries.items() if (base, technique) == (row.base, "")]


def beginning(row: Recipe) -> str:
    """Of its line in the table: what was known before it was measured."""
    figure = "" if row.figure == "top1" else f"; {row.figure}"
    return f"| `{row.technique}` | {row.base.what}{figure} | {row.expected} |"


def values(figure: str, pairs: list[tuple[dict, dict]]) -> tuple[list[float], list[float]]:
    """100 times the figure, without the technique and with it."""
    usual = figure.removeprefix("ema_")  # an average is compared with the weights of a run without one

    def value(summary: dict, name: str) -> float:
        return 100 * (summary["best"]["value"] if name == "best" else summary[name])

    return [value(each, usual) for each, _ in pairs], [value(each, figure) for _, each in pairs]


def _cells(figure: str, pairs: list[tuple[dict, dict]]) -> tuple[str, str]:
    if not pairs:
        return "", ""
    without, having = values(figure, pairs)
    steps, fewer = (mean(pair[index]["step"] for pair in pairs) for index in (0, 1))
    differences = [b - a for a, b in zip(without, having, strict=True)]
    note = f", {100 * fewer / steps:.0f} % of the steps" if fewer < steps else ""
    return shown(without), f"{verdict(differences)} ({shown(differences, '+')}){note}"


def verdict(differences: list[float]) -> str:
    """Higher or lower, if the mean is more than two standard errors away from 0; else equal."""
    if len(differences) < 2 or abs(mean(differences)) <= 2 * stdev(differences) / sqrt(len(differences)):
        return "equal" if len(differences) > 1 else "one seed"
    return "higher" if mean(differences) > 0 else "lower"


def shown(values: list[float], sign: str = "") -> str:
    """The mean, and the standard deviation where there is more than one."""
    return f"{mean(values):{sign}.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="make recipes DATA=DIR RECIPES='...'")
    parser.add_argument("data", type=Path, help="a folder with cifar10, agnews, sst2, ants_bees")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="rows whose technique has this in it: --only=--mixup")
    arguments = parser.parse_args()
    needed = ("cifar10", "agnews", "sst2", "ants_bees")
    if missing := [name for name in needed if not (arguments.data / name).is_dir()]:
        parser.error(f"{arguments.data} has no folder {', '.join(missing)}")
    main(arguments.data, arguments.seeds, arguments.only)
