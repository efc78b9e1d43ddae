"""`make accuracy DATA=DIR`: what real data sets are trained to, each against what is expected of it.

DIR holds cifar10/ (10,000 + 2,000 of CIFAR-10's images) and ants_bees/ (397 photos), each with train/CLASS and val/CLASS.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
CIFAR = ["--image-size", "32", "--epochs", "10"]
PHOTOS = ["--image-size", "224", "--epochs", "2", "--global-batch-size", "32", "--threads", "1", "--micro-batch-size", "16"]
CASES = [  # name, data, processes, settings, top-1 accuracy to reach
    ("CIFAR-10 subset, resnet18 from scratch, 10 epochs", "cifar10", 1, CIFAR, 0.62),
    ("ants and bees, resnet18 from scratch, 2 epochs", "ants_bees", 1, PHOTOS, 0.0),
    ("ants and bees, the same on 2 processes", "ants_bees", 2, PHOTOS, 0.0),
]


def main(data: Path) -> None:
    """Train every case, print a line for each; exit with 1 if one falls short."""
    short = 0
    for name, folder, processes, settings, least in CASES:
        with tempfile.TemporaryDirectory() as run:
            began = time.monotonic()
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1",
                       f"--nproc-per-node={processes}", "train.py", "--data", str(data / folder), "--run-dir", run, *settings]
            subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
            summary = json.loads((Path(run) / "summary.json").read_text())
        short += summary["top1"] < least
        print(f"{name:<52} top1 {100 * summary['top1']:.2f} % (at least {100 * least:.0f} %), loss {summary['loss']:.4f},"
              f" {time.monotonic() - began:.0f} s", flush=True)
    sys.exit(short > 0)


if __name__ == "__main__":
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        sys.exit("usage: make accuracy DATA=DIR, with DIR/cifar10 and DIR/ants_bees")
    main(Path(sys.argv[1]))
