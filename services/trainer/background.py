"""Work in the background of training, one task at a time."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Background:
    """Runs one task at a time in a thread; the next call raises the error of one that failed."""

    def __init__(self, name: str) -> None:
        """name: of the thread."""
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._task: Future[None] | None = None

    def begin(self, work: Callable[[], None]) -> None:
        """Starts `work`. Call `settle` first: the task before may still be running."""
        self._task = self._executor.submit(work)

    def check(self) -> None:
        """Raises the error of a task that has failed; does not wait for one that runs."""
        if self._task is not None and self._task.done():
            self._task.result()

    def settle(self) -> None:
        """Waits for the running task, and raises its error if it fails."""
        if self._task is not None:
            self._task.result()
