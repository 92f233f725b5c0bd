"""An attacker who reaches the services over the network and has no token."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast
from urllib.parse import urlsplit

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from services.common.objectstore import ObjectStore
from services.rollout import server, worker_node
from services.rollout.offers import PendingOffer
from services.rollout.weights import WeightCache
from services.stack.stack import Endpoints

WITHIN_S = 60.0
"""Seconds for an answer, on a busy machine. A server that waits for the body never answers."""
MOST_UNKNOWN = 5
OPEN = {"/health", "/readyz", "/metrics"}
"""Routes that need no token."""

Addresses = dict[str, str]


@contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    """Serves an app on a free port, without what it would do in the background."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        running = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off"))
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            running.should_exit = True
            thread.join()


@pytest.fixture(scope="module")
def services(stack: Endpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Addresses]:
    """Yields the addresses of all services, by name."""
    scratch = tmp_path_factory.mktemp("node")
    cache = WeightCache(ObjectStore(stack.object_store), scratch)
    node = worker_node.Node(cache, scratch, "python", {})
    # No request gets as far as the replica.
    nothing = cast(Any, None)
    replica = server.create_app(nothing, nothing, "a-token-of-a-replica", PendingOffer())
    with ExitStack() as contexts:
        yield {
            "buffer": stack.buffer_url,
            "verifier": stack.verifier_url,
            "replica": contexts.enter_context(serving(replica)),
            "worker node": contexts.enter_context(
                serving(worker_node.create_app(node, "a-token-of-a-node"))
            ),
        }


def announce(url: str, method: str, path: str, size: int, token: str = "") -> str:
    """Sends the head of a request and one byte of its body; returns the status line."""
    address = urlsplit(url)
    assert address.hostname is not None
    head = [
        f"{method} {path} HTTP/1.1",
        f"Host: {address.netloc}",
        "Content-Type: application/json",
        f"Content-Length: {size}",
        "X-Bapo-Attempt: 1",
        *([f"Authorization: Bearer {token}"] if token else []),
    ]
    with socket.create_connection((address.hostname, address.port), WITHIN_S) as connection:
        connection.sendall("\r\n".join([*head, "", "["]).encode())
        return connection.recv(4096).decode().partition("\r\n")[0]


def operations(url: str) -> Iterator[tuple[str, str]]:
    """Yields method and path of each operation that its document names, with made-up parameters."""
    for path, methods in httpx.get(f"{url}/openapi.json").json()["paths"].items():
        for method in methods:
            yield method.upper(), re.sub(r"\{[^}]*\}", "1", path)


@pytest.mark.parametrize("name", ["buffer", "verifier", "replica", "worker node"])
@pytest.mark.parametrize("token", ["", "wrong"])
def test_nobody_without_a_token_gets_a_byte_of_a_body_read(
    services: Addresses, name: str, token: str
) -> None:
    """512 MiB of JSON, which take 14 GiB when they are parsed."""
    closed = [each for each in operations(services[name]) if each[1] not in OPEN]
    assert closed
    # After 30 unknown tokens, the buffer service would refuse those of other tests with 429.
    for method, path in closed[: MOST_UNKNOWN if token else None]:
        answer = announce(services[name], method, path, 512 << 20, token)
        assert answer.startswith("HTTP/1.1 401 "), (method, path, answer)


@pytest.mark.parametrize(
    ("method", "path", "size"),
    [
        ("PUT", "/v1/configs/groups", 64 << 20),
        ("PUT", "/v1/configs/proximal", 64 << 20),
        ("POST", "/v1/runs/x/stop", 2 << 20),
        ("POST", "/v1/runs/groups/turn", 2 << 20),
        ("POST", "/v1/datasets/groups", 17 << 20),
        ("POST", "/v1/tokens", 2 << 20),
        ("PUT", f"/v1/images/{'0' * 64}", 17 << 20),
        ("POST", "/v1/runs/x/steps/1/groups", 513 << 20),
    ],
)
def test_the_size_of_a_body_is_limited_by_its_route_and_not_by_a_name(
    stack: Endpoints, method: str, path: str, size: int
) -> None:
    """The attacker may choose names, such as that of a configuration."""
    answer = announce(stack.buffer_url, method, path, size, stack.token)
    assert answer.startswith("HTTP/1.1 413"), answer
