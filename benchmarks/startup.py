"""Seconds from a command to the first training step of the built-in digits, and the floor: what importing the libraries takes.

`make benchmark`. All of them in turn, several rounds in one run; medians and, as ratios to the floor, what is ours.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROUNDS = 5
WORDS = ["--log-every", "1", "--device", "cpu"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
FLOOR = "import torch, torchvision, torch.utils.tensorboard; torch.optim.SGD([torch.zeros(1, requires_grad=True)]).zero_grad()"
WAYS = {
    "python -c 'import torch, torchvision, tensorboard', an optimizer": [sys.executable, "-c", FLOOR],
    "./launch.sh": ["./launch.sh", *WORDS],
    "torchrun --nproc-per-node=1 train.py": [sys.executable, *TORCHRUN, "--nproc-per-node=1", "train.py", *WORDS],
    "./launch.sh --nproc-per-node 2": ["./launch.sh", "--nproc-per-node", "2", *WORDS],
    "torchrun --nproc-per-node=2 train.py": [sys.executable, *TORCHRUN, "--nproc-per-node=2", "train.py", *WORDS],
}


def seconds(words: list[str]) -> float:
    """From the start of a command to its first training record, or to its end if it writes none; a run is stopped then."""
    with tempfile.TemporaryDirectory() as folder:
        records = Path(folder) / "run" / "metrics.jsonl"
        is_run = "--log-every" in words
        began = time.monotonic()
        process = subprocess.Popen([*words, *(["--run-dir", str(records.parent)] if is_run else [])], cwd=ROOT, stdout=subprocess.DEVNULL,
                                   stderr=subprocess.DEVNULL, env=os.environ | {"LOCKSTEP_PYTHON": sys.executable})
        while process.poll() is None and not (records.exists() and records.stat().st_size):
            time.sleep(0.005)
        found = time.monotonic() - began
        process.terminate()
        process.wait()
        return found


def main() -> None:
    """Print the table."""
    taken = {name: [] for name in WAYS}
    for round_number in range(-1, ROUNDS):  # the first warms the disk's cache
        for name, words in WAYS.items():
            found = seconds(words)
            if round_number >= 0:
                taken[name].append(found)
    floor = statistics.median(taken[next(iter(WAYS))])
    for name, values in taken.items():
        median = statistics.median(values)
        print(f"{name:<70} {median:5.2f} s ({min(values):.2f} to {max(values):.2f})  {median / floor:.2f} x")


if __name__ == "__main__":
    main()
