"""Who of a run did what when, and how long the trainer waited for rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from bapo_core.config import RunConfig
from services.buffer.api.client import BufferClient
from services.buffer.api.wire import SpanView

_SAME_TIME_S = 0.01
_SEEN_S = 0.002
"""Shorter ones are not drawn."""

LONGEST_STRETCH = 60
"""Steps that are looked at: the last ones."""


@dataclass(frozen=True, slots=True)
class Window:
    """The steps that share a rollout policy, and what all parts did meanwhile."""

    steps: range
    begin: datetime
    seconds: float
    """From the trainer's first span of its first step to that of the next window."""
    waited: float
    """Seconds of it that the trainer had nothing to train on."""
    first_rollouts: float
    """Seconds that the rollouts of its first step took, re-evaluations included: nobody can train
    before they are there."""
    spans: Sequence[SpanView]


def read_windows(buffer: BufferClient, config: RunConfig, last_step: int) -> list[Window]:
    """The last whole windows of a run that has come to `last_step`, but not the first of all,
    in which everything starts."""
    whole: list[range] = []
    step = last_step
    while step > 0 and last_step - step < LONGEST_STRETCH:
        steps = config.schedule.sync_window(step)
        # What follows a window ends it.
        if steps.start > 1 and steps.stop <= last_step:
            whole.insert(0, steps)
        step = steps.start - 1
    if not whole:
        return []
    found = buffer.spans(whole[0].start, whole[-1].stop)
    windows = [_window(steps, found) for steps in whole]
    return [window for window in windows if window is not None]


def _window(steps: range, spans: Sequence[SpanView]) -> Window | None:
    """None for one that was interrupted, or trained before spans were recorded."""
    trainer = [each for each in spans if each.component == "trainer"]
    first = [each.started_at for each in trainer if each.step == steps.start]
    following = [each.started_at for each in trainer if each.step == steps.stop]
    rollouts = [
        each
        for each in spans
        if each.component == "collector"
        and each.step == steps.start
        and each.name in ("fresh", "reevaluation")
    ]
    waits = [each for each in trainer if each.name == "wait" and each.step in steps]
    if not (first and following and rollouts) or len(waits) != len(steps):
        return None
    begin, end = min(first), min(following)
    return Window(
        steps=steps,
        begin=begin,
        seconds=(end - begin).total_seconds(),
        waited=sum(_seconds(each) for each in waits),
        first_rollouts=(
            max(each.ended_at for each in rollouts) - min(each.started_at for each in rollouts)
        ).total_seconds(),
        spans=[each for each in spans if each.ended_at >= begin and each.started_at <= end],
    )


def lanes_of(windows: Sequence[Window]) -> dict[str, list[tuple[str, float, float]]]:
    """(name, start, end) in seconds, by part; what a part does at the same time in lanes."""
    # What began in one window and ended in the next is in both.
    found = {
        (each.component, each.name, each.started_at): each
        for window in windows
        for each in window.spans
    }.values()
    lanes: dict[str, list[tuple[str, float, float]]] = {}
    for each in sorted(found, key=lambda each: (_place(each), each.started_at)):
        start = max(0.0, (each.started_at - windows[0].begin).total_seconds())
        end = (each.ended_at - windows[0].begin).total_seconds()
        if end - start < _SEEN_S:
            continue
        whose = "scoring" if each.name in ("verify", "deliver") else each.component
        lane, name = 1, whose
        while lanes.get(name) and lanes[name][-1][2] > start + _SAME_TIME_S:
            lane += 1
            name = f"{whose} ({lane})"
        lanes.setdefault(name, []).append((each.name, start, end))
    return lanes


def _place(span: SpanView) -> tuple[int, str]:
    """Trainer, collector, its scoring, replicas."""
    known = ("trainer", "collector")
    if span.component not in known:
        return len(known), span.component
    return known.index(span.component), "scoring" * (span.name in ("verify", "deliver"))


def _seconds(span: SpanView) -> float:
    return (span.ended_at - span.started_at).total_seconds()
