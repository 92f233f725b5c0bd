"""The verifier over HTTP: verdicts, limits, back-pressure and draining."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx
import pytest
from conftest import TOKEN, serving, wait_until
from fastapi import FastAPI

from bapo_core.errors import ConfigError
from services.common.errors import ServiceError
from services.verifier.api import client as client_module
from services.verifier.api.client import VerifierClient
from services.verifier.api.wire import (
    LARGEST_BODY,
    LARGEST_PAYLOAD,
    LONGEST_RESPONSE,
    MOST_RESPONSES,
    VerifyItem,
)
from services.verifier.settings import VerifierServerSettings, VerifierSettings

PAYLOAD = {"nums": [1, 2, 3], "target": 6}
ITEM = {"payload": PAYLOAD, "responses": ["<answer>1+2+3</answer>"]}


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[FastAPI, httpx.Client]]:
    with serving(VerifierSettings(workers=1, queue=9_000)) as served:
        yield served


@pytest.fixture
def client(served: tuple[FastAPI, httpx.Client]) -> httpx.Client:
    return served[1]


def ask(client: httpx.Client, **request: Any) -> httpx.Response:
    return client.post("/v1/verify", json={"task": "countdown", "items": [ITEM], **request})


def refused(answer: httpx.Response, status: int, *words: str) -> None:
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    for word in words:
        assert word in answer.json()["detail"]
    assert len(answer.content) < 2_000


def test_a_verdict_for_every_response(client: httpx.Client) -> None:
    answer = ask(client, items=[ITEM, {"payload": PAYLOAD, "responses": []}, ITEM])
    assert answer.status_code == 200
    ok = {"reward": 1.0, "status": "ok", "extracted": "1+2+3", "detail": None}
    ok |= {"parts": {"format": 1.0}}
    assert answer.json() == {"verdicts": [[ok], [], [ok]]}


def test_a_request_without_a_valid_token_is_refused_unread(client: httpx.Client) -> None:
    url = str(client.base_url.join("/v1/verify"))
    refused(httpx.post(url, content=b"{"), 401, "Authorization: Bearer")
    refused(httpx.post(url, content=b"{", headers={"Authorization": "Bearer no"}), 401, "not known")


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"task": "nonsense"}, ["task", "countdown, distinct, function, geometry, math"]),
        ({"task": 7}, ["task", "valid string"]),
        ({"tusk": 7}, ["tusk", "not permitted"]),
        ({"options": {"template": "x"}}, ["options", "choose short, think, prefilled"]),
        ({"options": {"nonsense": 1}}, ["options", "nonsense"]),
        ({"options": {"template": "x" * (LARGEST_PAYLOAD + 1)}}, ["options", "at most"]),
        ({"items": [{"payload": PAYLOAD}]}, ["items.0.responses", "required"]),
        ({"items": [ITEM, {**ITEM, "responses": [1]}]}, ["items.1.responses.0", "valid string"]),
        ({"items": [{**ITEM, "payload": []}]}, ["items.0.payload"]),
        (
            {"items": [ITEM, {**ITEM, "payload": {"x": "y" * LARGEST_PAYLOAD}}]},
            ["items.1.payload", f"at most {LARGEST_PAYLOAD}"],
        ),
        ({"items": [{**ITEM, "responses": [1] * 1_000}]}, ["items.0.responses.0", "995 more"]),
    ],
)
def test_a_bad_request_is_answered_with_the_field_and_the_remedy(
    client: httpx.Client, request_: dict[str, Any], words: list[str]
) -> None:
    refused(ask(client, **request_), 422, *words)


def test_sizes_are_limited(client: httpx.Client) -> None:
    half = {**ITEM, "responses": ["x"] * (MOST_RESPONSES // 2 + 1)}
    refused(ask(client, items=[half, half]), 413, "items", f"at most {MOST_RESPONSES}")
    too_many = {**ITEM, "responses": ["x"] * (MOST_RESPONSES + 1)}
    refused(ask(client, items=[too_many]), 422, "items.0.responses", str(MOST_RESPONSES))


def test_a_body_that_is_too_large_is_not_held_in_memory(client: httpx.Client) -> None:
    url = client.base_url
    with socket.create_connection((url.host, url.port or 80), timeout=300) as connection:
        connection.sendall(
            f"POST /v1/verify HTTP/1.1\r\nHost: {url.host}\r\nAuthorization: Bearer {TOKEN}\r\n"
            f"Content-Length: {LARGEST_BODY + 1}\r\n\r\n".encode()
        )
        # Before a byte of the body has been sent.
        assert connection.recv(12) == b"HTTP/1.1 413"

    def endless() -> Iterator[bytes]:
        for _ in range(LARGEST_BODY // (1 << 20) + 8):
            yield b" " * (1 << 20)

    answer = None
    # The server may close the connection while the body is being sent: a refusal, too.
    with suppress(httpx.TransportError):
        answer = client.post("/v1/verify", content=endless())
    assert answer is None or answer.status_code == 413
    assert ask(client).status_code == 200


def test_a_payload_that_lacks_what_the_task_needs_breaks_only_itself(client: httpx.Client) -> None:
    answer = ask(client, items=[{**ITEM, "payload": {}}, ITEM])
    broken, fine = (item[0] for item in answer.json()["verdicts"])
    assert broken["status"] == "crashed"
    assert re.fullmatch(r"KeyError: 'nums' \(countdown\.py:\d+\)", broken["detail"])
    assert fine["status"] == "ok"


def test_metrics_count_verdicts(client: httpx.Client) -> None:
    before = client.get("/metrics").text
    ask(client, items=[ITEM] * 3)
    name = 'bapo_verdicts_total{status="ok",task="countdown"}'

    def value(text: str) -> float:
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))

    assert value(client.get("/metrics").text) == value(before) + 3


def test_the_api_documents_its_body(client: httpx.Client) -> None:
    operation = client.get("/openapi.json").json()["paths"]["/v1/verify"]["post"]
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    assert set(schema["properties"]["items"]["items"]["properties"]) == {"payload", "responses"}


# ---- the client ---------------------------------------------------------------------------------


def test_the_client_splits_large_calls_and_joins_the_answers(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "RESPONSES_AT_ONCE", 7)
    monkeypatch.setattr(client_module, "CHARACTERS_AT_ONCE", 300)
    typed = VerifierClient(str(client.base_url), TOKEN)
    sums = [f"<answer>{a}+{b}</answer>" for a in range(1, 6) for b in range(1, 5)]
    items = [
        VerifyItem(payload={"nums": [a, b], "target": a + b}, responses=sums)
        for a in range(1, 4)
        for b in range(1, 4)
    ]
    items.insert(2, VerifyItem(payload=PAYLOAD, responses=[]))
    items.append(VerifyItem(payload=PAYLOAD, responses=["x" * (LONGEST_RESPONSE + 9)]))
    verdicts = typed.verify("countdown", {}, items)
    typed.close()
    assert [len(scored) for scored in verdicts] == [len(item.responses) for item in items]
    for item, scored in zip(items[:-1], verdicts, strict=False):
        for response, verdict in zip(item.responses, scored, strict=True):
            numbers = sorted(map(int, response[8:-9].split("+")))
            assert (verdict.reward == 1) == (numbers == sorted(item.payload["nums"]))
    assert verdicts[-1][0].status == "too_large"


def test_the_client_reports_what_was_refused(client: httpx.Client) -> None:
    typed = VerifierClient(str(client.base_url), TOKEN)
    with pytest.raises(ServiceError, match="the verifier refused POST /v1/verify: task: 'x'"):
        typed.verify("x", {}, [VerifyItem(payload={}, responses=["1"])])
    typed.close()


# ---- busy, disconnected, draining ---------------------------------------------------------------


def test_beyond_the_queue_comes_429_and_the_client_waits(odd_task: None) -> None:
    hanging = {"task": "odd", "items": [{"payload": {"n": 1}, "responses": ["hang"] * 2}]}
    with (
        serving(VerifierSettings(workers=1, deadline_s=1.0, queue=2)) as (app, client),
        ThreadPoolExecutor(1) as threads,
    ):
        first = threads.submit(client.post, "/v1/verify", json=hanging)
        wait_until(lambda: app.state.pool.waiting() == 2)
        answer = client.post("/v1/verify", json=hanging)
        refused(answer, 429, "BAPO_VERIFIER_QUEUE")
        assert answer.headers["retry-after"] == "1"
        refused(ask(client, items=[ITEM] * 3), 413, "BAPO_VERIFIER_QUEUE = 2")
        typed = VerifierClient(str(client.base_url), TOKEN)
        (verdicts,) = typed.verify("odd", {}, [VerifyItem(payload={"n": 1}, responses=["a"])])
        assert verdicts[0].status == "ok"
        typed.close()
        assert first.result().status_code == 200
        assert 'bapo_verifier_refused_total{why="busy"}' in client.get("/metrics").text


def test_the_batch_of_a_client_that_disconnects_is_abandoned(odd_task: None) -> None:
    hanging = {"task": "odd", "items": [{"payload": {"n": 1}, "responses": ["hang"] * 50}]}
    with serving(VerifierSettings(workers=1, deadline_s=60.0)) as (app, client):
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v1/verify", json=hanging, timeout=0.5)
        wait_until(lambda: app.state.pool.waiting() == 0)


def test_while_draining_new_requests_are_refused(odd_task: None) -> None:
    work = {"task": "odd", "items": [{"payload": {"n": 1}, "responses": ["hang", "a"]}]}
    with (
        serving(VerifierSettings(workers=1, deadline_s=1.0)) as (app, client),
        ThreadPoolExecutor(1) as threads,
    ):
        in_progress = threads.submit(client.post, "/v1/verify", json=work)
        wait_until(lambda: app.state.pool.waiting() == 2)
        drain = threading.Thread(target=app.state.pool.drain, args=(30.0,))
        drain.start()
        wait_until(lambda: client.get("/readyz").status_code == 503)
        assert client.get("/health").status_code == 200
        refused(client.post("/v1/verify", json=work), 503, "shutting down")
        drain.join()
        statuses = [verdict["status"] for verdict in in_progress.result().json()["verdicts"][0]]
        assert statuses == ["timeout", "ok"]


def test_sigterm_finishes_requests_in_progress_and_exits(
    odd_task: None, reserved_port: int
) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        "BAPO_TOKEN": TOKEN,
        "BAPO_PORT": str(reserved_port),
        "BAPO_VERIFIER_WORKERS": "1",
        "BAPO_VERIFIER_DEADLINE_S": "2",
    }
    process = subprocess.Popen([sys.executable, "-m", "services.verifier.app"], env=environment)
    work = {"task": "odd", "items": [{"payload": {"n": 1}, "responses": ["hang", "a"]}]}
    url, headers = f"http://127.0.0.1:{reserved_port}", {"Authorization": f"Bearer {TOKEN}"}
    with (
        httpx.Client(base_url=url, headers=headers, timeout=300) as client,
        ThreadPoolExecutor(1) as threads,
    ):
        try:
            wait_until(lambda: _status(client, "/readyz") == 200)
            in_progress = threads.submit(client.post, "/v1/verify", json=work)
            wait_until(lambda: "bapo_verifier_waiting 2.0" in client.get("/metrics").text)
            process.send_signal(signal.SIGTERM)
            wait_until(lambda: _status(client, "/readyz") == 503)
            answer = in_progress.result()
            assert [v["status"] for v in answer.json()["verdicts"][0]] == ["timeout", "ok"]
            process.wait(300)
        finally:
            process.kill()
            process.wait()


def _status(client: httpx.Client, path: str) -> int:
    try:
        return client.get(path).status_code
    except httpx.TransportError:
        return 0


# ---- settings -----------------------------------------------------------------------------------


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "BAPO_TOKEN": "a-secret-of-the-verifier",
        "BAPO_PORT": "8701",
        "BAPO_VERIFIER_WORKERS": "3",
        "BAPO_VERIFIER_DEADLINE_S": "1.5",
        "BAPO_VERIFIER_MEMORY_MB": "512",
        "BAPO_VERIFIER_QUEUE": "9",
    }.items():
        monkeypatch.setenv(name, value)
    settings = VerifierServerSettings.load()
    assert (settings.host, settings.port) == ("127.0.0.1", 8701)
    assert settings.token.get_secret_value() == "a-secret-of-the-verifier"
    expected = VerifierSettings(workers=3, deadline_s=1.5, memory_mb=512, queue=9)
    assert settings.verifier == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("BAPO_VERIFIER_WORKERS", "0"),
        ("BAPO_VERIFIER_WORKERS", "many"),
        ("BAPO_VERIFIER_DEADLINE_S", "nan"),
        ("BAPO_VERIFIER_DEADLINE_S", "inf"),
        ("BAPO_VERIFIER_MEMORY_MB", "-1"),
        ("BAPO_VERIFIER_QUEUE", "0"),
    ],
)
def test_an_invalid_setting_is_named(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BAPO_TOKEN", "a-secret-of-the-verifier")
    monkeypatch.setenv("BAPO_PORT", "8701")
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"{name}: .* \\(got ") as caught:
        VerifierServerSettings.load()
    assert "secret" not in str(caught.value)


def test_every_missing_variable_is_named_in_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BAPO_TOKEN", "BAPO_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="BAPO_PORT is not set; BAPO_TOKEN is not set"):
        VerifierServerSettings.load()
