"""`make bench`: seconds from a command to the first training step of the built-in digits.

The floor is the time to import the libraries. All commands take turns for several rounds in one run; the table has
medians, and their ratios to the floor.
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
FLOOR = ("import torch, torchvision, torch.utils.tensorboard\n"
         "torch.optim.SGD([torch.zeros(1, requires_grad=True)]).zero_grad()")
COMMANDS = {
    "python -c 'import torch, torchvision, tensorboard', an optimizer": [sys.executable, "-c", FLOOR],
    "./launch.sh": ["./launch.sh", *WORDS],
    "torchrun --nproc-per-node=1 train.py": [sys.executable, *TORCHRUN, "--nproc-per-node=1", "train.py", *WORDS],
    "./launch.sh --nproc-per-node 2": ["./launch.sh", "--nproc-per-node", "2", *WORDS],
    "torchrun --nproc-per-node=2 train.py": [sys.executable, *TORCHRUN, "--nproc-per-node=2", "train.py", *WORDS],
}


def seconds(words: list[str]) -> float:
    """Seconds from the start of a command to its first training record, or to its end if it is no run."""
    with tempfile.TemporaryDirectory() as folder:
        records = Path(folder) / "run" / "metrics.jsonl"
        is_run = "--log-every" in words
        began = time.monotonic()
        process = subprocess.Popen(
            [*words, *(["--run-dir", str(records.parent)] if is_run else [])], cwd=ROOT, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, env=os.environ | {"LOCKSTEP_PYTHON": sys.executable})
        while process.poll() is None and not (records.exists() and records.stat().st_size):
            time.sleep(0.005)
        found = time.monotonic() - began
        process.terminate()
        process.wait()
        return found


def main() -> None:
    """Print the table."""
    taken = {name: [] for name in COMMANDS}
    for round_index in range(-1, ROUNDS):  # the first one fills the disk's cache
        for name, words in COMMANDS.items():
            found = seconds(words)
            if round_index >= 0:
                taken[name].append(found)
    floor = statistics.median(taken[next(iter(COMMANDS))])
    for name, values in taken.items():
        median = statistics.median(values)
        print(f"{name:<70} {median:5.2f} s ({min(values):.2f} to {max(values):.2f})  {median / floor:.2f} x")


if __name__ == "__main__":
    main()
