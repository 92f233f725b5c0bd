"""A login page in place of Kubeflow's API is no success, and a terminal lacks characters."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from bapo_core.errors import BapoError
from pipelines.submission import run_page, submit_pipeline, wait_for_run
from tests.outside.servers import check_message

PACKAGE = Path(__file__).parents[2] / "pipelines/bapo_pipeline.yaml"


class _LoginPage(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        page = b"<html><title>Log in to Your Account</title></html>"
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.send_header("content-length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        """Writes nothing."""


@pytest.fixture
def login_page() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _LoginPage)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_pipeline_is_not_submitted_to_a_login_page(login_page: str) -> None:
    parameters = {"stored_config": "mine", "bapo_run": "mine"}
    with pytest.raises(
        BapoError, match=r"as a login page does, and has started none; give --host"
    ) as caught:
        submit_pipeline(PACKAGE, parameters, host=login_page, namespace="team", experiment="bapo")
    check_message(str(caught.value))


def test_a_login_page_is_not_waited_for(login_page: str) -> None:
    """It answers once the session has ended, with status 200 for every path."""
    said: list[str] = []
    with pytest.raises(
        BapoError, match=r"without run r-1, as a login page does.*give --host"
    ) as caught:
        wait_for_run("r-1", PACKAGE, host=login_page, namespace="team", log=said.append)
    check_message(str(caught.value))
    assert said == []


def test_a_login_page_is_not_taken_for_the_page_of_a_run(login_page: str) -> None:
    page = run_page(login_page, "r-1")
    assert login_page not in page
    assert "kubectl port-forward" in page


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252"])
def test_a_command_prints_on_a_terminal_that_lacks_characters(encoding: str) -> None:
    code = (
        "import click; from services.cli import main; from services.cli.echo import echo; "
        "main.bapo = click.command(lambda: echo('|\\u0394 log-prob| \\u221a')); main.main([])"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONIOENCODING": encoding},
        capture_output=True,
        timeout=60,
    )
    assert printed.returncode == 0, printed.stderr
    assert b"|? log-prob| ?" in printed.stdout
