"""`bapo pipeline submit` sends a run to an API, which here records what it is sent."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.cli import COMPILED
from services.cli.main import main

ROOT = Path(__file__).parents[2]


class Pipelines(BaseHTTPRequestHandler):
    """Serves the part of the Kubeflow Pipelines API that starting a run needs."""

    sent: dict[str, Any]

    pages: bool

    def do_GET(self) -> None:
        if self.path == "/" and self.pages:
            self._send(200, "text/html", b"<html></html>")
            return
        responses = {"/apis/v2beta1/healthz": {"multi_user": True}, "/apis/v2beta1/experiments": {}}
        self._answer(responses.get(self.path.partition("?")[0]))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        path = self.path.partition("?")[0]
        self.sent[path] = body
        self._answer({"run_id": "r-1", "experiment_id": "e-1", **body})

    def _answer(self, content: dict[str, Any] | None) -> None:
        data = json.dumps(content or {}).encode()
        self._send(404 if content is None else 200, "application/json", data)

    def _send(self, status: int, kind: str, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing."""


@pytest.fixture
def pages() -> bool:
    """Whether the address serves Kubeflow's pages, too; tests may say otherwise."""
    return False


@pytest.fixture
def api(pages: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    sent: dict[str, Any] = {}
    handler = type("Handler", (Pipelines,), {"sent": sent, "pages": pages})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", sent
    server.shutdown()
    server.server_close()


def submit(host: str, *more: str) -> None:
    config = str(ROOT / "examples/countdown-vllm.yaml")
    package = ["--package", str(ROOT / COMPILED), "--host", host]
    main(["pipeline", "submit", config, *more, *package, "--namespace", "team"])


@pytest.mark.parametrize("pages", [True, False])
def test_a_run_is_sent_with_its_parameters(
    api: tuple[str, dict[str, Any]], pages: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    host, sent = api
    submit(host, "name=mine", "workers=2", "--experiment", "mine", "steps=40", "seed=3")
    printed = capsys.readouterr()
    assert printed.out == "r-1\n"
    page = host if pages else "http://127.0.0.1:8080"
    assert printed.err.endswith(f"{page}/#/runs/details/r-1\n")
    assert sent["/apis/v2beta1/experiments"]["namespace"] == "team"
    run = sent["/apis/v2beta1/runs"]
    assert run["experiment_id"] == "e-1"
    parameters = run["runtime_config"]["parameters"]
    assert parameters["bapo_run"] == "mine"
    assert parameters["workers"] == 2
    assert parameters["steps"] == 40
    assert parameters["overrides"] == ["seed=3"]
    example = ROOT / "examples/countdown-vllm.yaml"
    assert parameters["config"] == yaml.safe_load(example.read_text())
    assert run["pipeline_spec"]["pipeline_spec"]["pipelineInfo"]["name"] == "bapo"


def test_an_unreachable_api_is_an_error_with_a_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        submit("http://127.0.0.1:1")
    message = capsys.readouterr().err
    assert message.startswith("error: Kubeflow Pipelines did not take the run")
    assert "kubectl port-forward" in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rollout.engine=transformers"], "the chart's rollouts are vLLM"),
        (["workers=0"], "give at least one worker"),
        (
            ["--package", "absent.yaml"],
            "absent.yaml does not exist; make it with `bapo",
        ),
    ],
)
def test_what_would_fail_in_a_pod_is_not_sent(
    api: tuple[str, dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    host, sent = api
    config = str(ROOT / "examples/countdown-vllm.yaml")
    with pytest.raises(SystemExit):
        main(["pipeline", "submit", config, *arguments, "--host", host])
    assert message in capsys.readouterr().err
    assert not sent
