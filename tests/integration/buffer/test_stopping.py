"""A buffer service that stops answers the requests that wait, and does not wait for them."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from services.stack.stack import Endpoints
from services.stack.supervisor import Supervisor
from tests.integration.support.driver import Driver, small_config

NAME = "stopping"


def test_requests_that_wait_are_answered_when_the_service_stops(
    stack: Endpoints, tmp_path: Path, reserved_port: int
) -> None:
    tag = Driver(stack, small_config(NAME)).client.target_weights().tag
    url = f"http://127.0.0.1:{reserved_port}"
    environment = {**os.environ, **stack.environment(), "BAPO_PORT": str(reserved_port)}
    with ExitStack() as connections:
        with Supervisor(tmp_path) as supervisor:
            supervisor.start_python("buffer", "services.buffer.main", environment)
            supervisor.wait_until(lambda: is_healthy(url), "the service", seconds=60)
            waiting = [
                connections.enter_context(ask(stack, url, question))
                for question in (f"target?known={tag}&wait=30", "weights/7?wait=30")
            ]
            # The service accepts connections in their order, so that it has the former two.
            assert is_healthy(url)
        statuses = [connection.makefile("rb").readline() for connection in waiting]
    assert statuses == [b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 404 Not Found\r\n"]
    assert "exceeded" not in (tmp_path / "buffer.log").read_text()


def ask(stack: Endpoints, url: str, question: str) -> socket.socket:
    """Sends a request about the run, and returns its connection."""
    address = urlsplit(url)
    connection = socket.create_connection((address.hostname, address.port))
    request = (
        f"GET /v1/runs/{NAME}/{question} HTTP/1.1",
        f"Host: {address.netloc}",
        f"Authorization: Bearer {stack.token}",
        "",
        "",
    )
    connection.sendall("\r\n".join(request).encode())
    return connection


def is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).is_success
    except httpx.TransportError:
        return False
