"""An attacker who reaches the services over the network and has no token."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, cast
from urllib.parse import urlsplit

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from fastapi.testclient import TestClient

from bapo_core.errors import ConfigError
from services.buffer.settings import BufferSettings
from services.common.middleware import KnownHosts
from services.common.objectstore import ObjectStore
from services.common.serve import Connection, server_config
from services.common.settings import ServerSettings, Settings
from services.rollout import server, worker_node
from services.rollout.offers import PendingOffer
from services.rollout.settings import WorkerNodeSettings
from services.rollout.weights import WeightCache
from services.stack.stack import Endpoints
from services.verifier.settings import VerifierServerSettings

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
        listener.listen()
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
    # Not the address of other tests, which would get 429 after 30 unknown tokens from it.
    source = ("127.0.0.6", 0)
    with socket.create_connection((address.hostname, address.port), WITHIN_S, source) as connection:
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
        ("PUT", f"/v1/reward-files/{'0' * 64}", 5 << 20),
        ("POST", "/v1/runs/x/steps/1/groups", 513 << 20),
    ],
)
def test_the_size_of_a_body_is_limited_by_its_route_and_not_by_a_name(
    stack: Endpoints, method: str, path: str, size: int
) -> None:
    """The attacker may choose names, such as that of a configuration."""
    answer = announce(stack.buffer_url, method, path, size, stack.token)
    assert answer.startswith("HTTP/1.1 413"), answer


# ---- connections --------------------------------------------------------------------------------


def read_until_closed(connection: socket.socket) -> bytes:
    """Returns what the server sends until it closes the connection."""
    received = b""
    with suppress(ConnectionResetError):
        while piece := connection.recv(4096):
            received += piece
    return received


@contextmanager
def impatient() -> Iterator[tuple[str, int]]:
    """Serves an app as `serve` does, with half a second for the head of a request."""
    app = FastAPI()
    app.add_api_route("/", lambda: "ok")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        config = server_config(app, ServerSettings(port=port))

        class Impatient(Connection):
            head_within_s = 0.5

        assert config.http is Connection
        config.http = Impatient
        running = uvicorn.Server(config)
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield "127.0.0.1", port
        finally:
            running.should_exit = True
            thread.join()


@pytest.mark.parametrize(
    "sent", [b"", b"G", b"GET / HTTP/1.1\r\nHost: x\r\nX-Slow: ", b"GET / HTTP/1.1\r\nHost: x\r\n"]
)
def test_a_connection_that_does_not_send_its_request_is_closed(sent: bytes) -> None:
    """It would hold a descriptor for ever."""
    with impatient() as address, socket.create_connection(address, WITHIN_S) as connection:
        if sent:
            # A request that is complete is answered, and then the next has as long again.
            connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        connection.sendall(sent)
        assert read_until_closed(connection) == b""


def test_headers_without_end_are_not_kept() -> None:
    with impatient() as address, socket.create_connection(address, WITHIN_S) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n")
        sent = 0
        # It is closed, whichever side notices that first.
        with suppress(OSError):
            for _ in range(2000):
                connection.sendall(b"X-Filler: " + b"a" * 8000 + b"\r\n")
                sent += 8000
        assert sent < 16_000_000


# ---- names --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example"]
)
@pytest.mark.parametrize("path", ["/metrics", "/readyz", "/", "/docs", "/v1/runs", "/openapi.json"])
def test_a_page_whose_name_was_resolved_to_the_service_reads_nothing(
    stack: Endpoints, host: str, path: str
) -> None:
    answer = httpx.get(f"{stack.buffer_url}{path}", headers={"Host": host})
    assert answer.status_code == 421
    assert "BAPO_HOST_NAMES" in answer.json()["detail"]


@pytest.mark.parametrize(
    "host", ["127.0.0.1:1", "localhost", "[::1]:8700", "bapo-buffer", "10.1.2.3"]
)
def test_addresses_and_names_of_this_network_are_answered(stack: Endpoints, host: str) -> None:
    """Kubernetes' probes and Prometheus use addresses of pods."""
    assert httpx.get(f"{stack.buffer_url}/health", headers={"Host": host}).is_success


def test_names_of_the_server_are_answered() -> None:
    app = FastAPI()
    app.add_api_route("/", lambda: "ok")
    app.add_middleware(KnownHosts, names=["bapo.example", ".svc"])
    client = TestClient(app)
    statuses = {
        host: client.get("/", headers={"Host": host}).status_code
        for host in ("BAPO.example:443", "bapo.example.", "x.team.svc", "svc.evil", "abapo.example")
    }
    assert list(statuses.values()) == [200, 200, 200, 421, 421], statuses


@pytest.mark.parametrize("path", ["/v1/runs", "/health", "/openapi.json", "/", "/docs", "/nothing"])
def test_browsers_neither_keep_answers_nor_guess_their_type(stack: Endpoints, path: str) -> None:
    answer = httpx.get(
        f"{stack.buffer_url}{path}", headers={"Authorization": f"Bearer {stack.token}"}
    )
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] in ("no-store", "no-cache")
    assert "redirect" not in answer.text.lower() or path == "/openapi.json"


# ---- pages of the API ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["buffer", "verifier", "replica", "worker node"])
def test_no_page_runs_code_of_another_host(services: Addresses, name: str) -> None:
    for path in ("/docs", "/redoc", "/docs/oauth2-redirect"):
        answer = httpx.get(f"{services[name]}{path}")
        if answer.status_code == 404:
            continue
        assert (name, path) == ("buffer", "/docs")
        assert "https://" not in answer.text
        assert "<script>" not in answer.text
        policy = answer.headers["content-security-policy"]
        assert "default-src 'self'" in policy
        assert "frame-ancestors 'none'" in policy


# ---- guesses ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["buffer", "verifier"])
def test_guesses_are_slowed_down_whatever_address_they_claim(
    services: Addresses, name: str
) -> None:
    # An address of its own, because other tests send unknown tokens, too.
    transport = httpx.HTTPTransport(local_address="127.0.0.3")
    path = "/v1/runs" if name == "buffer" else "/v1/verify"
    with httpx.Client(base_url=services[name], transport=transport) as client:
        statuses = [
            client.request(
                "GET" if name == "buffer" else "POST",
                path,
                headers={
                    "Authorization": f"Bearer guess-{number}",
                    "X-Forwarded-For": f"10.0.0.{number}",
                },
            ).status_code
            for number in range(40)
        ]
    assert statuses[0] == 401
    assert statuses[-1] == 429


@pytest.mark.parametrize("settings", [BufferSettings, VerifierServerSettings, WorkerNodeSettings])
def test_a_server_refuses_a_token_that_can_be_guessed(
    settings: type[Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "BAPO_TOKEN": "changeme",
        "BAPO_PORT": "1",
        "BAPO_SCRATCH": "/tmp",
        "BAPO_DATABASE_URL": "postgresql://localhost/x",
        "BAPO_S3_ENDPOINT": "http://localhost",
        "BAPO_S3_BUCKET": "b",
        "BAPO_S3_ACCESS_KEY": "a",
        "BAPO_S3_SECRET_KEY": "s",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"BAPO_TOKEN: .* at least 20 .*") as caught:
        settings.load()
    assert "changeme" not in str(caught.value)
