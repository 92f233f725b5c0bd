"""A web page, or text that gets into a page of bapo, runs no code where bapo's pages are shown."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

from services.report.html import page

CHROMIUMS = ("chromium", "google-chrome", "google-chrome-stable", "chromium-browser")
PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9"
    "awAAAABJRU5ErkJggg=="
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = next(filter(None, map(shutil.which, CHROMIUMS)), None)
    if program is None:
        pytest.skip("needs Chromium: run `make install-chromium`")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def elsewhere() -> Iterator[tuple[str, list[str]]]:
    """Yields the address of a server, and the paths that it was asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    thread.join()
    server.server_close()


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
