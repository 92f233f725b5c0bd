"""A stack whose parts can be killed and started again, as a cluster would."""

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

PARTS = ("buffer", "postgres", "s3")


class Breakable(Supervisor):
    """Remembers how each part was started."""

    endpoints: Endpoints

    def __init__(self, logs: Path) -> None:
        super().__init__(logs)
        self._started: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def start(self, name: str, *arguments: Any, **options: Any) -> None:
        self._started[name] = (arguments, options)
        super().start(name, *arguments, **options)

    def kill(self, name: str) -> None:
        """As the kernel does it when memory runs out."""
        child = self._child(name)
        os.kill(child.process.pid, signal.SIGKILL)
        child.process.wait()
        self._children.remove(child)

    def revive(self, name: str) -> None:
        """Starts it again, until it stays: Postgres first waits for its orphans to end."""
        arguments, options = self._started[name]
        deadline = time.monotonic() + 60
        super().start(name, *arguments, **options)
        while not self._ready():
            child = self._child(name)
            if child.process.exit_code is not None:
                self._children.remove(child)
                super().start(name, *arguments, **options)
            assert time.monotonic() < deadline, f"{name} did not come back: see {child.process.log}"
            time.sleep(0.05)

    def _ready(self) -> bool:
        return self.readiness() == 200

    def readiness(self) -> int:
        """The status of /readyz; 0 when nobody answers."""
        try:
            return httpx.get(f"{self.endpoints.buffer_url}/readyz", timeout=10).status_code
        except httpx.TransportError:
            return 0


@contextmanager
def breakable_stack() -> Iterator[Breakable]:
    with (
        TemporaryDirectory(prefix="bapo-breakable-") as home,
        TemporaryDirectory(prefix="bapo-", dir="/tmp") as sockets,
        Breakable(Path(home) / "logs") as breakable,
    ):
        breakable.endpoints = Stack(Path(home), breakable, 0).start(Path(sockets))
        yield breakable
