"""Who did what when: told once however often it is sent, and read back by steps of the trainer."""

from __future__ import annotations

import time
from datetime import timedelta

import httpx
import pytest

from services.buffer.api.spans import SpanRecorder
from services.report.charts import timeline as draw
from services.report.timeline import assign_lanes, read_sync_windows
from services.stack.stack import Endpoints
from tests.integration.driver import Driver, small_config

CONFIG = small_config("timeline", sync={"every": 4, "reevaluate_every": 4})


@pytest.fixture(scope="module")
def driver(stack: Endpoints) -> Driver:
    return Driver(stack, CONFIG)


def note(
    recorder: SpanRecorder, name: str, step: int, start: float, end: float, now: float
) -> None:
    """An span between two moments of a made-up time line whose `now` is this moment."""
    recorder.record(name, step, time.monotonic() - (now - start))
    recorded = recorder._spans[-1]
    moved = {each: getattr(recorded, each) for each in ("key", "name", "step", "started")}
    recorder._spans[-1] = type(recorded)(**moved, ended=recorded.started + end - start)


def test_the_trainers_idle_share_by_window(driver: Driver) -> None:
    trainer, collector, engine = (
        SpanRecorder(driver.client, component) for component in ("trainer", "collector", "engine-0")
    )
    now = 100.0
    for step, start in enumerate(range(0, 90, 10), start=1):
        waits = 3.0 if step % 4 == 0 else 1.0
        note(trainer, "wait", step, start, start + waits, now)
        note(trainer, "update", step, start + waits, start + 10.0, now)
    # The windows: 1-3, 4-7, 8-... which is not over.
    note(collector, "fresh", 4, 30.5, 32.5, now)
    note(collector, "reevaluation", 4, 30.6, 32.9, now)
    note(collector, "fresh", 5, 32.6, 34.0, now)
    note(engine, "generate", 4, 30.5, 34.0, now)
    for each in (trainer, collector, engine):
        each.flush()
        each.flush()
    windows = read_sync_windows(driver.client, CONFIG, 9)
    # The first has no rollouts of its own; nothing is said of what was not seen.
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


def test_what_is_told_again_is_recorded_once(driver: Driver) -> None:
    recorder = SpanRecorder(driver.client, "trainer")
    recorder.record("update", 40, time.monotonic() - 2.0)
    recorded = list(recorder._spans)
    recorder.flush()
    recorder._spans = recorded
    recorder.flush()
    (found,) = driver.client.spans(40, 40)
    assert (found.component, found.name, found.step) == ("trainer", "update", 40)
    assert found.ended_at - found.started_at >= timedelta(seconds=2)


@pytest.mark.parametrize(
    ("field", "value"),
    [("seconds", -1.0), ("name", "<b>"), ("key", "x"), ("ended_ago_s", 1e300), ("step", -1)],
)
def test_refusals(driver: Driver, field: str, value: object) -> None:
    span = {"key": "0" * 32, "name": "update", "step": 1, "seconds": 1.0, "ended_ago_s": 0.0}
    answer = httpx.post(
        f"{driver.stack.buffer_url}/v1/runs/{driver.client.run}/spans",
        headers={"Authorization": f"Bearer {driver.stack.token}"},
        json={"component": "trainer", "spans": [span | {field: value}]},
    )
    assert answer.status_code == 422
    assert field in answer.json()["detail"]


def test_nothing_is_drawn_of_a_run_without_whole_windows(driver: Driver) -> None:
    assert read_sync_windows(driver.client, CONFIG, 0) == []
