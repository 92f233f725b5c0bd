"""What a web page in a browser on the machine of a local stack can do: send simple requests.

A page sends GET, and POST with a body of `text/plain`, to any port of 127.0.0.1 without asking the
server first. It cannot read the answers, and it knows no token.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from hashlib import sha256

import httpx
import psutil
import pytest

from services.common.objectstore import ObjectStore
from services.stack.stack import Endpoints

PAGE = {"Origin": "http://evil.example", "Host": "evil.example", "Content-Type": "text/plain"}
PATHS = (
    "/col/delete?collection=bapo",
    "/vol/grow?count=4&collection=bapo",
    "/vol/vacuum",
    "/dir/assign",
    "/submit",
    "/buckets/bapo?recursive=true",
    "/bapo?delete",
    "/v1/runs",
    "/v1/tokens",
    "/v1/gc",
    "/v1/verify",
    "/v1/generate",
    "/collective_rpc",
    "/pause",
    "/sleep",
    "/update_weight_version",
)


@pytest.fixture(scope="module")
def ports(stack: Endpoints) -> list[int]:
    """Returns every port on which a process of the stack listens."""
    return sorted(
        {
            connection.laddr.port
            for process in psutil.Process().children(recursive=True)
            for connection in process.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        }
    )


@pytest.fixture(scope="module")
def stored(stack: Endpoints) -> Iterator[None]:
    store = ObjectStore(stack.object_store)
    store.put("runs/of-the-user", b"kept")
    yield
    assert store.get("runs/of-the-user", sha256(b"kept").hexdigest()) == b"kept"


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_simple_request_to_a_port_of_the_stack_does_nothing(
    stack: Endpoints, stored: None, ports: list[int], method: str
) -> None:
    assert int(stack.buffer_url.rpartition(":")[2]) in ports or os.geteuid()
    allowed = []
    with httpx.Client(headers=PAGE, timeout=10, trust_env=False) as page:
        for port in ports:
            for path in PATHS:
                body = b'{"method": "load_policy"}' if method == "POST" else None
                try:
                    answer = page.request(method, f"http://127.0.0.1:{port}{path}", content=body)
                except httpx.HTTPError:
                    continue  # gRPC, which a page cannot speak
                if answer.is_success:
                    allowed.append(f"{method} {port}{path}")
    assert allowed == []


def test_no_service_lets_a_page_read_its_answers(stack: Endpoints) -> None:
    for url in (stack.buffer_url, stack.verifier_url, stack.s3_endpoint):
        answer = httpx.get(f"{url}/health", headers={"Origin": "http://evil.example"})
        assert "access-control-allow-origin" not in answer.headers
