"""Finds the services to ask: those that the environment names, or the stack of this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bapo_core.errors import BapoError
from services.buffer.api.client import BufferClient
from services.cli.process_tokens import process_tokens
from services.cli.settings import CommandLineSettings
from services.common.objectstore import ObjectStore
from services.datasets import DataSources
from services.model.resolve import object_store_of_environment
from services.stack.settings import default_home
from services.stack.stack import Endpoints, find_stack

GIVE_UP_AFTER_S = 5.0
"""Seconds of failing calls after which a command gives up, because a person waits for it."""


def connect(run: str = "") -> BufferClient:
    """Returns a client of the buffer service. Raises `BapoError` when there is none."""
    client = connect_to_named(run)
    if client is None:
        stack = require_stack("name a service in BAPO_BUFFER_URL and its token in BAPO_TOKEN")
        client = client_of(stack, run)
    return client


def connect_to_named(run: str) -> BufferClient | None:
    """Returns a client of the service that the environment names, None if it names none."""
    settings = CommandLineSettings.load()
    if settings.buffer_url is None or settings.token is None:
        return None
    token = settings.token.get_secret_value()
    return BufferClient(settings.buffer_url, token, run=run, give_up_s=GIVE_UP_AFTER_S)


def client_of(stack: Endpoints, run: str) -> BufferClient:
    """Returns a client of a stack of this machine."""
    return BufferClient(stack.buffer_url, stack.token, run=run, give_up_s=GIVE_UP_AFTER_S)


def require_stack(alternative: str) -> Endpoints:
    """Returns the stack of this machine. Raises `BapoError`, which names `alternative`, without."""
    home = default_home()
    stack = find_stack(home)
    if stack is None:
        raise BapoError(
            f"no stack is running in {home}; start it with `bapo stack up`, or {alternative}"
        )
    return stack


def format_addresses(endpoints: Endpoints, home: Path, *, with_token: bool) -> str:
    """Returns lines that say where a person finds the services of this machine.

    with_token: whether the dashboard's link carries the token of the stack, in its fragment, which
    browsers do not send. Only a terminal may get it: files and other programs keep what they get.
    """
    fragment = f"#token={endpoints.token}" if with_token else ""
    return (
        f"dashboard  {endpoints.buffer_url}/{fragment}\n"
        f"REST API   {endpoints.buffer_url}/docs\n"
        f'token      "token" in {home / "stack.json"}\n'
        f"logs       {home / 'logs'}"
    )


@contextmanager
def reader_environment(run: str) -> Iterator[dict[str, str]]:
    """Yields the variables with which a process reads a run from the services that `connect` asks,
    while the context lasts."""
    settings = CommandLineSettings.load()
    if settings.buffer_url and settings.s3_endpoint:
        yield {}  # It inherits them.
        return
    stack = require_stack("set BAPO_BUFFER_URL, BAPO_TOKEN and BAPO_S3_ENDPOINT")
    with process_tokens(client_of(stack, run), bound=("read",)) as tokens:
        yield stack.process_environment(tokens["read"])


def open_object_store() -> ObjectStore:
    """Returns the object store of the services that `connect` asks."""
    if CommandLineSettings.load().s3_endpoint:
        return object_store_of_environment()
    return ObjectStore(require_stack("set BAPO_S3_ENDPOINT").object_store)


def data_sources(connect: Callable[[], BufferClient] = connect) -> DataSources:
    """Returns the services that hold data sets, and the directory that keeps rows of the hub.

    connect: returns a client of the buffer service that `dataset:NAME` refers to.
    """
    return DataSources(default_home() / "datasets", open_object_store, connect)


def open_local_object_store() -> ObjectStore:
    """Returns the object store of the stack of this machine, or else that of the environment."""
    stack = find_stack(default_home())
    return object_store_of_environment() if stack is None else ObjectStore(stack.object_store)
