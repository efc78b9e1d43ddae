"""`python -m benchmarks.strategies`: each strategy trains the same model: samples/s, memory, time to an accuracy.

Runs of train.py on the built-in digits, one at a time and in turn (A B C A B C ...). Two devices in all, each with a
core: two processes, or one process with two devices. On the CPU a device is no more than a name.
--device takes those of an accelerator.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from statistics import median

from benchmarks.accuracy import ROOT, torchrun
from benchmarks.in_turn import about

ROWS = [  # strategy, processes, devices of each
    ("ddp", 1, 1), ("ddp", 2, 1), ("exact", 2, 1), ("fsdp", 2, 1), ("dp", 1, 2), ("dp-classic", 1, 2),
    ("model-parallel", 1, 2)]
FLOOR, GOAL = ROWS[1], 0.95  # what the others are compared with; top1


def main(device: str, rounds: int) -> None:
    """Train and print the table."""
    found: dict[tuple, list[tuple[float, float, float]]] = {row: [] for row in ROWS}
    for number in range(rounds):
        for row in ROWS:
            found[row].append(_measure(*row, device))
            print(f"round {number + 1} of {rounds}: {row}: {found[row][-1]}", file=sys.stderr, flush=True)
    print(f"resnet18, 32 px, {device}, {rounds} rounds; {about()}\n")
    print("| strategy | processes x devices | samples/s | to `ddp` on 2 | memory | time to"
          f" {100 * GOAL:.0f} % |\n|---|---|---|---|---|---|")
    for row, runs in found.items():
        speed, memory, seconds = (median(values) for values in zip(*runs, strict=True))
        ratios = [mine[0] / theirs[0] for mine, theirs in zip(runs, found[FLOOR], strict=True)]
        print(f"| `{row[0]}` | {row[1]} x {row[2]} | {speed:.0f} | {median(ratios):.2f} ({min(ratios):.2f} to"
              f" {max(ratios):.2f}) | {memory:.0f} MiB | {seconds:.0f} s |")


def _measure(strategy: str, processes: int, devices: int, device: str) -> tuple[float, float, float]:
    """Samples/s, the peak memory in MiB of a device (on the CPU of a process), and seconds from the launch to GOAL."""
    threads = 2 // processes  # the cores are the same for all
    words = ["train.py", "--strategy", strategy, "--device", device, "--threads", str(threads), "--workers", "0"]
    if devices > 1:
        words += ["--devices-per-process", str(devices)]
    start = [sys.executable] if processes == 1 else torchrun(processes)
    with tempfile.TemporaryDirectory() as run:
        began = time.time()
        process = subprocess.Popen([*start, *words, "--run-dir", run], cwd=ROOT, stdout=subprocess.DEVNULL,
                                   env=os.environ | {"OMP_NUM_THREADS": str(threads)})
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            sys.exit(f"{' '.join(words)}: exit code {process.returncode}")
        records = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
    train = [record for record in records if record["split"] == "train"][1:]  # the first step warms up
    reached = next((record for record in records if record.get("top1", 0) >= GOAL), None)
    seconds = datetime.fromisoformat(reached["time"]).timestamp() - began if reached else float("inf")
    memory = max(record.get("memory", usage.ru_maxrss / 1024) for record in train)  # of the largest process below
    return median(record["samples_per_s"] for record in train), memory, seconds


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.strategies")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    main(arguments.device, arguments.rounds)
