"""`make bench`: seconds from a command to the first training step of the built-in digits, beside what others would use.

All commands take turns for several rounds in one run. A table has the starts of one process, with ratios to a process
that only imports torch and torchvision; another one those on two processes, with ratios to the faster peer's.
"""

import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median

import torch

from benchmarks.in_turn import in_turn, report
from benchmarks.processes import ROOT, torchrun
from data.demo import unpack_demo
from utils.files import cache_path
from utils.numerics.precision import hardware_precision

ROUNDS, UNIT = 5, "s to the first step"
WORDS = ["--log-every", "1", "--device", "cpu"]
FLOOR = """import os, sys, torch, torchvision
torch.optim.SGD([torch.zeros(1, requires_grad=True)]).zero_grad()  # which imports torch._dynamo
if os.environ.get("RANK", "0") == "0":
    os.makedirs(sys.argv[-1])
    print("imported", file=open(sys.argv[-1] + "/metrics.jsonl", "w"), flush=True)
"""
ON_ONE = {
    "python -c 'import torch, torchvision', an optimizer": [sys.executable, "-c", FLOOR],
    "./launch.sh": ["./launch.sh", *WORDS],
    "torchrun --nproc-per-node=1 train.py": [*torchrun(1), "train.py", *WORDS],
}
ON_TWO = {
    "the imports alone, torchrun": [*torchrun(2), "--no-python", sys.executable, "-c", FLOOR],
    "ours, ./launch.sh": ["./launch.sh", "--nproc-per-node", "2", *WORDS],
    "ours, torchrun": [*torchrun(2), "train.py", *WORDS],
}


def peers() -> dict[str, list[str]]:
    """The commands of benchmarks/startup_peers.py on two processes."""
    shared = ["--data", str(unpack_demo("image-classification", cache_path())),
              "--precision", hardware_precision(torch.device("cpu"))]
    return {name: [*torchrun(2), "-m", "benchmarks.startup_peers", peer, *shared]
            for name, peer in (("timm, torchrun", "timm"), ("Trainer, torchrun", "trainer"))}


def seconds(words: list[str]) -> float:
    """Seconds from the start of a command to its first training record; of FLOOR's, until all is imported."""
    with tempfile.TemporaryDirectory() as folder:
        records = Path(folder) / "run" / "metrics.jsonl"
        began = time.monotonic()
        process = subprocess.Popen(
            [*words, "--run-dir", str(records.parent)], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env=os.environ | {"LOCKSTEP_PYTHON": sys.executable})
        while process.poll() is None and not (records.exists() and records.stat().st_size):
            time.sleep(0.005)
        found = time.monotonic() - began
        if not records.exists():
            sys.exit(f"{' '.join(words)}: exit code {process.returncode}")
        process.terminate()
        process.wait()
        return found


def main() -> None:
    """Print the tables."""
    others = peers()
    on_two = ON_TWO | others
    taken = in_turn({name: partial(seconds, words) for name, words in (ON_ONE | on_two).items()}, ROUNDS)
    report("start of the digits on one process", UNIT, {name: taken[name] for name in ON_ONE}, next(iter(ON_ONE)))
    report("start of the digits on two processes", UNIT, {name: taken[name] for name in on_two},
           min(others, key=lambda name: median(taken[name])))


if __name__ == "__main__":
    main()
