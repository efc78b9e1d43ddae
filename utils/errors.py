"""Exit codes, and the errors that carry them to the shell.

The codes are those of sysexits.h where it has one, so that schedulers and scripts can act on them.
"""

import os
import re
import socket
from enum import IntEnum


class Exit(IntEnum):
    """Exit codes of train.py; a script outside the project may depend on each."""

    DONE = 0
    USAGE = 64
    BAD_DATA = 65
    NO_INPUT = 66
    INTERNAL = 70
    CANNOT_CREATE = 73
    IO = 74
    STOPPED = 75  # stopped and saved: the same command continues
    LOST_PEERS = 76
    OTHER_RUN = 78  # the run directory belongs to other settings or is in use
    DIVERGED = 80
    NO_CHECKPOINT = 82  # checkpoints exist, and none loads


class UserError(ValueError):
    """Something the user can mend: what was found, the rule, a way out. Raised alike on every rank; rank 0 prints it."""

    def __init__(self, message: str, code: Exit = Exit.USAGE):
        super().__init__(message)
        self.code = code


class RankError(UserError):
    """A UserError that only this rank knows of (an unreadable sample, say), so this rank prints it."""


def explain(error: Exception) -> tuple[str, Exit]:
    """An error in words for the user, and its exit code; INTERNAL for what should not happen."""
    names, text = {kind.__name__ for kind in type(error).__mro__}, str(error)
    if isinstance(error, UserError):
        return text, error.code
    if "OutOfMemoryError" in names or "can't allocate memory" in text or isinstance(error, MemoryError):
        return f"out of memory: use a smaller --micro-batch-size; the global batch stays ({text.splitlines()[0]})", Exit.USAGE
    said_by_backend = "RuntimeError" in names and re.search(r"gloo|nccl|Connection (closed|reset|refused)|monitoredBarrier", text, re.I)
    if "DistError" in names or said_by_backend:
        host = socket.gethostname()
        return f"rank {os.environ.get('RANK', 0)} on {host} lost its peers ({text.splitlines()[0][:200]})", Exit.LOST_PEERS
    if isinstance(error, OSError):
        return f"{type(error).__name__}: {text}", Exit.IO
    return text, Exit.INTERNAL
