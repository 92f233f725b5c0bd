"""Starts processes, notices when one fails, and leaves none behind."""

from __future__ import annotations

import json
import os
import pwd
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from services.common.errors import BapoError
from services.common.process import end_with_parent

STOP_WITHIN_S = 15.0
"""What has not stopped by then is killed."""


class ProcessFailed(BapoError):
    """A process of the run ended when it should not have."""


@dataclass
class _Child:
    name: str
    process: subprocess.Popen[bytes]
    log: Path
    stop_signal: signal.Signals
    stop_within_s: float
    output: IO[bytes]


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
        log = self._logs / f"{name}.log"
        output = log.open("wb")
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            **as_user(user),
            # Its own session, so that Ctrl-C reaches only us and we stop it in order.
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        self._children.append(_Child(name, process, log, stop_signal, stop_within_s, output))

    def start_python(self, name: str, module: str, environment: Mapping[str, str]) -> None:
        """Starts one of our own modules."""
        self.start(name, [sys.executable, "-m", module], environment=environment)

    def check(self) -> None:
        """Raises `ProcessFailed` if any child has ended with an error."""
        for child in self._children:
            code = child.process.poll()
            if code not in (None, 0):
                raise ProcessFailed(f"{child.name} {_outcome(code)}: {_last_words(child.log)}")

    def finished(self, name: str) -> bool:
        """Whether the child has ended without an error."""
        self.check()
        return self._child(name).process.poll() == 0

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
            if child.process.poll() is not None:
                raise ProcessFailed(f"{child.name} ended early: {_last_words(child.log)}")

    def stop(self, *names: str) -> None:
        """Stops these children, or all: the last started first."""
        doomed = [child for child in self._children if not names or child.name in names]
        for child in reversed(doomed):
            if child.process.poll() is None:
                child.process.send_signal(child.stop_signal)
            try:
                child.process.wait(child.stop_within_s)
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
            child.output.close()
            self._children.remove(child)

    def _child(self, name: str) -> _Child:
        return next(child for child in self._children if child.name == name)


def as_user(name: str | None) -> dict[str, Any]:
    """Arguments of `subprocess` that run a child as this user, with none of our groups."""
    if name is None:
        return {}
    return {"user": name, "group": pwd.getpwnam(name).pw_gid, "extra_groups": []}


def _outcome(code: int) -> str:
    return f"failed (exit {code})" if code > 0 else f"was killed by {signal.Signals(-code).name}"


def _last_words(log: Path) -> str:
    """What the process said of its end: its last error, or else its last line."""
    lines = log.read_text(errors="replace").splitlines()
    for line in reversed(lines):
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and entry.get("level") == "error":
            return f"{entry['message']} (log: {log})"
    return f"{lines[-1] if lines else 'it said nothing'} (log: {log})"


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
