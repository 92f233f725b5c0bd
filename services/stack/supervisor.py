"""Starts processes, notices when one fails, and leaves none behind."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bapo_core.errors import BapoError
from services.common.process import (
    STOP_WITHIN_S,
    ChildProcess,
    describe_exit,
    python_command,
)


class ProcessFailed(BapoError):
    """A process of the run ended when it should not have."""


@dataclass(frozen=True, slots=True)
class _Child:
    name: str
    process: ChildProcess
    stop_within_s: float


class Supervisor:
    """Children in the order they were started; stopped in reverse, by force if need be.

    The children die with this process even if it is killed: the kernel sees to that
    (`end_with_parent`). Start them from the main thread, or they would die with another one.
    """

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._children: list[_Child] = []
        logs.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        user: str | None = None,
        stop_signal: signal.Signals = signal.SIGTERM,
        stop_within_s: float = STOP_WITHIN_S,
    ) -> None:
        """Starts `command`; its output goes to `<name>.log`, which is begun anew."""
        process = ChildProcess(
            command,
            environment={**os.environ, **(environment or {})},
            log=self._logs / f"{name}.log",
            user=user,
            stop_signal=stop_signal,
        )
        self._children.append(_Child(name, process, stop_within_s))

    def start_python(self, name: str, module: str, environment: Mapping[str, str]) -> None:
        """Starts one of our own modules."""
        self.start(name, python_command(module), environment=environment)

    def check(self) -> None:
        """Raises `ProcessFailed` if any child has ended with an error."""
        for child in self._children:
            code = child.process.exit_code
            if code not in (None, 0):
                raise ProcessFailed(
                    f"{child.name} {describe_exit(code)}: {child.process.last_error()}"
                )

    def finished(self, name: str) -> bool:
        """Whether the child has ended without an error."""
        self.check()
        return self._child(name).process.exit_code == 0

    def pid(self, name: str) -> int:
        return self._child(name).process.pid

    def wait_until(
        self, ready: Callable[[], bool], what: str, *, seconds: float, pause: float = 0.05
    ) -> None:
        """Returns once `ready()`; an error if a child fails first or the time is up."""
        deadline = time.monotonic() + seconds
        while not ready():
            self.check_all_alive()
            if time.monotonic() > deadline:
                raise ProcessFailed(
                    f"{what} did not become ready in {seconds:.0f} s; see {self._logs}"
                )
            time.sleep(pause)

    def check_all_alive(self) -> None:
        """As `check`, for children that should not end at all yet."""
        self.check()
        for child in self._children:
            if child.process.exit_code is not None:
                raise ProcessFailed(f"{child.name} ended early: {child.process.last_error()}")

    def stop(self, *names: str) -> None:
        """Stops these children, or all: the last started first."""
        doomed = [child for child in self._children if not names or child.name in names]
        for child in reversed(doomed):
            child.process.stop(child.stop_within_s)
            self._children.remove(child)

    def _child(self, name: str) -> _Child:
        return next(child for child in self._children if child.name == name)


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that were free a moment ago; all different."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def check_port_free(port: int, option: str) -> None:
    """An error that names the port and the way out if somebody listens there."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise BapoError(
                f"port {port} is busy; stop what listens there, or choose another with {option} "
                "(0 = any free one)"
            ) from error
