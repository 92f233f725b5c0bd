"""The local stack: Postgres, S3, the buffer service and the verifier, under one supervisor.

At most one stack runs in a home directory. `stack.lock` there is held by the process that runs it,
`stack.json` says how to reach it, and `stack.users` is locked by every command that uses it.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TextIO

import httpx
from pydantic import SecretStr

from bapo_core.errors import BapoError
from services.common.files import write_private
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
from services.stack.supervisor import Supervisor, check_port_free, free_ports

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
        self._token = _token_of(home)

    def start(self, sockets: Path) -> Endpoints:
        """Starts all processes; `sockets` is a directory with a short path, for Postgres.

        Raises `BapoError` when the port is busy or a process does not become ready.
        """
        if self._port:
            check_port_free(self._port, "--port")
        verifier_port, any_port, *s3_ports = free_ports(2 + s3.PORTS)
        buffer_port = self._port or any_port
        object_store = s3.start_s3(self._supervisor, self._home / "s3", s3_ports)
        database_url = start_postgres(self._supervisor, self._home / "postgres", sockets)
        endpoints = Endpoints(
            buffer_url=f"http://127.0.0.1:{buffer_port}",
            verifier_url=f"http://127.0.0.1:{verifier_port}",
            database_url=database_url,
            s3_endpoint=object_store.endpoint,
            s3_access_key=object_store.access_key.get_secret_value(),
            s3_secret_key=object_store.secret_key.get_secret_value(),
            token=self._token,
            verifier_token=secrets.token_urlsafe(24),
            pid=os.getpid(),
        )
        self._start_verifier(verifier_port, endpoints.verifier_token)
        s3.await_s3(self._supervisor, object_store)
        environment = {
            "BAPO_DATABASE_URL": database_url,
            **endpoints.process_environment(endpoints.token),
            **_service_variables(buffer_port),
        }
        self._supervisor.start_python("buffer", "services.buffer.main", environment)
        for url in (endpoints.verifier_url, endpoints.buffer_url):
            self._supervisor.wait_until(partial(_is_healthy, url), url, seconds=READY_WITHIN_S)
        return endpoints

    def _start_verifier(self, port: int, token: str) -> None:
        """Starts the verifier, whose processes run graders: it gets no secret but its token."""
        settings = {
            name: value for name, value in os.environ.items() if name.startswith("BAPO_VERIFIER_")
        }
        environment = {
            **settings,
            **_service_variables(port),
            "BAPO_TOKEN": token,
            "BAPO_HOME": str(self._home),
        }
        environment.pop("BAPO_VERIFIER_TOKEN", None)
        self._supervisor.start_python(
            "verifier",
            "services.verifier.app",
            environment,
            inherited=without_secrets(os.environ),
        )


def _service_variables(port: int) -> dict[str, str]:
    return {"BAPO_PORT": str(port), "OMP_NUM_THREADS": "1"}


def _token_of(home: Path) -> str:
    """Returns the admin token of a home's stacks: addresses of the dashboard stay valid."""
    file = home / "token"
    if not file.exists():
        write_private(file, secrets.token_urlsafe(24))
    return file.read_text()


def _is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2).is_success
    except httpx.TransportError:
        return False


# ---- one stack for each home --------------------------------------------------------------------


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
    home.mkdir(parents=True, exist_ok=True)
    with (home / "stack.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StackBusy(
                f"a stack is starting or running in {home}; stop it with `bapo stack down`, or "
                "use another BAPO_HOME"
            ) from error
        sockets = Path(tempfile.mkdtemp(prefix="bapo-", dir="/tmp"))
        state = home / "stack.json"
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
            s3.remove_dead_sockets()


def find_stack(home: Path) -> Endpoints | None:
    """Returns the stack that runs in `home`, None when there is none."""
    try:
        endpoints = Endpoints(**json.loads((home / "stack.json").read_text()))
    except FileNotFoundError:
        return None
    return endpoints if _accepts_token(endpoints) else None


def _accepts_token(endpoints: Endpoints) -> bool:
    """Returns whether the stack of `stack.json` runs.

    After a crash, another process may listen on its port, but not with its token.
    """
    try:
        response = httpx.get(
            f"{endpoints.buffer_url}/v1/token",
            headers={"Authorization": f"Bearer {endpoints.token}"},
            timeout=2,
        )
    except httpx.TransportError:
        return False
    return response.status_code != 401


@contextmanager
def find_or_start_stack(home: Path, port: int = DEFAULT_PORT) -> Iterator[Endpoints]:
    """Uses the stack that runs in `home`, or starts one for as long as any command uses it.

    The command that started a stack waits for the other users before it stops the stack. A command
    that comes during that time waits for the stop and starts the next stack.
    """
    home.mkdir(parents=True, exist_ok=True)
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
    (home / "logs").mkdir(parents=True, exist_ok=True)
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
