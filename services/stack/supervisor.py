"""Starts the processes of a run or a stack, reports the first that fails, and stops them all."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bapo_core.errors import BapoError
from services.common.listener import bind_address
from services.common.process import (
    STOP_WITHIN_S,
    ChildProcess,
    describe_exit,
    python_command,
)


class ProcessFailed(BapoError):
    """A supervised process failed, ended early, or did not become ready in time."""


class NotReady(ProcessFailed):
    """A supervised process runs, and did not become ready in time."""


@dataclass(frozen=True, slots=True)
class _Child:
    name: str
    process: ChildProcess
    stop_within_s: float


class Supervisor:
    """Holds child processes in the order they were started, and stops them in reverse.

    The kernel ends the children when this process ends, even if it is killed (`end_with_parent`).
    Start them from the main thread: the kernel ends a child with the thread that started it.
    """

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._children: list[_Child] = []
        self._ports = ExitStack()
        logs.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._ports.close()

    def reserve_ports(self, count: int) -> list[int]:
        """Returns ports for the children, which stay reserved until the supervisor's exit."""
        return self._ports.enter_context(reserve_ports(count))

    def start(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        inherited: Mapping[str, str] | None = None,
        listener: socket.socket | None = None,
        user: str | None = None,
        stop_signal: signal.Signals = signal.SIGTERM,
        stop_within_s: float = STOP_WITHIN_S,
    ) -> None:
        """Starts `command`; its output goes to `<name>.log`.

        What an earlier child of this name wrote is in `<name>.previous.log` from then on.

        environment: variables added to the inherited ones.
        inherited: variables that the child inherits; all of this process unless given.
        listener: socket that the child is to serve (`BAPO_LISTEN_FD`).
        user: name of the user to run as; needs root.
        stop_signal: signal that asks the child to stop.
        stop_within_s: seconds after which a child that was asked to stop is killed.
        """
        log = self._logs / f"{name}.log"
        if log.exists():
            log.replace(self._logs / f"{name}.previous.log")
        process = ChildProcess(
            command,
            environment={
                **(os.environ if inherited is None else inherited),
                **(environment or {}),
                **({} if listener is None else {"BAPO_LISTEN_FD": str(listener.fileno())}),
            },
            pass_fds=() if listener is None else (listener.fileno(),),
            log=log,
            user=user,
            stop_signal=stop_signal,
        )
        self._children.append(_Child(name, process, stop_within_s))

    def start_python(
        self,
        name: str,
        module: str,
        environment: Mapping[str, str],
        *,
        inherited: Mapping[str, str] | None = None,
        listener: socket.socket | None = None,
    ) -> None:
        """Starts one of this project's modules, as `start` does."""
        self.start(
            name,
            python_command(module),
            environment=environment,
            inherited=inherited,
            listener=listener,
        )

    def check(self) -> None:
        """Raises `ProcessFailed` when a child has ended with an error."""
        for child in self._children:
            code = child.process.exit_code
            if code not in (None, 0):
                raise ProcessFailed(f"{child.name} {describe_exit(code)}: {_reason(child, code)}")

    def finished(self, name: str) -> bool:
        """Returns whether the child has ended. Raises `ProcessFailed` when any child has failed."""
        self.check()
        return self._child(name).process.exit_code == 0

    def pid(self, name: str) -> int:
        """Returns the process id of a child."""
        return self._child(name).process.pid

    def wait_until(self, ready: Callable[[], bool], what: str, *, seconds: float) -> None:
        """Polls `ready` and returns once it is true.

        Raises `ProcessFailed` when a child ends first, and `NotReady` after `seconds`; the message
        names `what` did not become ready.
        """
        deadline = time.monotonic() + seconds
        while not ready():
            self.check_all_running()
            if time.monotonic() > deadline:
                raise NotReady(f"{what} did not become ready in {seconds:.0f} s; see {self._logs}")
            time.sleep(0.05)

    def check_all_running(self) -> None:
        """Raises `ProcessFailed` when any child has ended, with or without an error."""
        self.check()
        for child in self._children:
            if child.process.exit_code is not None:
                raise ProcessFailed(f"{child.name} ended early: {child.process.last_error()}")

    def log_of(self, name: str) -> Path:
        """Returns the file with what a child has written."""
        return self._logs / f"{name}.log"

    def stop(self, *names: str) -> None:
        """Stops the named children, or all of them: the last started first."""
        selected = [child for child in self._children if not names or child.name in names]
        for child in reversed(selected):
            child.process.stop(child.stop_within_s)
            self._children.remove(child)

    def _child(self, name: str) -> _Child:
        return next(child for child in self._children if child.name == name)


def _reason(child: _Child, code: int) -> str:
    """Returns why a child ended."""
    if code == -signal.SIGKILL:  # Nothing that it wrote says so.
        return f"by a person, or for lack of memory (log: {child.process.log})"
    return child.process.last_error()


@contextmanager
def reserve_ports(count: int) -> Iterator[list[int]]:
    """Yields ports that the kernel assigns to no other socket of this machine before the exit.

    The kernel chooses neither a port for a client's connection nor a free port (port 0) where a
    socket is bound to the same address or to all, as these sockets are: Gloo listens on ports of
    the host's own address, where PyTorch's store, which takes all addresses, then finds its port in
    use. A program that names the port and sets SO_REUSEADDR, as Go, asyncio and PyTorch do, can
    still listen on it, because these sockets do not listen.
    """
    with ExitStack() as sockets:
        ports = []
        for _ in range(count):
            bound = sockets.enter_context(bind_address("::", 0))
            ports.append(bound.getsockname()[1])
        yield ports


def bind_port(port: int = 0, option: str = "") -> socket.socket:
    """Returns a socket that listens on a port of 127.0.0.1, for a child to serve.

    Connections wait until the child accepts them. A socket that is bound and does not listen would
    not keep others from the port, if they set SO_REUSEADDR, too.

    port: 0 takes any free one. option: the option that sets the port, for the message.

    Raises `BapoError` when the port is in use.
    """
    bound = socket.socket()
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("127.0.0.1", port))
        bound.listen(2048)
    except OSError as error:
        bound.close()
        raise BapoError(
            f"port {port} is busy; stop the process that listens on it, or choose another port "
            f"with {option} (0 takes any free one); if it is the stack of another directory, "
            "call bapo from there or set BAPO_HOME"
        ) from error
    return bound
