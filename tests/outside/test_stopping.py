"""A buffer service that stops answers the requests that wait, and does not wait for them."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

from services.stack.stack import Endpoints
from tests.integration.support.driver import Driver, small_config
from tests.outside.servers import BufferService, buffer_service

NAME = "stopping"


def test_requests_that_wait_are_answered_when_the_service_stops(
    stack: Endpoints, tmp_path: Path
) -> None:
    tag = Driver(stack, small_config(NAME)).client.target_weights().tag
    with ExitStack() as connections:
        with buffer_service(stack, tmp_path) as service:
            waiting = [
                connections.enter_context(ask(service, question))
                for question in (f"target?known={tag}&wait=30", "weights/7?wait=30")
            ]
            # The service accepts connections in their order, so that it has the former two.
            status, _ = service.ready()
            assert status == 200
        statuses = [connection.makefile("rb").readline() for connection in waiting]
    assert statuses == [b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 404 Not Found\r\n"]
    assert "exceeded" not in service.log.read_text()


def ask(service: BufferService, question: str) -> socket.socket:
    """Sends a request about the run, and returns its connection."""
    address = urlsplit(service.url)
    connection = socket.create_connection((address.hostname, address.port))
    request = (
        f"GET /v1/runs/{NAME}/{question} HTTP/1.1",
        f"Host: {address.netloc}",
        f"Authorization: Bearer {service.endpoints.token}",
        "",
        "",
    )
    connection.sendall("\r\n".join(request).encode())
    return connection
