"""A client that calls a service for longer than a minute says so."""

from __future__ import annotations

import httpx
import pytest

from services.common import http
from services.common.errors import ServiceUnavailable
from services.common.http import HttpClient


def make_client(answers: list[int], give_up_s: float) -> HttpClient:
    """Makes a client whose requests get these statuses, and then the last one for ever."""
    client = HttpClient("buffer service", "http://buffer", "token", give_up_s=give_up_s)
    transport = httpx.MockTransport(
        lambda _: httpx.Response(answers.pop(0) if len(answers) > 1 else answers[0])
    )
    client._client = httpx.Client(transport=transport, base_url="http://buffer")
    return client


def test_a_long_outage_is_said_until_the_service_answers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(http, "SAY_EVERY_S", 0.1)
    assert make_client([503, 503, 503, 200], 900.0).call("GET", "/v1/runs").is_success
    (message,) = [record.getMessage() for record in caplog.records]
    assert message == (
        "the buffer service at http://buffer has not served the call for 0 s (HTTP 503); it is "
        "called for up to 900 s"
    )


def test_a_short_outage_is_not_said(caplog: pytest.LogCaptureFixture) -> None:
    assert make_client([503, 200], 900.0).call("GET", "/v1/runs").is_success
    with pytest.raises(ServiceUnavailable):
        make_client([503], 0.2).call("GET", "/v1/runs")
    assert not caplog.records
