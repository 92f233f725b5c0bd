"""Servers that other people run: Postgres with a standby, and bapo's buffer service on them."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import psycopg
from psycopg.sql import SQL, Identifier

from services.buffer.api.client import BufferClient
from services.common.process import ChildProcess, as_user, python_command
from services.common.settings import ObjectStoreSettings
from services.stack.postgres import _unprivileged_user, find_binaries
from services.stack.stack import Endpoints
from services.stack.supervisor import reserve_ports

WITHIN_S = 60.0
"""Seconds within which a server does what a test waits for, also on a busy machine."""

_REMEDY = re.compile(
    r"(?:^|[;:,.(] |\b(?:or|and|then) )(?:add|call|check|choose|correct|end|free|give|lower|make|"
    r"move|name|raise|remove|repeat|restore|run|see|set|start|store|unset|use)\b"
    r"|\bmust have the form|_[A-Z]+ is not set|\blists (?:all routes|them)\b|\bcalls work again"
)
"""How a clause of a message begins that says what to do, and other ways to say it."""


def await_true(condition: Callable[[], bool], what: str) -> None:
    """Polls a condition. Fails the test if it is not true in `WITHIN_S` seconds."""
    deadline = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {WITHIN_S:.0f} s"
        time.sleep(0.05)


def check_message(message: str) -> str:
    """Returns a message. Fails unless it is one line that a terminal of 100 columns shows in three,
    and it says what to do."""
    assert "\n" not in message
    assert len(message) <= 300, f"{len(message)} characters: {message}"
    assert _REMEDY.search(message), f"it does not say what to do: {message}"
    return message


def plain(url: str) -> str:
    """Returns the URL as psycopg takes it."""
    return url.replace("postgresql+psycopg", "postgresql")


@contextmanager
def empty_database(stack: Endpoints, name: str) -> Iterator[str]:
    """Creates an empty database in the stack's Postgres, and yields its URL."""
    with psycopg.connect(plain(stack.database_url), autocommit=True) as connection:
        connection.execute(SQL("create database {}").format(Identifier(name)))
        yield stack.database_url.replace("/postgres?", f"/{name}?")
        connection.execute(SQL("drop database {} with (force)").format(Identifier(name)))


def server_user() -> str | None:
    """Returns the user that runs servers which refuse to run as root; None if this one can."""
    return _unprivileged_user() if os.geteuid() == 0 else None


@contextmanager
def open_directory() -> Iterator[Path]:
    """Yields a new directory that the user of the servers owns."""
    with TemporaryDirectory(prefix="bapo-outside-", dir="/tmp") as name:
        if user := server_user():
            shutil.chown(name, user)
        yield Path(name)


class Postgres:
    """A Postgres server that listens on one address and trusts everybody."""

    def __init__(self, directory: Path, port: int, host: str = "127.0.0.1") -> None:
        self.directory, self.port, self.host = directory, port, host
        self._process: ChildProcess | None = None

    def create(self) -> None:
        """Makes the files of an empty server."""
        self._run("initdb", f"-D{self.directory}/data", "-Upostgres", "-Eutf8", "--auth=trust")
        with (self.directory / "data" / "pg_hba.conf").open("a") as rules:
            rules.write("host all all all trust\n")

    def copy(self, primary: Postgres) -> None:
        """Makes this server a standby of another one that runs."""
        source = f"host=127.0.0.1 port={primary.port} user=postgres"
        data = f"{self.directory}/data"
        self._run("pg_basebackup", "-R", "-cfast", "-Xstream", f"-D{data}", f"-d{source}")

    def start(self) -> None:
        self._process = ChildProcess(
            [f"{find_binaries()}/postgres", "-D", f"{self.directory}/data", "-k", ""]
            + ["-h", self.host, "-p", str(self.port), "-c", "shared_buffers=16MB"],
            log=self.directory / "log",
            append_log=True,
            user=server_user(),
            stop_signal=signal.SIGINT,
        )
        await_true(self._answers, f"Postgres on port {self.port} starts")

    def stop(self) -> None:
        if self._process is not None:
            self._process.stop()

    def promote(self) -> None:
        """Makes a standby the primary."""
        self._run("pg_ctl", "promote", "-w", f"-D{self.directory}/data")

    def demote(self) -> None:
        """Restarts a primary as a server that takes no writes."""
        self.stop()
        (self.directory / "data" / "standby.signal").touch()
        self.start()

    def url(self, database: str = "postgres") -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"postgresql+psycopg://postgres@{host}:{self.port}/{database}"

    def execute(self, statement: str, database: str = "postgres") -> None:
        with psycopg.connect(plain(self.url(database)), autocommit=True) as connection:
            connection.execute(statement)  # type: ignore[call-overload]

    def _answers(self) -> bool:
        with suppress(psycopg.OperationalError):
            psycopg.connect(plain(self.url()), connect_timeout=5).close()
            return True
        return False

    def _run(self, program: str, *arguments: str) -> None:
        subprocess.run(
            [f"{find_binaries()}/{program}", *arguments],
            check=True,
            capture_output=True,
            cwd="/",
            **as_user(server_user()),
        )


@contextmanager
def postgres() -> Iterator[Postgres]:
    """Runs a Postgres server."""
    with open_directory() as directory, reserve_ports(1) as (port,):
        server = Postgres(directory, port)
        server.create()
        server.start()
        try:
            yield server
        finally:
            server.stop()


@dataclass(frozen=True)
class BufferService:
    """A buffer service that runs as a process of its own."""

    endpoints: Endpoints
    log: Path

    @property
    def url(self) -> str:
        return self.endpoints.buffer_url

    def client(self, run: str = "") -> BufferClient:
        return BufferClient(self.url, self.endpoints.token, run=run)

    def ready(self) -> tuple[int, str]:
        """Returns the status and the body of /readyz."""
        answer = httpx.get(f"{self.url}/readyz", timeout=WITHIN_S)
        return answer.status_code, answer.text

    def create_token(self) -> httpx.Response:
        """Sends one call that writes, without repeating it."""
        return httpx.post(
            f"{self.url}/v1/tokens",
            json={"name": "probe", "scope": "read", "days": 1},
            headers={"Authorization": f"Bearer {self.endpoints.token}"},
            timeout=WITHIN_S,
            # Reading the certificates of the system takes longer than the call, which is of HTTP.
            verify=False,
        )


@contextmanager
def buffer_service(
    stack: Endpoints,
    directory: Path,
    *,
    database_url: str = "",
    object_store: ObjectStoreSettings | None = None,
    variables: Mapping[str, str] | None = None,
) -> Iterator[BufferService]:
    """Runs a buffer service on another database or object store than the stack's.

    variables: further environment variables.
    """
    with reserve_ports(1) as (port,):
        endpoints = replace(
            stack,
            buffer_url=f"http://127.0.0.1:{port}",
            database_url=database_url or stack.database_url,
            s3_endpoint=(object_store or stack.object_store).endpoint,
        )
        log = directory / f"buffer-{port}.log"
        process = ChildProcess(
            python_command("services.buffer.main"),
            environment={
                **os.environ,
                **endpoints.environment(),
                **(object_store or stack.object_store).environment(),
                "BAPO_PORT": str(port),
                **(variables or {}),
            },
            log=log,
        )
        service = BufferService(endpoints, log)

        def answers() -> bool:
            assert process.exit_code is None, process.last_error()
            with suppress(httpx.TransportError):
                return httpx.get(f"{service.url}/health", timeout=5).is_success
            return False

        try:
            await_true(answers, "the buffer service starts")
            yield service
        finally:
            process.stop()
