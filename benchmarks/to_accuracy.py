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

from benchmarks.in_turn import append, heading, in_turn, matrix_rates
from benchmarks.pretrained import minilm_folder
from benchmarks.processes import ROOT
from utils.hardware.cores import available_cores
from utils.numerics.precision import hardware_precision

POLL_S = 0.02
EVAL_STEPS = 54  # of the 217 of an epoch of SST-2
Times = list[float | None]  # seconds until the goal, of each round; None: not reached


@dataclass
class Contender:
    """A program that trains: each call is a training with the next seed.

    It returns the seconds until the goal, None if it is not reached, and the accuracy at the end. The first call, which
    fills the disk's cache, ends with its first evaluation.
    """

    words: list[str]
    goal: float  # accuracy, 0 to 1
    seeds: Iterator[int] = field(default_factory=count)

    def __call__(self) -> tuple[float | None, float]:
        seed = next(self.seeds)
        found = evaluations([*self.words, "--seed", str(seed)])
        if seed == 0:
            _, top1 = next(found)
            found.close()
            return None, top1
        time_s = None
        for at_s, top1 in found:
            if time_s is None and top1 >= self.goal:
                time_s = at_s
        return time_s, top1


def main(data: Path, rows: list[str], rounds: int) -> None:
    """Measure and report the rows. data: a folder with cifar10 and sst2, as in benchmarks/accuracy.py."""
    precision = hardware_precision(torch.device("cpu"))
    for row in rows:
        ROWS[row](data / row, precision, rounds)


def images(data: Path, precision: str, rounds: int) -> None:
    """ResNet-18 from scratch."""
    shared = ["--data", data, "--epochs", 10]
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
    """Measure; print and append times, how often each reached the goal, and how many times as fast as the best peer.

    That is a ratio of medians: the seeds of one program have nothing to do with those of another.
    """
    found = in_turn({name: Contender(words, goal) for name, words in commands.items()}, rounds)
    times = {name: [time_s for time_s, _ in runs] for name, runs in found.items()}
    top1 = {name: [at_end for _, at_end in runs] for name, runs in found.items()}
    best, rates = best_peer(times), matrix_rates()
    ratios = times_as_fast(times, best)
    print(heading(what, rounds, rates)
          + f"| | time | reached | times as fast as {best} | accuracy at the end |\n|---|---|---|---|---|")
    for name in found:
        ratio = f"{ratios[name][0]:.2f}" if name in ratios else "-"
        at_end = f"{mean(top1[name]):.1%} ({min(top1[name]):.1%} to {max(top1[name]):.1%})"
        print(f"| {name} | {summary(times[name])} | {ratio} | {at_end} |", flush=True)
    append(what, "s, null = not reached", times, against=best, ratios=ratios, top1=top1, products=rates)


def reached(times: Times) -> list[float]:
    """Without the rounds that did not reach the goal."""
    return [time_s for time_s in times if time_s is not None]


def summary(times: Times) -> str:
    """Cells of a table: the median of the times that reached the goal, and their range; how many did."""
    each = reached(times)
    shown = f"{median(each):.1f} s ({min(each):.1f} to {max(each):.1f})" if each else "-"
    return f"{shown} | {len(each)} of {len(times)}"


def best_peer(times: Mapping[str, Times]) -> str:
    """The peer that reached the goal most often; of those the one with the shortest median time."""
    return max((name for name in times if name != "ours"),
               key=lambda name: (len(reached(times[name])), -median(reached(times[name]) or [0])))


def times_as_fast(times: Mapping[str, Times], against: str) -> dict[str, list[float]]:
    """The median time of `against` by the median, the longest and the shortest time of each; of rounds that reached it.

    Without those that never did; empty if `against` did not.
    """
    each = {name: reached(values) for name, values in times.items() if reached(values) and reached(times[against])}
    return {name: [median(each[against]) / of(values) for of in (median, max, min)] for name, values in each.items()}


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
