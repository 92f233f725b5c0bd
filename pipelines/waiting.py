"""Says what a step of the pipeline waits for."""

from __future__ import annotations

import time
from collections.abc import Callable

SAY_EVERY_S = 60.0
"""Seconds after which a step repeats what it waits for."""


class WaitLog:
    """Logs what a step waits for: at once when that changes, and again every minute."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self._line = ""
        self._since = self._said = 0.0

    def restart(self) -> None:
        """Begins the minute again, because something has happened that was logged otherwise."""
        self._since = self._said = time.monotonic()

    def say(self, line: str, detail: str = "", *, later: Callable[[], str] = lambda: "") -> None:
        """Logs a line unless the same one was logged within the last minute.

        detail: what may change meanwhile, such as a step, without a line for each change. later:
        returns what is added when the line is repeated.
        """
        now = time.monotonic()
        if line != self._line:
            self._line, self._since, self._said = line, now, now
            self._log(line + detail)
        elif now - self._said >= SAY_EVERY_S:
            self._said = now
            minutes = (now - self._since) / 60
            self._log(f"{line}{detail}; for {minutes:.0f} min so far{later()}")
