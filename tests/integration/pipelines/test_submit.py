"""`bapo pipeline submit` sends a run to an API, which here records what it is sent."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.cli import COMPILED
from services.cli.main import main

ROOT = Path(__file__).parents[3]


class Pipelines(BaseHTTPRequestHandler):
    """Serves the part of the Kubeflow Pipelines API that starting a run needs."""

    sent: dict[str, Any]

    pages: bool

    states: list[dict[str, Any]]
    """Answers to the requests for the run, of which the last one stays."""

    def do_GET(self) -> None:
        if self.path.startswith("/apis/v2beta1/runs/r-1"):
            state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
            if state:
                self._answer({"run_id": "r-1", **state})
            else:
                self._send(503, "text/plain", b"no upstream")
            return
        if self.path == "/" and self.pages:
            self._send(200, "text/html", b"<html><title>Kubeflow Pipelines</title></html>")
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
def states() -> list[dict[str, Any]]:
    """What Kubeflow says of the run, one time after another; tests fill it."""
    return []


@pytest.fixture
def api(pages: bool, states: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    sent: dict[str, Any] = {}
    handler = type("Handler", (Pipelines,), {"sent": sent, "pages": pages, "states": states})
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


def test_a_file_that_is_no_pipeline_is_not_sent(
    api: tuple[str, dict[str, Any]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    host, sent = api
    for text in ("some text", "a: [", "steps: 3\n", ""):
        (tmp_path / "text.yaml").write_text(text)
        package = ["--package", str(tmp_path / "text.yaml")]
        with pytest.raises(SystemExit):
            main(["pipeline", "submit", "steps=3", *package, "--host", host])
        message = capsys.readouterr().err
        assert "text.yaml is no compiled pipeline; make one with `bapo pipeline compile" in message
    assert not sent


def test_an_api_that_kfp_does_not_find_is_one_line_with_the_remedy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """kfp logs a traceback for each of five attempts, and raises `TimeoutError`."""
    import kfp

    def find_nothing(**_: Any) -> None:
        logging.getLogger().error("Failed to get healthz info attempt 1 of 5.")
        raise TimeoutError("Failed getting healthz endpoint after 5 attempts.")

    monkeypatch.setattr(kfp, "Client", find_nothing)
    with pytest.raises(SystemExit):
        main(["pipeline", "submit", str(ROOT / "examples/countdown-vllm.yaml")])
    message = capsys.readouterr().err
    assert message == (
        "error: Kubeflow Pipelines did not take the run: Failed getting healthz endpoint after 5 "
        "attempts.; give --host, for example after `kubectl port-forward -n kubeflow "
        "svc/ml-pipeline-ui 8080:80`\n"
    )
    assert not caplog.records


def progress(state: str, **tasks: str) -> dict[str, Any]:
    details = [
        {"display_name": name.replace("_", "-"), "state": status} for name, status in tasks.items()
    ]
    return {"state": state, "run_details": {"task_details": details}}


@pytest.mark.parametrize("end", ["SUCCEEDED", "FAILED", "CANCELED"])
def test_a_run_can_be_waited_for(
    api: tuple[str, dict[str, Any]],
    states: list[dict[str, Any]],
    end: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pipelines.submission.time.sleep", lambda _: None)
    host, _ = api
    states += [
        {},  # the API is away for a moment
        progress("RUNNING", root="RUNNING", prepare_run="SUCCEEDED", train="RUNNING"),
        progress("RUNNING", prepare_run="SUCCEEDED", train="RUNNING"),
        progress(end, train=end if end == "FAILED" else "SUCCEEDED", sync="SKIPPED"),
    ]
    if end == "SUCCEEDED":
        submit(host, "--wait")
    else:
        with pytest.raises(SystemExit) as ended:
            submit(host, "--wait")
        assert ended.value.code == 1
    printed = capsys.readouterr()
    assert printed.out == "r-1\n"
    _, *lines = printed.err.splitlines()
    assert lines[0].startswith("Kubeflow Pipelines does not answer")
    last = "failed" if end == "FAILED" else "succeeded"
    assert lines[1:6] == [
        "prepare-run: succeeded",
        "train 1 of 4: running",
        "the run is running",
        f"train 1 of 4: {last}",
        "sync 1 of 4: skipped",
    ]
    where = " in train 1 of 4" if end == "FAILED" else ""
    error = f"error: run r-1 of Kubeflow has ended as {end.lower()}{where}; the last line of the"
    assert [line[: len(error)] for line in lines[6:]] == ([] if end == "SUCCEEDED" else [error])
