"""A device's memory: batch sizes that fit are found by trying, before training starts."""

import socket
import traceback
from collections.abc import Callable
from contextlib import suppress

import torch

from engine.training import Training
from utils.distributed.world import World
from utils.errors import Exit, RankError, UserError, counted, is_out_of_memory, memory_words


def resolve_size(size: int, attempt: Callable[[int], None], is_free: bool, world: World) -> int:
    """`size`, or the largest of size / 2, ... such that micro-batches fit into every rank's device. Collective.

    attempt: tries a size on this rank. is_free: the size may change. Raises UserError (64) where it may not, or not
    even one sample fits. (Host memory is not tried out.)
    """
    if world.device.type == "cpu":
        return size
    fit, reason = size, ""  # of the first size that does not fit
    while fit and (lack := next(filter(None, world.gather(lack_of_memory(attempt, fit))), "")):  # Collective.
        fit, reason = fit // 2, reason or lack
    if fit < size and not (is_free and fit):
        way_out = f"--micro-batch-size {fit} fits" if fit else (
            "one sample does not fit: use a smaller --model, or a smaller --image-size or --max-length")
        raise UserError(f"micro-batches of {counted(size, 'sample')} do not fit into memory ({reason}); {way_out}")
    return fit


def lack_of_memory(work: Callable[[int], None], size: int) -> str:
    """Do `work`. If memory runs out, free what it held and return the host and the error message; else ""."""
    try:
        work(size)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        traceback.clear_frames(error.__traceback__)  # which hold what was allocated
        with suppress(RuntimeError):  # an allocator without a cache
            torch.accelerator.empty_cache()  # what collectives allocate, they do not take from it
        return f"{socket.gethostname()}: {memory_words(error)}"
    return ""


def naming_a_smaller_size(train: Callable[[Training], Exit], t: Training) -> Exit:
    """Return train(t). If memory runs out, raise an error (64) that names the save and a smaller size. Collective."""
    try:
        return train(t)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        flag, size = "--eval-batch-size", t.evaluation.eval_batch
        if t.strategy.module.training:
            flag, size = "--micro-batch-size", t.feed.plan.sizes[1]
        t.watchdog.enter("waiting for the save", t.checkpoints.limit_s, drains=False)
        t.checkpoints.close()  # finish the save under way
        step = t.checkpoints.newest_step()
        saved = "nothing is saved yet" if step is None else f"the run is saved at step {step}"
        way_out = f"use a smaller {flag} than {size}" if size > 1 else "use a smaller --model"
        raise RankError(f"out of memory on {t.world.device} of rank {t.world.rank} at step {t.state.progress.step}"
                        f" ({socket.gethostname()}: {memory_words(error)}); {saved};"
                        f" {way_out}") from None
