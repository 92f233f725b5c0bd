"""An attacker with a token for people: of scope `run`, of another run, or one that has ended."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable

import httpx
import pytest

from services.buffer.api.client import BufferClient
from services.stack.stack import Endpoints
from tests.integration.support.driver import Driver, small_config
from tests.security.conftest import MakeToken

Call = Callable[..., httpx.Response]

DIGEST = {"manifest_digest": "0" * 64}
EVIL = {"url": "https://evil.example", "state": "serving", "loaded_version": 1}


@pytest.mark.parametrize(
    ("method", "path", "body", "scope"),
    [
        ("PUT", "/replicas/evil", EVIL, "replica"),
        ("GET", "/replicas/credentials", None, "collector"),
        ("PUT", "/checkpoints/2", DIGEST, "trainer"),
        ("PUT", "/weights/9", DIGEST, "trainer"),
        ("POST", "/steps/3/commit", {"metrics": {}}, "trainer"),
        ("POST", "/steps/3/batch", None, "trainer"),
        ("POST", "/steps/3/prompts", None, "collector"),
        ("POST", "/rewind", {"step": 0}, "admin"),
        ("POST", "/spans", {"component": "trainer", "spans": []}, "trainer"),
    ],
)
def test_scope_run_cannot_make_the_calls_of_a_process(
    victim: Driver,
    make_token: MakeToken,
    call: Call,
    method: str,
    path: str,
    body: object,
    scope: str,
) -> None:
    """With them it would take over the trainer, or have the collector send prompts to it."""
    before = victim.client.run_state()
    answer = call(make_token("run"), method, f"/runs/{before.name}{path}", json=body)
    assert answer.status_code == 403, answer.text
    assert scope in answer.json()["detail"] or scope == "admin"
    assert victim.client.run_state() == before
    assert victim.client.replicas() == []


@pytest.mark.parametrize("scope", ["run", "replica", "collector", "trainer", "pipeline"])
def test_no_token_but_the_administrators_makes_or_lists_tokens(
    make_token: MakeToken, call: Call, scope: str
) -> None:
    token = make_token(scope)
    made = call(token, "POST", "/tokens", json={"name": "mine", "scope": "admin"})
    assert made.status_code == 403
    assert call(token, "GET", "/tokens").status_code == 403
    assert call(token, "DELETE", "/tokens/1").status_code == 403
    assert call(token, "POST", "/gc?dry_run=false").status_code == 403


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", ""),
        ("DELETE", ""),
        ("POST", "/stop"),
        ("POST", "/pause"),
        ("POST", "/attempts?reopen=true"),
        ("GET", "/prompts"),
        ("GET", "/batches/1/arrow"),
        ("GET", "/groups/1"),
        ("GET", "/difficulty.parquet"),
    ],
)
def test_a_token_of_one_run_neither_reads_nor_ends_another(
    victim: Driver, make_token: MakeToken, call: Call, method: str, path: str
) -> None:
    token = make_token("run", run="the-attackers-own")
    before = victim.client.run_state()
    answer = call(token, method, f"/runs/{before.name}{path}")
    assert answer.status_code == 403, answer.text
    assert "'the-attackers-own' alone" in answer.json()["detail"]
    assert victim.client.run_state() == before


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/datasets", None),
        ("GET", "/configs", None),
        # The name of a configuration is a parameter of the same name as that of a run.
        ("PUT", "/configs/the-attackers-own", {"text": "steps: 1"}),
        ("GET", "/configs/the-attackers-own", None),
        ("POST", "/datasets/mine", {"first_position": 0, "prompts": []}),
        ("POST", "/runs", {"name": "the-attackers-own"}),
        ("PUT", f"/images/{'0' * 64}", None),
        ("PUT", f"/reward-files/{'0' * 64}", {"text": "x"}),
        ("GET", "/comparisons?run=the-attackers-own&run=victim", None),
    ],
)
def test_a_token_of_one_run_is_for_nothing_else(
    make_token: MakeToken, call: Call, method: str, path: str, body: object
) -> None:
    answer = call(make_token("run", run="the-attackers-own"), method, path, json=body)
    assert answer.status_code == 403, answer.text


def test_a_token_of_one_run_finds_no_other_in_the_list(
    victim: Driver, stack: Endpoints, make_token: MakeToken
) -> None:
    own = Driver(stack, small_config("listed"))
    bound = BufferClient(stack.buffer_url, make_token("read", run="listed"))
    assert [run.name for run in bound.runs()] == ["listed"]
    assert victim.config.name in [run.name for run in own.client.runs()]
    own.client.stop()


def test_a_token_ends_after_its_days(make_token: MakeToken, call: Call) -> None:
    assert call(make_token("read", days=1), "GET", "/runs").status_code == 200
    # 86 microseconds, which have passed when the answer is here.
    assert call(make_token("read", days=1e-9), "GET", "/runs").status_code == 401


def test_a_run_does_not_inherit_the_tokens_of_a_deleted_one_of_its_name(
    stack: Endpoints, make_token: MakeToken, call: Call
) -> None:
    first = Driver(stack, small_config("renewed"))
    token = make_token("read", run="renewed")
    first.client.stop()
    first.client.delete_run()
    second = Driver(stack, small_config("renewed"))
    assert call(token, "GET", "/runs/renewed").status_code == 401
    second.client.stop()


def test_no_administrator_is_bound_to_a_run(stack: Endpoints, call: Call) -> None:
    body = {"name": "x", "scope": "admin", "run": "mine"}
    answer = call(stack.token, "POST", "/tokens", json=body)
    assert answer.status_code == 400
    assert "run" in answer.json()["detail"]


# ---- texts --------------------------------------------------------------------------------------


def cursor(*key: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(key).encode()).decode().rstrip("=")


@pytest.mark.parametrize(
    "value", ["\ud800", "a\udfffb", "\x00", 1, None, ["x"], {"a": 1}, True, "x" * 900]
)
def test_no_cursor_is_an_error_of_the_service(
    make_token: MakeToken, call: Call, value: object
) -> None:
    for path, order in (("configs", "name"), ("datasets", "name"), ("runs", "newest")):
        answer = call(make_token("read"), "GET", f"/{path}?cursor={cursor(order, value)}")
        assert answer.status_code in (200, 400, 422), answer.text


def test_a_deep_cursor_is_refused(make_token: MakeToken, call: Call) -> None:
    deep = base64.urlsafe_b64encode(b"[" * 1400).decode()
    assert call(make_token("read"), "GET", f"/configs?cursor={deep}").status_code == 400


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/datasets/half", {"first_position": 0, "prompts": [{"uid": "\ud800"}]}),
        (
            "POST",
            "/datasets/half",
            {
                "first_position": 0,
                "prompts": [{"uid": "u", "task": "t", "payload": {"\ud800": "\ud800"}}],
            },
        ),
        ("PUT", "/configs/half", {"text": "name: \ud800"}),
        ("PUT", "/configs/half", {"text": 'task: {name: "\\ud800"}'}),
        (
            "POST",
            "/runs",
            {
                "name": "half",
                "config": {"task": {"options": {"a": "\ud800"}}},
                "train_dataset": "d",
                "test_datasets": {"test": "d"},
            },
        ),
        ("POST", "/runs/half/turn", {"workflow": "\ud800"}),
        ("POST", "/runs/half/stop", {"by": "\ud800", "reason": "\ud800"}),
    ],
)
def test_half_a_character_is_an_error_of_the_sender(
    make_token: MakeToken, call: Call, method: str, path: str, body: object
) -> None:
    answer = call(
        make_token("run"),
        method,
        path,
        content=json.dumps(body),
    )
    assert 400 <= answer.status_code < 500, answer.text
