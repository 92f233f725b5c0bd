"""A client that calls a service for longer than a minute says so."""

from __future__ import annotations

import httpx
import pytest

from services.common import http
from services.common.errors import UNFORESEEN, ServiceError, ServiceUnavailable
from services.common.http import HttpClient


class Clock:
    """Stands for the module `time`: a clock that a wait sets forward, without waiting."""

    def __init__(self) -> None:
        self._now = 0.0

    def monotonic(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds


def make_client(answers: list[int], give_up_s: float) -> HttpClient:
    """Makes a client whose requests get these statuses, and then the last one for ever."""
    client = HttpClient("buffer service", "http://buffer", "token", give_up_s=give_up_s)
    transport = httpx.MockTransport(
        lambda _: httpx.Response(answers.pop(0) if len(answers) > 1 else answers[0])
    )
    client._client = httpx.Client(transport=transport, base_url="http://buffer")
    return client


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Gives the client a clock that only its own waits move."""
    clock = Clock()
    monkeypatch.setattr(http, "time", clock)
    return clock


def test_a_long_outage_is_said_until_the_service_answers(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    assert make_client([*[503] * 150, 200], 900.0).call("GET", "/v1/runs").is_success
    assert 121.0 < clock.monotonic() < 180.0
    assert [record.getMessage() for record in caplog.records] == [
        f"the buffer service at http://buffer has not served the call for {seconds} s (HTTP 503); "
        "it is called for up to 900 s"
        for seconds in (61, 121)
    ]


def test_a_short_outage_is_not_said(caplog: pytest.LogCaptureFixture) -> None:
    assert make_client([503, 200], 900.0).call("GET", "/v1/runs").is_success
    with pytest.raises(ServiceUnavailable):
        make_client([503], 0.2).call("GET", "/v1/runs")
    assert not caplog.records


def problem(status: int, detail: str, kind: str = "about:blank") -> httpx.Response:
    return httpx.Response(
        status,
        json={"type": kind, "title": "Title", "status": status, "detail": detail},
        headers={"content-type": "application/problem+json"},
    )


def answering(answers: list[httpx.Response], give_up_s: float) -> HttpClient:
    """Makes a client whose requests get these answers, and then the last one for ever."""
    client = HttpClient("buffer service", "http://buffer", "token", give_up_s=give_up_s)
    transport = httpx.MockTransport(lambda _: answers.pop(0) if len(answers) > 1 else answers[0])
    client._client = httpx.Client(transport=transport, base_url="http://buffer")
    return client


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (httpx.Response(500, text="Internal Server Error"), "HTTP 500"),
        (problem(500, "an unforeseen KeyError", UNFORESEEN), "HTTP 500: an unforeseen KeyError"),
    ],
)
def test_an_unforeseen_failure_is_repeated_and_said(
    failure: httpx.Response, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    client = answering([failure, failure, httpx.Response(200)], 900.0)
    assert client.call("PUT", "/v1/runs/r/checkpoints/2").is_success
    (message,) = [record.getMessage() for record in caplog.records]
    assert message == (
        f"the buffer service at http://buffer failed at PUT /v1/runs/r/checkpoints/2 ({reason}); "
        "the call is repeated for up to 900 s"
    )


def test_a_failure_that_the_service_foresaw_is_not_repeated() -> None:
    client = answering(
        [problem(500, "task mine: verify raised KeyError"), httpx.Response(200)], 9.0
    )
    with pytest.raises(ServiceError, match="verify raised KeyError"):
        client.call("GET", "/v1/runs")


def test_the_end_of_an_outage_that_lasts_names_the_services_reason() -> None:
    client = answering([problem(503, "the database cannot serve the call: disk full")], 0.2)
    with pytest.raises(ServiceUnavailable, match=r"HTTP 503: the database .*: disk full\); see"):
        client.call("GET", "/v1/runs")
