"""Work that goes on beside training, one piece at a time."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Background:
    """Does one thing at a time in a thread of its own; a failure is raised by the next call."""

    def __init__(self, name: str) -> None:
        self._worker = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._doing: Future[None] | None = None

    def begin(self, work: Callable[[], None]) -> None:
        """Call `settle` before: what the work reads must not change under the one before."""
        self._doing = self._worker.submit(work)

    def check(self) -> None:
        """Raises what has gone wrong in the background."""
        if self._doing is not None and self._doing.done():
            self._doing.result()

    def settle(self) -> None:
        """Returns when everything is done; raises what has gone wrong."""
        if self._doing is not None:
            self._doing.result()
