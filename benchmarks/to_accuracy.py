"""`python -m benchmarks.to_accuracy --data DIR`: how long training takes to an accuracy, beside what others use.

The time is from the start of the process to the end of the evaluation that first reaches the accuracy. All train to
the end. Rows: cifar10, ResNet-18 from scratch at 32 px, evaluated after each of 10 epochs; sst2, a pretrained MiniLM,
evaluated four times in each of 2.
Contenders take turns, with another seed in each round. All have the same cores, batch, epochs and precision: bf16
where the hardware computes in it. train.py starts without its cache of indexes and token ids.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import mean, median

import torch

from benchmarks.accuracy import CIFAR, ROOT, minilm_folder
from benchmarks.in_turn import in_turn, report
from utils.hardware.cores import available_cores
from utils.numerics.precision import hardware_precision

POLL_S = 0.02
EVAL_STEPS = 54  # of the 217 of an epoch of SST-2


@dataclass
class Contender:
    """A program that trains: each call is a training with the next seed, and its figure the trainings in an hour.

    0 means that the accuracy was not reached. The first call, which fills the disk's cache, ends with its first
    evaluation.
    """

    words: list[str]
    goal: float  # accuracy, 0 to 1
    seeds: Iterator[int] = field(default_factory=count)
    times: list[float | None] = field(default_factory=list)  # seconds until the goal; None: not reached
    final: list[float] = field(default_factory=list)  # accuracy at the end

    def __call__(self) -> float:
        seed = next(self.seeds)
        found = evaluations([*self.words, "--seed", str(seed)])
        if seed == 0:
            next(found)
            found.close()
            return 0.0
        time_s = None
        for at_s, top1 in found:
            if time_s is None and top1 >= self.goal:
                time_s = at_s
        self.times.append(time_s)
        self.final.append(top1)
        return 3600 / time_s if time_s else 0.0

    def summary(self) -> str:
        """Cells of a table: the median time, how often the goal was reached, the accuracy at the end."""
        reached = [time_s for time_s in self.times if time_s is not None]
        time_s = f"{median(reached):.1f} s" if reached else "-"
        spread = f"{100 * mean(self.final):.1f} % ({100 * min(self.final):.1f} to {100 * max(self.final):.1f})"
        return f"{time_s} | {len(reached)} of {len(self.times)} | {spread}"


def main(data: Path, rows: list[str], rounds: int) -> None:
    """Measure and report the rows. data: a folder with cifar10 and sst2, as in benchmarks/accuracy.py."""
    precision = hardware_precision(torch.device("cpu"))
    for row in rows:
        ROWS[row](data / row, precision, rounds)


def images(data: Path, precision: str, rounds: int) -> None:
    """ResNet-18 from scratch."""
    shared = ["--data", data, *CIFAR]
    compare(f"to 62 % on CIFAR-10's subset, resnet18 at 32 px, {precision}", {
        "ours": ours(*shared),
        **{name: peer(name, *shared, "--batch", 64, "--precision", precision) for name in ("bare", "timm")},
    }, 0.62, rounds)


def sentences(data: Path, precision: str, rounds: int) -> None:
    """MiniLM on SST-2."""
    shared = ["--data", data, "--epochs", 2, "--model", minilm_folder(), "--eval-every", EVAL_STEPS]
    compare(f"to 87 % on SST-2, MiniLM, {precision}", {
        "ours": ours("--task", "text-classification", *shared),
        "Trainer": peer("trainer", *shared, "--batch", 32, "--precision", precision)}, 0.87, rounds)


ROWS = {"cifar10": images, "sst2": sentences}


def ours(*words: object) -> list[str]:
    """The command of train.py."""
    return list(map(str, [sys.executable, "train.py", "--device", "cpu", *words]))


def peer(*words: object) -> list[str]:
    """The command of a peer."""
    return list(map(str, [sys.executable, "-m", "benchmarks.accuracy_peers", *words]))


def compare(what: str, commands: Mapping[str, list[str]], goal: float, rounds: int) -> None:
    """Measure, and print times, how often each reached the goal, and the ratios of speed to the best peer's."""
    contenders = {name: Contender(words, goal) for name, words in commands.items()}
    found = in_turn(contenders, rounds)
    print(f"\n{what}:\n\n| | median time | reached | accuracy at the end |\n|---|---|---|---|")
    for name, contender in contenders.items():
        print(f"| {name} | {contender.summary()} |", flush=True)
    best, kept = best_peer(found)
    if len(kept) < rounds:
        print(f"\n{best}, the best peer, missed it in {rounds - len(kept)} of {rounds} rounds, which have no ratio")
    if kept:
        report(what, "trainings/hour, 0 = not reached",
               {name: [figures[number] for number in kept] for name, figures in found.items()}, best)


def best_peer(found: Mapping[str, list[float]]) -> tuple[str, list[int]]:
    """The peer that reached the goal most often, the fastest of those; and the rounds in which it did."""
    best = max((name for name in found if name != "ours"),
               key=lambda name: (sum(map(bool, found[name])), median(found[name])))
    return best, [number for number, figure in enumerate(found[best]) if figure]


def evaluations(words: list[str]) -> Iterator[tuple[float, float]]:
    """Run a command; for each evaluation seconds since its start, and the accuracy. Exits if the command fails."""
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "errors").open("w+") as errors:
        file, seen = Path(folder) / "run" / "metrics.jsonl", 0
        environment = os.environ | {"OMP_NUM_THREADS": str(available_cores()), "LOCKSTEP_CACHE": f"{folder}/cache"}
        began = time.monotonic()
        process = subprocess.Popen([*words, "--run-dir", str(file.parent)], cwd=ROOT, env=environment,
                                   stdout=subprocess.DEVNULL, stderr=errors)
        try:
            while True:
                is_over = process.poll() is not None  # asked before reading: nothing comes later
                lines = file.read_text().split("\n")[:-1] if file.exists() else []  # the last is not whole yet
                now_s = time.monotonic() - began
                for record in map(json.loads, lines[seen:]):
                    if record["split"] == "val":
                        yield now_s, record["top1"]
                if is_over:
                    break
                seen = len(lines)
                time.sleep(POLL_S)
        finally:
            process.terminate()
            process.wait()
        if process.returncode:
            errors.seek(0)
            sys.exit(f"{' '.join(words)}: exit code {process.returncode}\n{errors.read()[-3000:]}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.to_accuracy")
    parser.add_argument("--data", type=Path, required=True, help="a folder with cifar10 and sst2")
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    main(arguments.data, arguments.rows.split(","), arguments.rounds)
