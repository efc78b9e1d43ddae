"""`make accuracy DATA=DIR`: trains on real data sets and compares the accuracy with what each must reach.

Folders in DIR; those that are missing are left out:
    cifar10/    10,000 + 2,000 of CIFAR-10's images; train/CLASS and val/CLASS
    ants_bees/  397 photos; train/CLASS and val/CLASS
    sst2/       train.tsv, val.tsv: text, label
    agnews/     train.csv, val.csv: label, title, description
    wikitext2/  train.txt, val.txt
MINILM and LITE0 are the pretrained models of pretrained.py.
"""

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from benchmarks.pretrained import minilm_folder, write_lite0
from benchmarks.processes import ROOT, torchrun

SMALL = ["--image-size", "64", "--epochs", "3"]  # at 224 px, as the weights want, it takes twelve times as long
MINILM = ["--task", "text-classification", "--model", "MINILM"]
LITE0 = ["--model", "timm/tf_efficientnet_lite0", "--weights", "LITE0"]
PHOTOS = [*LITE0, "--epochs", "5", "--global-batch-size", "32", "--micro-batch-size", "16", "--threads", "1"]
TITLES = ["--task", "text-classification", "--text-column", "title", "--model", "bert-tiny", "--epochs", "3"]
DEFAULT_MODEL = ["--task", "text-classification", "--text-column", "title", "--epochs", "2"]
PAIRS = ["--text-column", "title,description", "--epochs", "1"]
WIKITEXT = ["--task", "masked-lm", "--model", "bert-mini", "--epochs", "3", "--global-batch-size", "32", "--lr", "1e-3"]


@dataclass(frozen=True)
class Case:
    """A training run, or several with other seeds, and what they must reach."""

    name: str
    data: str
    settings: list[str]
    processes: int = 1
    top1: float | None = None  # at least, 0 to 1, as the mean over the seeds; None: perplexity falls at each evaluation
    seeds: int = 1


CASES = [
    Case("CIFAR-10 subset, resnet18 from scratch, 10 epochs", "cifar10", ["--epochs", "10"], top1=0.62),
    Case("ants and bees, EfficientNet-Lite0, 5 epochs", "ants_bees", PHOTOS, top1=0.9),
    Case("ants and bees, the same on 2 processes", "ants_bees", PHOTOS, processes=2, top1=0.9),
    Case("CIFAR-10 subset, EfficientNet-Lite0 at 64 px, 3 epochs", "cifar10", [*LITE0, *SMALL], top1=0.62),
    Case("SST-2, MiniLM, 2 epochs, mean of 3 seeds", "sst2", [*MINILM, "--epochs", "2"], top1=0.873, seeds=3),
    Case("AG news subset, titles, bert-tiny from scratch, 3 epochs", "agnews", TITLES, top1=0.75),
    Case("AG news subset, titles, the default model, 2 epochs", "agnews", DEFAULT_MODEL, top1=0.6),
    Case("AG news subset, MiniLM, title and description as a pair", "agnews", [*MINILM, *PAIRS], top1=0.88),
    Case("WikiText-2 subset, masked LM from scratch, 3 epochs", "wikitext2", WIKITEXT),
]


def main(data: Path) -> None:
    """Train every case whose data is in the folder and print a line for each; exit with 1 if one falls short."""
    num_short = 0
    for case in CASES:
        if not (data / case.data).is_dir():
            print(f"{case.name:<58} left out: no folder {data / case.data}", flush=True)
            continue
        began = time.monotonic()
        is_good, figures = _judge(case, [_evaluations(case, data / case.data, seed) for seed in range(case.seeds)])
        num_short += not is_good
        verdict = "" if is_good else "  TOO LOW"
        print(f"{case.name:<58} {figures}, {time.monotonic() - began:.0f} s{verdict}", flush=True)
    sys.exit(num_short > 0)


def _evaluations(case: Case, data: Path, seed: int) -> list[dict]:
    """Train it; the records of its evaluations."""
    with tempfile.TemporaryDirectory() as run, tempfile.NamedTemporaryFile(suffix=".pth") as weights:
        if "LITE0" in case.settings:
            write_lite0(weights.name)
        named = {"MINILM": minilm_folder(), "LITE0": weights.name}
        command = [*torchrun(case.processes), "train.py", "--data", str(data), "--run-dir", run,
                   *(named.get(word, word) for word in case.settings), "--seed", str(seed)]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        records = map(json.loads, (Path(run) / "metrics.jsonl").read_text().splitlines())
        return [record for record in records if record["split"] == "val"]


def _judge(case: Case, runs: list[list[dict]]) -> tuple[bool, str]:
    if case.top1 is None:
        perplexities = [record["perplexity"] for record in runs[0]]
        falls = perplexities == sorted(set(perplexities), reverse=True)
        return falls, "perplexity " + ", ".join(f"{value:.1f}" for value in perplexities)
    top1, loss = (mean(evaluations[-1][name] for evaluations in runs) for name in ("top1", "loss"))
    return top1 >= case.top1, f"top1 {100 * top1:.2f} % (at least {100 * case.top1:.1f} %), loss {loss:.4f}"


if __name__ == "__main__":
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        sys.exit("usage: make accuracy DATA=DIR, a folder with cifar10, ants_bees, sst2, agnews, wikitext2")
    main(Path(sys.argv[1]))
