"""`python -m benchmarks.strategies`: each strategy trains the same model: samples/s, memory, time to an accuracy.

Runs of train.py on the built-in digits, one at a time and in turn. Two devices in all, each with half of the cores: two
processes, or one process with two devices. On the CPU a device is no more than a name. --device takes those of an
accelerator.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.in_turn import append, heading, in_turn, matrix_rates, ranges, ratios, spread
from benchmarks.processes import ROOT, torchrun
from utils.hardware.cores import available_cores

ROWS = [  # strategy, processes, devices of each
    ("ddp", 1, 1), ("ddp", 2, 1), ("exact", 2, 1), ("fsdp", 2, 1), ("dp", 1, 2), ("dp-classic", 1, 2),
    ("model-parallel", 1, 2)]
AGAINST, GOAL = "ddp, 2 x 1", 0.95  # what the others are compared with; top1


def main(device: str, rounds: int) -> None:
    """Train, print the table, and append it."""
    found = in_turn({f"{strategy}, {processes} x {devices}": partial(_measure, strategy, processes, devices, device)
                     for strategy, processes, devices in ROWS}, rounds)
    speed, memory, times = ({name: [run[at] for run in runs] for name, runs in found.items()} for at in range(3))
    what, rates = f"strategies, resnet18 at 32 px, {device}", matrix_rates()
    print(heading(what, rounds, rates) + "| strategy | processes x devices | samples/s | to `ddp` on 2 | memory"
          f" | time to {100 * GOAL:.0f} % | reached |\n|---|---|---|---|---|---|---|")
    for name in found:
        strategy, where = name.split(", ")
        print(f"| `{strategy}` | {where} | {median(speed[name]):.0f} | {spread(ratios(speed[name], speed[AGAINST]))}"
              f" | {median(memory[name]):.0f} MiB | {summary(times[name])} |")
    append(what, "samples/s", speed, against=AGAINST, ratios=ranges(speed, AGAINST), memory_mib=memory,
           time_s=times, products=rates)


def _measure(strategy: str, processes: int, devices: int, device: str) -> tuple[float, float, float | None]:
    """Samples/s, the peak memory in MiB of a device (on the CPU of a process), and seconds from the launch to GOAL."""
    threads = available_cores() // processes  # the cores are the same for all
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
    seconds = datetime.fromisoformat(reached["time"]).timestamp() - began if reached else None
    memory = max(record.get("memory", usage.ru_maxrss / 1024) for record in train)  # of the largest process below
    return median(record["samples_per_s"] for record in train), memory, seconds


def summary(times: list[float | None]) -> str:
    """Cells of a table: the median of the times that reached the goal, and their range; how many did."""
    each = [time_s for time_s in times if time_s is not None]
    shown = f"{median(each):.1f} s ({min(each):.1f} to {max(each):.1f})" if each else "-"
    return f"{shown} | {len(each)} of {len(times)}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.strategies")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    main(arguments.device, arguments.rounds)
