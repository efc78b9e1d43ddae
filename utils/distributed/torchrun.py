"""torchrun as launch.sh starts it: where its processes fail, without a table and a traceback after their own words.

    python -P utils/distributed/torchrun.py --nproc-per-node=2 ... train.py

Tests: tests/end_to_end/test_launch.py
"""

import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

if __name__ == "__main__":
    try:
        main.__wrapped__(None)  # without the decorator that prints them
    except ChildFailedError as error:
        failures = sorted(error.failures.items(), key=lambda item: item[1].timestamp)
        words = ", ".join(f"rank {rank} (exit code {failure.exitcode})" for rank, failure in failures[:1])
        print(f"torchrun: {words} ended first", file=sys.stderr)
        sys.exit(1)
