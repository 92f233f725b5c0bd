"""Hundreds of hostile responses through the real service: none is rewarded wrongly, none stalls
the pool, and ordinary responses beside them get the right verdict."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import httpx
import pytest
from conftest import serving
from corpus import GOOD, Case, corpus

from services.verifier.settings import VerifierSettings

DEADLINE_S = 1.0
CASES = corpus()
OPTIONS = {"countdown": {}, "math": {"boxed_only": False}}
"""Options under which a task reads the most of a response."""


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with serving(VerifierSettings(workers=2, deadline_s=DEADLINE_S, memory_mb=512)) as (_, client):
        yield client


def score(client: httpx.Client, cases: list[Case]) -> tuple[list[str], list[str]]:
    """Returns (wrong verdicts, all statuses); each case stands between two right answers."""
    responses = [GOOD[cases[0].task]]
    for case in cases:
        responses += [case.response, GOOD[case.task]]
    items = [
        {"payload": cases[min(n // 2, len(cases) - 1)].payload, "responses": [response]}
        for n, response in enumerate(responses)
    ]
    # `json` escapes lone surrogates and NUL, as a foreign client may; httpx's encoder does not.
    task = cases[0].task
    body = json.dumps({"task": task, "options": OPTIONS[task], "items": items})
    answer = client.post("/v1/verify", content=body)
    assert answer.status_code == 200, answer.text
    verdicts = [verdict for item in answer.json()["verdicts"] for verdict in item]
    expected = [1.0]
    names = ["good"]
    for case in cases:
        expected += [case.reward, 1.0]
        names += [case.name, f"good after {case.name}"]
    wrong = [
        f"{name}: {verdict}"
        for name, verdict, reward in zip(names, verdicts, expected, strict=True)
        if verdict["reward"] != reward or (verdict["status"] == "ok") != (reward == 1.0)
    ]
    return wrong, [verdict["status"] for verdict in verdicts]


def test_the_corpus_has_hundreds_of_cases_with_both_rewards() -> None:
    assert len(CASES) >= 300
    for task in ("countdown", "math"):
        rewards = {case.reward for case in CASES if case.task == task}
        assert rewards == {0, 1}


def split_cases(task: str, batch: str, size: int) -> list[list[Case]]:
    selected = [case for case in CASES if case.task == task and case.batch == batch]
    return [selected[start : start + size] for start in range(0, len(selected), size)]


@pytest.mark.parametrize("task", ["countdown", "math"])
def test_odd_responses_get_the_right_reward(client: httpx.Client, task: str) -> None:
    for cases in split_cases(task, "fast", 60):
        wrong, statuses = score(client, cases)
        assert wrong == []
        assert "crashed" not in statuses


def test_bombs_cost_their_deadline_and_nothing_else(client: httpx.Client) -> None:
    cases = [case for case in CASES if case.batch == "slow"]
    # The time of one worker. There are two, but starting processes takes time as well.
    limit = len(cases) * (DEADLINE_S + 0.5)
    costs: list[float] = []
    # On a busy machine processes start slowly, so the cheapest attempt counts.
    while not costs or (min(costs) >= limit and len(costs) < 4):
        started = time.monotonic()
        wrong, statuses = score(client, cases)
        costs.append(time.monotonic() - started)
        assert wrong == []
        # The grader refuses what is too large to compute; sums and integrals go to SymPy.
        assert statuses.count("timeout") >= 3
    assert min(costs) < limit


@pytest.mark.parametrize(
    "text",
    ["\ud800", "\udfff\ud800", "a\ud800b", "\x00", "\uffff", "<answer>3*4*7\udcff</answer>"],
    ids=ascii,
)
@pytest.mark.parametrize("task", ["countdown", "math"])
def test_text_that_is_not_unicode_gets_a_verdict_or_a_clean_refusal(
    client: httpx.Client, task: str, text: str
) -> None:
    payload = next(case.payload for case in CASES if case.task == task)
    items = [{"payload": payload, "responses": [text]}]
    body = json.dumps({"task": task, "options": OPTIONS[task], "items": items})
    answer = client.post("/v1/verify", content=body)
    if answer.status_code == 200:
        assert answer.json()["verdicts"][0][0]["reward"] == 0
    else:
        assert answer.status_code == 400
        assert "UTF-8" in answer.json()["detail"]


@pytest.mark.parametrize(
    "response",
    [b"\xff", b"\xc3\x28", b"\xe2\x82", b"\xf0\x9f\x98", b"\xed\xa0\x80", b"\xc0\xaf", b"\x00"],
    ids=repr,
)
def test_bytes_that_are_not_utf8_are_refused(client: httpx.Client, response: bytes) -> None:
    payload = b'{"nums": [3, 4, 7], "target": 84}'
    items = b'[{"payload": ' + payload + b', "responses": ["' + response + b'"]}]'
    answer = client.post("/v1/verify", content=b'{"task": "countdown", "items": ' + items + b"}")
    assert answer.status_code == 400
    assert answer.headers["content-type"] == "application/problem+json"
