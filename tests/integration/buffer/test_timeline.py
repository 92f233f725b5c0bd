"""Spans are recorded once, however often they are sent, and read back by the trainer's steps."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import timedelta

import httpx
import pytest

from services.buffer.api.spans import SpanRecorder
from services.report.charts import timeline as draw
from services.report.timeline import assign_lanes, read_sync_windows
from services.stack.stack import Endpoints
from tests.integration.support.driver import Driver, small_config

CONFIG = small_config("timeline", sync={"every": 4, "reevaluate_every": 4})


@pytest.fixture(scope="module")
def driver(stack: Endpoints) -> Driver:
    return Driver(stack, CONFIG)


MOMENT = time.monotonic()
"""The present: one moment, so that the pauses between two calls do not count."""


def record(
    recorder: SpanRecorder, name: str, step: int, start: float, end: float, now: float
) -> None:
    """Records a span between two moments, in seconds of a timeline whose present is `now`."""
    recorder.record(name, step, MOMENT - (now - start))
    recorded = recorder._spans[-1]
    recorder._spans[-1] = replace(recorded, ended=recorded.started + end - start)


def test_the_trainers_idle_share_by_sync_window(driver: Driver) -> None:
    trainer, collector, engine = (
        SpanRecorder(driver.client, component) for component in ("trainer", "collector", "engine-0")
    )
    now = 100.0
    for step, start in enumerate(range(0, 90, 10), start=1):
        wait = 3.0 if step % 4 == 0 else 1.0
        record(trainer, "wait", step, start, start + wait, now)
        record(trainer, "update", step, start + wait, start + 10.0, now)
    # The sync windows: 1-3, 4-7, and 8-... which has not ended.
    record(collector, "fresh", 4, 30.5, 32.5, now)
    record(collector, "reevaluation", 4, 30.6, 32.9, now)
    record(collector, "fresh", 5, 32.6, 34.0, now)
    record(engine, "generate", 4, 30.5, 34.0, now)
    for recorder in (trainer, collector, engine):
        recorder.flush()
        recorder.flush()
    windows = read_sync_windows(driver.client, CONFIG, 9)
    # The first has no rollouts of its own, and the last is incomplete: neither is reported.
    assert [window.steps for window in windows] == [range(4, 8)]
    (window,) = windows
    assert window.seconds == pytest.approx(40.0, abs=0.05)
    assert window.waited / window.seconds == pytest.approx((3 + 1 + 1 + 1) / 40, abs=0.01)
    assert window.first_rollouts / window.seconds == pytest.approx(2.4 / 40, abs=0.01)
    lanes = assign_lanes(windows)
    assert list(lanes) == ["trainer", "collector", "collector (2)", "engine-0"]
    assert len(lanes["trainer"]) in (9, 10)  # two of them only touch the window's edges
    assert [name for name, _, _ in lanes["collector"]] == ["fresh", "fresh"]
    assert draw(lanes, [0.0, window.seconds]).startswith("<svg")


def test_a_span_that_is_sent_again_is_recorded_once(driver: Driver) -> None:
    recorder = SpanRecorder(driver.client, "trainer")
    recorder.record("update", 40, time.monotonic() - 2.0)
    recorded = list(recorder._spans)
    recorder.flush()
    recorder._spans = recorded
    recorder.flush()
    (span,) = driver.client.spans(40, 40)
    assert (span.component, span.name, span.step) == ("trainer", "update", 40)
    assert span.ended_at - span.started_at >= timedelta(seconds=2)


@pytest.mark.parametrize(
    ("field", "value"),
    [("seconds", -1.0), ("name", "<b>"), ("key", "x"), ("ended_ago_s", 1e300), ("step", -1)],
)
def test_an_invalid_span_is_refused(driver: Driver, field: str, value: object) -> None:
    span = {"key": "0" * 32, "name": "update", "step": 1, "seconds": 1.0, "ended_ago_s": 0.0}
    answer = httpx.post(
        f"{driver.stack.buffer_url}/v1/runs/{driver.client.run}/spans",
        headers={"Authorization": f"Bearer {driver.stack.token}"},
        json={"component": "trainer", "spans": [span | {field: value}]},
    )
    assert answer.status_code == 422
    assert field in answer.json()["detail"]


def test_a_run_without_complete_windows_has_no_timeline(driver: Driver) -> None:
    assert read_sync_windows(driver.client, CONFIG, 0) == []
