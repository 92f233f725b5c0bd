"""Runs a local stack whose processes tests can kill and restart, as a cluster would."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from services.stack.stack import Endpoints, Stack
from services.stack.supervisor import Supervisor

PROCESSES = ("buffer", "postgres", "s3")


class Breakable(Supervisor):
    """Supervises processes and keeps their arguments, so that tests can restart them."""

    endpoints: Endpoints

    def __init__(self, logs: Path) -> None:
        super().__init__(logs)
        self._started: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def start(self, name: str, *arguments: Any, **options: Any) -> None:
        listener = options.get("listener")
        # The stack closes its socket when the process has it; a restart needs the port again.
        kept = {**options, "listener": None if listener is None else listener.dup()}
        self._started[name] = (arguments, kept)
        super().start(name, *arguments, **options)

    def kill(self, name: str) -> None:
        """Kills a process with SIGKILL, as a lack of memory does, and waits for its end."""
        child = self._child(name)
        os.kill(child.process.pid, signal.SIGKILL)
        child.process.wait()
        self._children.remove(child)

    def restart(self, name: str) -> None:
        """Starts a process that has ended, with the arguments that it had."""
        arguments, options = self._started[name]
        super().start(name, *arguments, **options)

    def revive(self, name: str) -> None:
        """Restarts a killed process and waits until the buffer service is ready.

        The first attempts may fail: Postgres refuses to start while its orphaned backends run.
        """
        deadline = time.monotonic() + 300
        self.restart(name)
        while not self._ready():
            child = self._child(name)
            if child.process.exit_code is not None:
                self._children.remove(child)
                self.restart(name)
            assert time.monotonic() < deadline, (
                f"{name} is not ready after 300 s: see {child.process.log}"
            )
            time.sleep(0.05)

    def _ready(self) -> bool:
        return self.readiness() == 200

    def readiness(self) -> int:
        """Returns the HTTP status of /readyz, or 0 if the buffer service does not answer."""
        try:
            return httpx.get(f"{self.endpoints.buffer_url}/readyz", timeout=10).status_code
        except httpx.TransportError:
            return 0


@contextmanager
def breakable_stack() -> Iterator[Breakable]:
    """Runs a stack of Postgres, S3 and the services in temporary directories."""
    with (
        TemporaryDirectory(prefix="bapo-breakable-") as home,
        TemporaryDirectory(prefix="bapo-", dir="/tmp") as sockets,
        Breakable(Path(home) / "logs") as breakable,
    ):
        breakable.endpoints = Stack(Path(home), breakable, 0).start(Path(sockets))
        yield breakable
