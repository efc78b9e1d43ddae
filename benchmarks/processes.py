"""Processes that benchmarks start: in the program's folder, with as many threads as they are given."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]


def torchrun(processes: int) -> list[str]:
    """The command that starts a program on this many processes."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1",
            f"--nproc-per-node={processes}"]


def output(words: Sequence[object], threads: int) -> str:
    """What a command prints; threads: of each of its processes. Exits with its message if it fails."""
    done = subprocess.run(list(map(str, words)), cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": str(threads)},
                          capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, words))}: exit code {done.returncode}\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout
