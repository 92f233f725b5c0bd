"""What a web page can do, in a browser on the machine of a local stack and within bapo's own pages.

Text that gets into a page of bapo runs no code there. A page of somebody else's can send GET, and
POST with a body of `text/plain`, to any port of 127.0.0.1 without asking the server first; it
cannot read the answers, and it knows no token.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import httpx
import psutil
import pytest
from playwright.sync_api import Browser

from services.common.objectstore import ObjectStore
from services.report.html import page
from services.stack.stack import Endpoints
from tests.security.foreign_server import foreign_server

PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9"
    "awAAAABJRU5ErkJggg=="
)


@pytest.fixture
def elsewhere() -> Iterator[tuple[str, list[str]]]:
    """Yields the address of a server, and the paths that it was asked for."""
    with foreign_server() as server:
        yield server.url, server.paths


def test_a_report_runs_and_loads_nothing_even_where_a_text_was_not_escaped(
    browser: Browser, elsewhere: tuple[str, list[str]], tmp_path: Path
) -> None:
    address, asked = elsewhere
    body = (
        '<script>document.title = "changed"</script>'
        f'<script src="{address}/script"></script>'
        f'<img src="{address}/image" onerror="document.title = \'changed\'">'
        f'<iframe src="{address}/frame"></iframe>'
        f'<style>@import "{address}/style"; h1 {{ background: url({address}/background) }}</style>'
        f'<form action="{address}/form"><input name="a"></form>'
        f'<base href="{address}/">'
        f'<h1 style="color: rgb(1, 2, 3)">title</h1><img id="own" src="{PIXEL}">'
    )
    file = tmp_path / "report.html"
    file.write_text(page("a run", body))
    tab = browser.new_page()
    tab.goto(file.as_uri())
    assert tab.title() == "a run"
    assert tab.evaluate("getComputedStyle(document.querySelector('h1')).color") == "rgb(1, 2, 3)"
    assert tab.evaluate("document.getElementById('own').naturalWidth") == 1
    assert tab.evaluate("document.baseURI") == file.as_uri()
    # A script of the browser's own, which the policy does not concern.
    tab.evaluate("document.forms[0].submit()")
    tab.wait_for_load_state("networkidle")
    tab.close()
    assert asked == []


# ---- requests of a page to the ports of a stack --------------------------------------------------

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
    with httpx.Client(headers=PAGE, timeout=10, trust_env=False) as attacker:
        for port in ports:
            for path in PATHS:
                body = b'{"method": "load_policy"}' if method == "POST" else None
                try:
                    answer = attacker.request(
                        method, f"http://127.0.0.1:{port}{path}", content=body
                    )
                except httpx.HTTPError:
                    continue  # gRPC, which a page cannot speak
                if answer.is_success:
                    allowed.append(f"{method} {port}{path}")
    assert allowed == []


def test_no_service_lets_a_page_read_its_answers(stack: Endpoints) -> None:
    for url in (stack.buffer_url, stack.verifier_url, stack.s3_endpoint):
        answer = httpx.get(f"{url}/health", headers={"Origin": "http://evil.example"})
        assert "access-control-allow-origin" not in answer.headers
