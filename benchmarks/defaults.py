"""`make defaults DATA=DIR`: compares learning rates for each task, start and optimizer: what --lr auto is chosen from.

Each row trains with a usual learning rate, a third of it, and three times it. Data, runs and their folders are those of
recipes.py: small, and as many runs at a time as there are cores; the same command continues. A row whose runs are all
new is appended to results.jsonl.
"""

import argparse
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import mean, stdev

from benchmarks.in_turn import append
from benchmarks.pretrained import write_lite0
from benchmarks.recipes import LITE0, NEWS, SMALL, TEXT, Base, Run, folder_of, lay_out, train

FACTORS = (1 / 3, 1, 3)
PRETRAINED = Base("EfficientNet-Lite0, photos at 64 px", "cifar",
                  f"--model timm/tf_efficientnet_lite0 --weights {LITE0} --image-size 64 --epochs 6 --eval-every 1000")
WIKI = "--task masked-lm --epochs 4 --eval-every 1000"
# The sizes that are built from scratch, in bf16: bert-base takes minutes a run.
TITLES = f"{TEXT} --text-column title --max-length 32 --epochs 3 --eval-every 1000 --precision bf16"
SENTENCES = f"{TEXT} --max-length 64 --epochs 3 --eval-every 1000 --precision bf16"
PARAGRAPHS = "--task masked-lm --vocab-size 4096 --epochs 2 --eval-every 1000 --precision bf16"
BASES = [  # what is learnt, usual learning rates, the figure
    (Base("ResNet-18, photos", "cifar", SMALL.words.replace("--epochs 12", "--epochs 24")),
     {"adamw": 1e-3, "sgd": 0.05}, "top1"),
    (PRETRAINED, {"adamw": 3e-4, "sgd": 0.015}, "top1"),
    (Base("bert-tiny, titles", "agnews", NEWS.words), {"adamw": 1e-3, "sgd": 0.05}, "top1"),
    (Base("MiniLM, sentences", "sst2", f"{TEXT} --model MINILM --epochs 6 --eval-every 1000"),
     {"adamw": 5e-5, "sgd": 0.03}, "top1"),
    (Base("bert-tiny, masked tokens", "wikitext2", f"{WIKI} --model bert-tiny --vocab-size 4096"),
     {"adamw": 1e-3, "sgd": 0.15}, "loss"),
    (Base("MiniLM with a new head, masked tokens", "wikitext2", f"{WIKI} --model MINILM"),
     {"adamw": 5e-5, "sgd": 0.03}, "loss"),
    *((Base(f"{model}, short titles", "agnews", f"{TITLES} --model {model}"), rates, "top1")
      for model, rates in (("bert-tiny", {"adamw": 1e-3}), ("bert-mini", {"adamw": 6e-4, "sgd": 0.05}),
                           ("bert-small", {"adamw": 3e-4}), ("bert-base", {"adamw": 1.5e-4}))),
    *((Base(f"{model}, many sentences", "sst2-large", f"{SENTENCES} --model {model}"), rates, "top1")
      for model, rates in (("bert-tiny", {"adamw": 1e-3}), ("bert-small", {"adamw": 3e-4}))),
    *((Base(f"{model}, paragraphs", "wikitext2", f"{PARAGRAPHS} --model {model}"), rates, "loss")
      for model, rates in (("bert-tiny", {"adamw": 1e-3}), ("bert-mini", {"adamw": 6e-4, "sgd": 0.15}),
                           ("bert-small", {"adamw": 3e-4}))),
]


def main(data: Path, seeds: int, only: str) -> None:
    """Train what is not trained yet, and print the table."""
    bases = [row for row in BASES if only in row[0].what]
    for base in {base.data: base for base, _, _ in bases}.values():
        lay_out(base.data, data)
    if not LITE0.exists():
        write_lite0(str(LITE0))
    runs = [run for row in bases for cell in cells(*row[:2], seeds) for run in cell[1]]
    old = {run for run in runs if folder_of(run).exists()}
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for number, folder in enumerate(pool.map(partial(train, may_diverge=True), runs), 1):
            print(f"{number} of {len(runs)}: {folder.name}", file=sys.stderr, flush=True)
    print("| what | optimizer | a third | usual | three times |\n|---|---|---|---|---|")
    for base, rates, figure in bases:
        for optimizer, rate in rates.items():
            groups = cells(base, {optimizer: rate}, seeds)
            found = [f"{lr:.2g}: {_shown(figure, group)}" for lr, group in groups]
            print(f"| {base.what}, {figure} | {optimizer} | {' | '.join(found)} |")
            if not any(run in old for _, group in groups for run in group):
                append(f"defaults, {base.what}, {optimizer}", figure,
                       {f"{lr:.3g}": _values(figure, group) for lr, group in groups})


def cells(base: Base, rates: dict[str, float], seeds: int) -> list[tuple[float, list[Run]]]:
    """(learning rate, its runs) of each optimizer, in the order of FACTORS."""
    return [(factor * rate, [(base, f"--optimizer {optimizer} --lr {factor * rate:.3g}", seed)
                             for seed in range(seeds)])
            for optimizer, rate in rates.items() for factor in FACTORS]


def _values(figure: str, runs: list[Run]) -> list[float | None]:
    """Of each seed; None if it diverged."""
    summaries = [folder_of(run) / "summary.json" for run in runs]
    return [json.loads(file.read_text())[figure] if file.exists() else None for file in summaries]


def _shown(figure: str, runs: list[Run]) -> str:
    """Mean and standard deviation over seeds; what diverged is said."""
    values = _values(figure, runs)
    if None in values:
        return "diverges"
    scale, digits = (100, 1) if figure == "top1" else (1, 3)
    spread = f" ± {scale * stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{scale * mean(values):.{digits}f}{spread}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="make defaults DATA=DIR DEFAULTS='...'")
    parser.add_argument("data", type=Path, help="a folder with cifar10, agnews, sst2, wikitext2")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="rows whose name has this in it: --only=MiniLM")
    arguments = parser.parse_args()
    main(arguments.data, arguments.seeds, arguments.only)
