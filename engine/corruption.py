"""Sums of gradients that changed on the way: the run ends with 71 before anything is saved or recorded of them."""

import socket

from engine.training import Training
from utils.errors import Exit, UserError, some


def end_if_corrupted(t: Training) -> None:
    """End the run with 71 if a sum of this start has a wrong checksum on some rank. Collective.

    The host waits for the last step: call it before a save, an evaluation or a record.
    """
    if t.strategy.is_corrupted is None:
        return
    at = t.outcome.corrupted()
    found = t.world.gather(at and [at.step + 1, f"rank {t.world.rank} on {socket.gethostname()}"])  # Collective.
    if steps := [step for step, _ in filter(None, found)]:
        places = some(place for step, place in filter(None, found) if step == min(steps))
        raise UserError(
            f"the sum of the gradients of optimizer step {min(steps)} is not the sum of what the ranks sent: its"
            f" checksum is wrong on {places}; a link, a device or memory has changed it; nothing of this step was"
            " saved, and the same command continues the run; if it happens again, leave out these hosts one by one",
            Exit.HARDWARE)
