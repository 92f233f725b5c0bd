"""Fixtures of the attackers: a run that somebody else trains, and tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count

import httpx
import pytest

from services.buffer.api.client import BufferClient
from services.common.scopes import Scope
from services.stack.stack import Endpoints
from tests.integration.support.driver import Driver, small_config

_NUMBERS = count(1)

MakeToken = Callable[..., str]


@pytest.fixture(scope="session")
def admin(stack: Endpoints) -> BufferClient:
    """A client of the administrator, who is not the attacker."""
    return BufferClient(stack.buffer_url, stack.token)


@pytest.fixture(scope="session")
def make_token(admin: BufferClient) -> MakeToken:
    """Returns a function that makes a token: of a scope, and of one run if that is named."""

    def make(scope: Scope, run: str | None = None, days: float | None = None) -> str:
        return admin.create_token("attacker", scope, run=run, days=days).token

    return make


@pytest.fixture(scope="session")
def victim(stack: Endpoints) -> Driver:
    """A run in progress, with two committed steps."""
    driver = Driver(stack, small_config(f"victim-{next(_NUMBERS)}"))
    for step in (1, 2):
        driver.run_step(step)
    return driver


@pytest.fixture
def call(stack: Endpoints) -> Iterator[Callable[..., httpx.Response]]:
    """Yields a function that calls the buffer service with a token.

    Each test calls from an address of its own: after 30 unknown tokens, an address gets 429.
    """
    high, low = divmod(next(_NUMBERS), 250)
    transport = httpx.HTTPTransport(local_address=f"127.1.{high}.{low + 1}")
    with httpx.Client(transport=transport, base_url=f"{stack.buffer_url}/v1", timeout=60) as client:

        def send(token: str, method: str, path: str, **arguments: object) -> httpx.Response:
            headers = {"Authorization": f"Bearer {token}", "X-Bapo-Attempt": "1"}
            return client.request(
                method,
                path,
                headers=headers,
                **arguments,  # type: ignore[arg-type]
            )

        yield send
