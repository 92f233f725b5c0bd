"""The local stack: Postgres, S3, the buffer service and the verifier, under one supervisor.

At most one stack runs in a home directory. `stack.lock` there is held by the process that runs it,
and has its id; `stack.json` says how to reach it, and `stack.users` is locked by every command that
uses it.
"""

from __future__ import annotations

import fcntl
import json
import os
import pwd
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TextIO

import httpx
from pydantic import SecretStr

from bapo_core.errors import BapoError
from services.common.files import write_private
from services.common.http_options import direct_options
from services.common.process import (
    hide_memory,
    last_error,
    python_command,
    stop_on_signals,
    without_secrets,
)
from services.common.settings import ObjectStoreSettings
from services.stack import DEFAULT_PORT, s3
from services.stack.postgres import start_postgres
from services.stack.supervisor import Supervisor, bind_port

READY_WITHIN_S = 60.0
"""Seconds within which one process of the stack must become ready."""
STARTED_WITHIN_S = 4 * READY_WITHIN_S
"""Seconds within which all of them are ready, or the process that starts them has given up."""
CHECK_INTERVAL_S = 0.5


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Addresses and secrets of a running stack, as `stack.json` holds them for its owner."""

    buffer_url: str
    verifier_url: str
    database_url: str
    s3_endpoint: str
    s3_access_key: str
    s3_secret_key: str
    token: str
    """Bearer token of the buffer service, of scope `admin`: that of a person's commands."""
    pid: int
    """Process that runs the stack."""
    verifier_token: str = ""
    """Token that the verifier accepts, and nothing else does; empty for a stack of an earlier
    version."""
    stays: bool = False
    """Whether the stack runs until `bapo stack down` stops it. Otherwise it ends with the command
    that started it."""

    @property
    def object_store(self) -> ObjectStoreSettings:
        return ObjectStoreSettings(
            endpoint=self.s3_endpoint,
            bucket=s3.BUCKET,
            access_key=SecretStr(self.s3_access_key),
            secret_key=SecretStr(self.s3_secret_key),
        )

    def environment(self) -> dict[str, str]:
        """Returns all variables with which programs find the stack, as its owner."""
        return {
            **self.process_environment(self.token),
            **self.verifier_environment(),
            "BAPO_DATABASE_URL": self.database_url,
        }

    def process_environment(self, token: str) -> dict[str, str]:
        """Returns the variables with which a process of a run finds buffer service and objects.

        token: bearer token of the buffer service, of the scope of that process.
        """
        return {
            "BAPO_BUFFER_URL": self.buffer_url,
            "BAPO_TOKEN": token,
            **self.object_store.environment(),
        }

    def verifier_environment(self) -> dict[str, str]:
        """Returns the variables with which a collector finds the verifier."""
        return {
            "BAPO_VERIFIER_URL": self.verifier_url,
            "BAPO_VERIFIER_TOKEN": self.verifier_token,
        }


class Stack:
    """Starts the stack's processes and waits until each is ready."""

    def __init__(self, home: Path, supervisor: Supervisor, port: int) -> None:
        self._home, self._supervisor, self._port = home, supervisor, port

    def start(self, sockets: Path) -> Endpoints:
        """Starts all processes; `sockets` is a directory with a short path, for Postgres.

        Raises `BapoError` when the port is busy or a process does not become ready.
        """
        with bind_port(self._port, "--port") as buffer, bind_port() as verifier:
            return self._start_processes(sockets, buffer, verifier)

    def _start_processes(
        self, sockets: Path, buffer: socket.socket, verifier: socket.socket
    ) -> Endpoints:
        """Starts all processes; the buffer service and the verifier serve these sockets."""
        buffer_port, verifier_port = (bound.getsockname()[1] for bound in (buffer, verifier))
        s3_ports = self._supervisor.reserve_ports(s3.PORTS)
        object_store = s3.start_s3(self._supervisor, self._home / "s3", s3_ports)
        database_url = start_postgres(self._supervisor, self._home / "postgres", sockets)
        endpoints = Endpoints(
            buffer_url=f"http://127.0.0.1:{buffer_port}",
            verifier_url=f"http://127.0.0.1:{verifier_port}",
            database_url=database_url,
            s3_endpoint=object_store.endpoint,
            s3_access_key=object_store.access_key.get_secret_value(),
            s3_secret_key=object_store.secret_key.get_secret_value(),
            # New for each start, so that what has read an old one has nothing.
            token=secrets.token_urlsafe(24),
            verifier_token=secrets.token_urlsafe(24),
            pid=os.getpid(),
        )
        self._start_verifier(verifier, endpoints.verifier_token)
        environment = {
            "BAPO_DATABASE_URL": database_url,
            **endpoints.process_environment(endpoints.token),
            **_service_variables(buffer),
        }
        self._supervisor.start_python(
            "buffer", "services.buffer.main", environment, listener=buffer
        )
        # The object store begins to serve after two seconds, in which the services are imported.
        s3.await_s3(self._supervisor, object_store)
        for url in (endpoints.verifier_url, endpoints.buffer_url):
            self._supervisor.wait_until(partial(_is_healthy, url), url, seconds=READY_WITHIN_S)
        return endpoints

    def _start_verifier(self, listener: socket.socket, token: str) -> None:
        """Starts the verifier, whose processes run graders: it gets no secret but its token."""
        settings = {
            name: value for name, value in os.environ.items() if name.startswith("BAPO_VERIFIER_")
        }
        environment = {
            **settings,
            **_service_variables(listener),
            "BAPO_TOKEN": token,
            "BAPO_HOME": str(self._home),
        }
        environment.pop("BAPO_VERIFIER_TOKEN", None)
        self._supervisor.start_python(
            "verifier",
            "services.verifier.app",
            environment,
            inherited=without_secrets(os.environ),
            listener=listener,
        )


def _service_variables(listener: socket.socket) -> dict[str, str]:
    return {"BAPO_PORT": str(listener.getsockname()[1]), "OMP_NUM_THREADS": "1"}


def _is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2, **direct_options(url)).is_success
    except httpx.TransportError:
        return False


# ---- one stack for each home --------------------------------------------------------------------


def check_home(home: Path) -> None:
    """Raises `BapoError` unless a home, if it exists, is this user's and no other can write to it.

    Whoever can write to it can put addresses and tokens there, which commands would follow.
    """
    try:
        status = home.stat()
    except FileNotFoundError:
        return
    if status.st_uid != os.geteuid():
        raise BapoError(
            f"{home} belongs to another user ({_name_of(status.st_uid)}), who may have put "
            "addresses and tokens there; remove it, or set BAPO_HOME to a directory of your own"
        )
    if status.st_mode & 0o022:
        raise BapoError(
            f"{home} can be written to by other users (mode {status.st_mode & 0o777:o}), who may "
            "have put addresses and tokens there; if you know all that is in it, run `chmod go-w "
            f"{home}`, else set BAPO_HOME to another directory"
        )


def _make_home(home: Path) -> None:
    """Makes a home that other users cannot enter. Raises `BapoError` as `check_home` does."""
    check_home(home)
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    mode = home.stat().st_mode
    if mode & 0o067:  # Where we are root, the group of Postgres's user may pass through.
        home.chmod(mode & 0o710)


def _name_of(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)


class StackBusy(BapoError):
    """A stack of this home is starting or stopping, so it can be neither used nor started."""


@contextmanager
def running_stack(home: Path, port: int = DEFAULT_PORT) -> Iterator[Endpoints]:
    """Runs a stack for as long as the context lasts.

    port: port of the REST API; 0 takes any free one.

    Raises `StackBusy` when this home has a stack already.
    """
    with _supervised_stack(home, port) as (endpoints, _):
        yield endpoints


@contextmanager
def _supervised_stack(
    home: Path, port: int, *, stays: bool = False
) -> Iterator[tuple[Endpoints, Supervisor]]:
    """Runs a stack as `running_stack` does; yields the supervisor of its processes, too.

    stays: as in `Endpoints`.
    """
    _make_home(home)
    with (home / "stack.lock").open("a") as lock:
        if not _acquire(lock):
            raise StackBusy(
                f"a stack is starting or running in {home}; stop it with `bapo stack down`, or "
                "use another BAPO_HOME"
            )
        state = home / "stack.json"
        # What a killed stack has left must not look like this one.
        state.unlink(missing_ok=True)
        (home / "token").unlink(missing_ok=True)  # of an earlier version
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        sockets = _make_sockets(home)
        try:
            with Supervisor(home / "logs") as supervisor:
                started = Stack(home, supervisor, port).start(sockets)
                endpoints = replace(started, stays=stays)
                write_private(state, json.dumps(asdict(endpoints)))
                try:
                    yield endpoints, supervisor
                finally:
                    state.unlink(missing_ok=True)
        finally:
            shutil.rmtree(sockets, ignore_errors=True)
            (home / "sockets").unlink(missing_ok=True)
            s3.remove_dead_sockets()


def _acquire(lock: TextIO) -> bool:
    """Returns whether the lock of a home could be acquired.

    Commands that look whether it is held acquire it for a moment, so it is tried again.
    """
    for _ in range(10):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.02)
        else:
            return True
    return False


def _make_sockets(home: Path) -> Path:
    """Makes the directory of Postgres's socket, with a short path; removes a killed stack's.

    `sockets` in the home names it.
    """
    record = home / "sockets"
    if record.exists():
        shutil.rmtree(record.read_text(), ignore_errors=True)
    sockets = Path(tempfile.mkdtemp(prefix="bapo-", dir="/tmp"))
    write_private(record, str(sockets))
    return sockets


def find_stack(home: Path) -> Endpoints | None:
    """Returns the stack that runs in `home`, None when there is none.

    Raises `BapoError` as `check_home` does.
    """
    check_home(home)
    # After a crash, another process may listen on the port, and must not get the token. The lock
    # ends with the process that holds it, however it ends.
    lock = home / "stack.lock"
    endpoints = _read_endpoints(home / "stack.json", lock)
    if endpoints is None or not _is_held(lock) or lock.read_text() not in ("", str(endpoints.pid)):
        return None
    return endpoints if _is_healthy(endpoints.buffer_url) else None


def _read_endpoints(path: Path, lock: Path) -> Endpoints | None:
    """Returns what a file says of a stack; None without a file, and for the rest of a crash.

    Raises `BapoError` for the unreadable file of a stack that runs.
    """
    names = {field.name for field in fields(Endpoints)}
    try:
        # Fields of a newer version are left out, so that its stack can be used and stopped.
        found = json.loads(path.read_text())
        return Endpoints(**{name: value for name, value in found.items() if name in names})
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, AttributeError) as error:
        if not _is_held(lock):
            return None
        raise BapoError(
            f"{path} cannot be read, as after a power loss or a change of bapo's version, while a "
            f"stack runs; end process {lock.read_text() or f'that holds {lock}'}, and repeat the "
            "command"
        ) from error


@contextmanager
def find_or_start_stack(home: Path, port: int = DEFAULT_PORT) -> Iterator[Endpoints]:
    """Uses the stack that runs in `home`, or starts one for as long as any command uses it.

    The command that started a stack waits for the other users before it stops the stack. A command
    that comes during that time waits for the stop and starts the next stack.
    """
    _make_home(home)
    deadline, announced = time.monotonic() + 2 * READY_WITHIN_S, False
    with (home / "stack.users").open("w") as users:
        while True:
            fcntl.flock(users, fcntl.LOCK_SH)
            endpoints = find_stack(home)
            if endpoints is not None:
                yield endpoints
                return
            fcntl.flock(users, fcntl.LOCK_UN)
            try:
                with running_stack(home, port) as endpoints:
                    try:
                        yield endpoints
                    finally:
                        _wait_for_other_users(users, home)
                    return
            except StackBusy:
                # Another command's stack is starting or stopping.
                if time.monotonic() > deadline:
                    raise
                if not announced:
                    _announce(f"waiting: a stack of {home} is starting or stopping")
                announced = True
                time.sleep(0.2)


def _wait_for_other_users(users: TextIO, home: Path) -> None:
    """Returns once no other command uses the stack; from then on, none can begin to."""
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        _announce(
            f"waiting: another command uses the services of {home}, which keep running until it "
            "ends (`bapo stack up` starts services that stay)"
        )
        fcntl.flock(users, fcntl.LOCK_EX)


def _announce(line: str) -> None:
    """Tells a person what a command waits for."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def stack_up(home: Path, port: int = DEFAULT_PORT) -> Endpoints:
    """Returns the stack of `home`; starts one that outlives this process when there is none.

    Raises `BapoError` when it does not start, or when there is one that ends with another command.
    """
    endpoints = find_stack(home)
    if endpoints is not None:
        if not endpoints.stays:
            raise BapoError(
                f"the services of another command (process {endpoints.pid}) are running, at "
                f"{endpoints.buffer_url}, and end with it; use them meanwhile, and repeat `bapo "
                "stack up` when it has ended"
            )
        return endpoints
    _make_home(home)
    (home / "logs").mkdir(exist_ok=True)
    log = home / "logs" / "stack.log"
    with log.open("w") as output:
        # Not a `ChildProcess`, which would end with this process.
        process = subprocess.Popen(
            python_command("services.stack.stack", str(home), str(port)),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    deadline = time.monotonic() + STARTED_WITHIN_S
    while (endpoints := find_stack(home)) is None:
        if process.poll() is not None or time.monotonic() > deadline:
            process.terminate()
            process.wait()
            raise BapoError(f"the stack did not start: {last_error(log)}")
        time.sleep(0.1)
    return endpoints


def stack_down(home: Path, *, force: bool = False) -> bool:
    """Stops the stack of `home` and waits until its ports are free.

    force: whether to do so while commands use it, which fail then.

    Returns False when no stack is running. Raises `BapoError` when it does not stop in time, when
    one runs that does not answer, and when commands use it.
    """
    endpoints = find_stack(home)
    if endpoints is None:
        if _is_held(home / "stack.lock"):
            raise BapoError(
                f"a stack is starting, stopping or does not answer in {home}; repeat the command, "
                f"or see {home / 'logs'} and end the process that holds {home / 'stack.lock'}"
            )
        return False
    if not force and _is_held(home / "stack.users"):
        raise BapoError(
            f"another command uses the services of {home}, such as a run that trains; stop it "
            "first (Ctrl-C), or end both with --force"
        )
    # Becomes readable when the process has ended, and with it everything that it had started.
    process = os.pidfd_open(endpoints.pid)
    os.kill(endpoints.pid, signal.SIGTERM)
    try:
        stopped, _, _ = select.select([process], [], [], READY_WITHIN_S)
    finally:
        os.close(process)
    if not stopped:
        raise BapoError(
            f"the stack (process {endpoints.pid}) has not stopped in {READY_WITHIN_S:.0f} s; see "
            f"{home / 'logs'}, or kill it"
        )
    return True


def _is_held(lock: Path) -> bool:
    """Returns whether a process holds a lock on a file, which need not exist."""
    try:
        with lock.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def main() -> None:
    """`python -m services.stack.stack HOME PORT` runs a stack until it is terminated.

    It ends when one of its processes has ended: `bapo stack up` then starts all of them again.
    """
    home, port = Path(sys.argv[1]), int(sys.argv[2])
    stop_on_signals()
    hide_memory()
    try:
        with _supervised_stack(home, port, stays=True) as (_, supervisor):
            while True:
                time.sleep(CHECK_INTERVAL_S)
                supervisor.check_all_running()
    except BapoError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
