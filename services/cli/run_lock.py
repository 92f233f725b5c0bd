"""The lock of a run on this machine: one command at a time trains it."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from bapo_core.errors import BapoError
from services.buffer.api import wire

POLL_INTERVAL_S = 0.2
RELEASED_WITHIN_S = 120.0
"""Seconds within which a command that lost its run has stopped its processes."""


class RunLock:
    """Held by the command that trains a run, which the kernel ends whenever the command ends."""

    def __init__(self, home: Path, run: str) -> None:
        self._run, self._path = run, home / "locks" / f"{run}.lock"
        self._file: TextIO | None = None

    def acquire(self) -> bool:
        """Acquires the lock, and returns whether this command holds it now."""
        if self._file is not None:
            return True
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = self._path.open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return False
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        self._file = file
        return True

    @contextmanager
    def held(self) -> Iterator[None]:
        """Holds the lock, which may be acquired already, for as long as the context lasts.

        Raises `BapoError` if another command on this machine trains the run.
        """
        if not self.acquire():
            raise BapoError(
                f"run {self._run!r} is being trained here, by {self.holder()}; wait for its end, "
                f"or stop it (`bapo stop {self._run}`)"
            )
        try:
            yield
        finally:
            self.close()

    def describe(self, state: wire.RunState) -> str:
        """Describes the command that holds the lock of a run, for a message to a person."""
        began = state.attempt_began_at
        since = f" since {began.astimezone():%H:%M:%S}" if began is not None else ""
        steps = f"step {state.current_step} of {state.steps or '?'}"
        return f"run {state.name!r} is being trained here{since}, by {self.holder()}, at {steps}"

    def holder(self) -> str:
        """Returns the command that holds the lock, for people."""
        pid = self._path.read_text().strip()
        return f"process {pid}" if pid else "another process"

    def wait(self) -> None:
        """Acquires the lock once the command that holds it has stopped its processes.

        Raises `BapoError` if it has not within `RELEASED_WITHIN_S`.
        """
        deadline = time.monotonic() + RELEASED_WITHIN_S
        while not self.acquire():
            if time.monotonic() > deadline:
                raise BapoError(
                    f"{self.holder()} has not stopped training run {self._run!r} in "
                    f"{RELEASED_WITHIN_S:.0f} s, though it was told to; end it, then repeat this "
                    "command"
                )
            time.sleep(POLL_INTERVAL_S)

    def close(self) -> None:
        """Lets another command train the run. Further calls do nothing."""
        if self._file is not None:
            self._file.close()
            self._file = None
