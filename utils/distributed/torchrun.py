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
        words = ", ".join(f"rank {rank} (exit code {failure.exitcode})" for rank, failure in error.failures.items())
        print(f"torchrun: not all processes ended well: {words}", file=sys.stderr)
        sys.exit(1)
