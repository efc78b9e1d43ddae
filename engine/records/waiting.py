"""What would end the time that a training spends waiting for its data."""

import math

WAIT = 0.2  # share of the time: below, it is not worth a word


def waiting(wait: float, workers: int, cores: int) -> str:
    """A share of the time, 0 to 1, is spent waiting for data: what would end it. workers, cores: of each process."""
    need = workers_needed(wait, workers)
    share = f"{100 * wait:.0f} % of the training time is spent waiting for data"
    if (most := max(1, cores - 1)) <= workers:
        return f"{share}, and no core is free for more --workers: smaller images or faster decoding would help"
    if need > most:
        return f"{share}: --workers {most} would shorten it, and {need}, on as many more cores, would end it"
    return f"{share}: --workers {need} would end it"


def workers_needed(wait: float, workers: int) -> int:
    """Data loading processes with which nothing would wait for data. wait: share of the time, 0 to 1.

    Where loading is the bottleneck, `workers` of them load what is computed in 1 - wait of the time. Without any, the
    main process loads for `wait` of the time and computes in the rest.
    """
    busy = max(1e-3, 1 - wait)
    return max(workers + 1, math.ceil((workers / busy if workers else wait / busy) - 1e-9))
