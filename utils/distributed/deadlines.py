"""Deadlines of the main thread.

A hang raises no error: a collective whose peer is gone, a read from a dead disk, a deadlock. So the main thread says
what it begins and how long that may take, and the watchdog's thread looks at the clock. No torch at module level.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

MARGIN_S = 5  # extra time for work, so that a rank without data reports before the ranks that wait for it
T = TypeVar("T")


class Deadlines:
    """What the main thread is doing, and by when it must make progress.

    drain_s: the limit in seconds after torchrun has sent SIGTERM.
    """

    def __init__(self, drain_s: float):
        self.limit_s = float("inf")  # of what the main thread is doing
        self._doing, self._detail, self._deadline = "", lambda: "", float("inf")
        self._drain_s, self._is_draining, self._drains = drain_s, False, True

    def enter(self, doing: str, limit_s: float, detail: Callable[[], str] = lambda: "", drains: bool = True) -> None:
        """The main thread made progress and begins something; it enters the next thing within `limit_s` seconds.

        detail: returns more words about it. drains: False = a SIGTERM of torchrun does not shorten the limit (of a
        save, for which TORCH_ELASTIC_SHUTDOWN_TIMEOUT may leave more time).
        """
        self._doing, self._detail, self.limit_s, self._drains = doing, detail, limit_s, drains
        if self._is_draining and self._drains:
            self.limit_s = min(self.limit_s, self._drain_s)
        self._deadline = time.monotonic() + self.limit_s

    def watch(self, items: Iterable[T], doing: str, first_s: float, next_s: float,
              detail: Callable[[], str]) -> Iterator[T]:
        """The items. Each may take `next_s` seconds to come (the first one `first_s`), and MARGIN_S more to be used.

        detail: returns what is being loaded.
        """
        iterator, limit_s = iter(items), first_s
        while True:
            self.enter(f"{doing}, waiting for data", limit_s, detail)
            try:
                item = _next(iterator)
            except RuntimeError as error:  # a data loading process was killed, say
                error.add_note(detail())
                raise
            if item is None:
                return
            self.enter(doing, limit_s + MARGIN_S)
            yield item
            limit_s = next_s

    def drain(self) -> None:
        """After a SIGTERM of torchrun: shorten the limits."""
        self._is_draining = True
        if self._drains:
            self.limit_s = min(self.limit_s, self._drain_s)
            self._deadline = min(self._deadline, time.monotonic() + self._drain_s)

    def is_missed(self) -> bool:
        """Whether the main thread has made no progress for too long."""
        return time.monotonic() > self._deadline

    def __str__(self) -> str:
        """What the main thread is doing."""
        return f"{self._doing}{self._detail()}"


def _next(iterator: Iterator[T]) -> T | None:
    """The next item; None at the end."""
    try:
        return next(iterator, None)
    except (ConnectionError, EOFError):  # a data loading process dies: its pipe is closed before the system says so
        time.sleep(MARGIN_S)  # torch's handler of SIGCHLD ends this by an error that has its id
        raise
