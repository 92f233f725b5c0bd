"""An attacker with a token of scope `read`, such as one that was sent with a link of the dashboard.

It may read what readers read. It changes nothing, and gets nothing with which it could.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from services.stack.stack import Endpoints
from tests.integration.support.driver import Driver
from tests.security.conftest import MakeToken

Call = Callable[..., httpx.Response]

QUERIES = {"POST /v1/images/missing"}
"""Requests that are no GET and change nothing: they ask with a body."""


def routes(stack: Endpoints) -> Iterator[tuple[str, str]]:
    """Yields method and path, with the names of its parameters, of each route of the service."""
    paths: dict[str, dict[str, Any]] = httpx.get(f"{stack.buffer_url}/openapi.json").json()["paths"]
    for path, methods in paths.items():
        if path.startswith("/v1/"):
            yield from ((method.upper(), path) for method in methods)


def filled(path: str, run: str) -> str:
    """Returns a path whose parameters name the victim's run and things that it has."""
    for name, value in {"name": run, "step": "1", "version": "1", "token_id": "1"}.items():
        path = path.replace(f"{{{name}}}", value)
    while "{" in path:
        before, _, rest = path.partition("{")
        path = before + "0" * 64 + rest.partition("}")[2]
    return path.removeprefix("/v1")


def everything(victim: Driver) -> tuple[object, ...]:
    """Returns what the attacker could have changed."""
    client = victim.client
    return (
        client.run_state(),
        client.runs(),
        client.replicas(),
        client.checkpoints(),
        client.steps(),
        client.prompts(limit=100).items,
    )


def test_every_request_that_changes_something_is_refused(
    victim: Driver, stack: Endpoints, make_token: MakeToken, call: Call
) -> None:
    """Whatever its body is, and for a token of one run as well."""
    rng = random.Random(51)
    name = victim.config.name
    tokens = [make_token("read"), make_token("read", run=name)]
    changing = [each for each in routes(stack) if each[0] != "GET"]
    assert len(changing) > 20
    before = everything(victim)
    for method, path in changing:
        if f"{method} {path}" in QUERIES:
            continue
        bodies: list[dict[str, Any]] = [
            {},
            {"json": {"step": 0, "by": "x", "reason": "x", "name": "x", "scope": "admin"}},
            {"content": rng.randbytes(rng.randrange(1, 4096))},
        ]
        for token in tokens:
            for body in bodies:
                answer = call(token, method, filled(path, name), **body)
                assert answer.status_code == 403, (method, path, answer.text)
    assert everything(victim) == before


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/tokens"),
        ("POST", "/tokens"),
        ("DELETE", "/tokens/1"),
        ("GET", "/runs/{name}/replicas/credentials"),
        ("POST", "/gc?dry_run=false"),
        ("POST", "/gc?dry_run=true"),
    ],
)
def test_tokens_credentials_and_the_collection_of_garbage_are_closed(
    victim: Driver, make_token: MakeToken, call: Call, method: str, path: str
) -> None:
    name = victim.config.name
    for token in (make_token("read"), make_token("read", run=name)):
        answer = call(token, method, path.format(name=name), json={})
        assert answer.status_code == 403, answer.text


def test_no_answer_to_a_reader_has_a_token_or_a_credential(
    victim: Driver, stack: Endpoints, make_token: MakeToken, call: Call
) -> None:
    token = make_token("read")
    secrets = [
        stack.token,
        stack.object_store.access_key.get_secret_value(),
        stack.object_store.secret_key.get_secret_value(),
    ]
    answered = 0
    for method, path in routes(stack):
        if method != "GET":
            continue
        answer = call(token, method, filled(path, victim.config.name))
        assert answer.status_code < 500, (path, answer.text)
        answered += answer.is_success
        for secret in secrets:
            assert secret.encode() not in answer.content, path
    assert answered > 15
