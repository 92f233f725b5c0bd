"""A login page in place of Kubeflow's API is no success, and a terminal lacks characters."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest

from bapo_core.errors import BapoError
from pipelines import submission
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


def test_a_login_page_is_not_waited_for(login_page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers once the session has ended, with status 200 for every path."""
    monkeypatch.setattr(submission, "LOGIN_PAGES_S", 0.2)
    monkeypatch.setattr(submission, "POLL_INTERVAL_S", 0.05)
    said: list[str] = []
    with pytest.raises(
        BapoError, match=r"without run r-1, as a login page does.*give --host"
    ) as caught:
        wait_for_run("r-1", PACKAGE, host=login_page, namespace="team", log=said.append)
    check_message(str(caught.value))
    assert [line.partition(" has answered")[0] for line in said] == [login_page]


class _Clock:
    """Time that passes only while one sleeps."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class _Api:
    """Answers each call for a run with the next of these; "away" is an error of the network."""

    def __init__(self, answers: Iterable[str]) -> None:
        self._answers = iter(answers)

    def get_run(self, run: str) -> SimpleNamespace:
        answer = next(self._answers)
        if answer == "away":
            raise TimeoutError("timed out")
        run_id = None if answer == "page" else run
        return SimpleNamespace(run_id=run_id, run_details=None, state=answer)


def wait(answers: Iterable[str], monkeypatch: pytest.MonkeyPatch) -> float:
    """Waits for a run with these answers. Returns the seconds that it takes."""
    clock = _Clock()
    monkeypatch.setattr(submission, "time", clock)
    monkeypatch.setattr(submission, "_client", lambda *_: _Api(answers))
    wait_for_run("r-1", PACKAGE, host="http://kfp", namespace=None, log=lambda _: None)
    return clock.now


@pytest.mark.parametrize("seed", range(5))
def test_pages_of_less_than_a_minute_are_waited_out(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = Random(seed)
    answers: list[str] = []
    for _ in range(20):
        answers += ["page"] * random.randint(0, 12) + [random.choice(["RUNNING", "away"])]
        answers += random.choice([[], ["RUNNING"]])
    assert wait([*answers, "SUCCEEDED"], monkeypatch) == 5.0 * len(answers)


def test_pages_of_a_minute_after_an_outage_end_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([*["RUNNING", *["away"] * 100], *["page"] * 13, "never asked"])
    with pytest.raises(BapoError, match="as a login page does"):
        wait(answers, monkeypatch)
    assert list(answers) == ["never asked"]


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
