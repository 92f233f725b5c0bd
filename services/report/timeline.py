"""Reads the spans of a run's components, and how long the trainer waited for rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from bapo_core.config import RunConfig
from services.buffer.api.client import BufferClient
from services.buffer.api.wire import SpanView

_SAME_TIME_S = 0.01
"""Overlap of two spans up to which they share a lane."""
_SHORTEST_SPAN_S = 0.002
"""Shorter spans are not drawn."""
MAX_STEPS = 60
"""Number of last training steps whose windows are read."""


@dataclass(frozen=True, slots=True)
class SyncWindow:
    """The training steps between two syncs, and the spans of all components during them."""

    steps: range
    begin: datetime
    seconds: float
    """Wall time from the trainer's first span of the window to its first span of the next one."""
    waited: float
    """Seconds for which the trainer waited for rollouts."""
    first_rollouts: float
    """Seconds that the rollouts of the window's first step took, re-evaluation included. The
    trainer cannot avoid waiting for these."""
    spans: Sequence[SpanView]


def read_sync_windows(buffer: BufferClient, config: RunConfig, last_step: int) -> list[SyncWindow]:
    """Reads the last complete sync windows of a run that has committed `last_step`.

    The run's first window is left out, because it includes the start of all processes.
    """
    complete: list[range] = []
    step = last_step
    while step > 0 and last_step - step < MAX_STEPS:
        steps = config.schedule.sync_window(step)
        # A window is complete once the step after it has begun.
        if steps.start > 1 and steps.stop <= last_step:
            complete.insert(0, steps)
        step = steps.start - 1
    if not complete:
        return []
    spans = buffer.spans(complete[0].start, complete[-1].stop)
    windows = [_window(steps, spans) for steps in complete]
    return [window for window in windows if window is not None]


def _window(steps: range, spans: Sequence[SpanView]) -> SyncWindow | None:
    """Returns None for a window that was interrupted or lacks spans."""
    trainer = [span for span in spans if span.component == "trainer"]
    starts = [span.started_at for span in trainer if span.step == steps.start]
    next_starts = [span.started_at for span in trainer if span.step == steps.stop]
    rollouts = [
        span
        for span in spans
        if span.component == "collector"
        and span.step == steps.start
        and span.name in ("fresh", "reevaluation")
    ]
    waits = [span for span in trainer if span.name == "wait" and span.step in steps]
    if not (starts and next_starts and rollouts) or len(waits) != len(steps):
        return None
    begin, end = min(starts), min(next_starts)
    return SyncWindow(
        steps=steps,
        begin=begin,
        seconds=(end - begin).total_seconds(),
        waited=sum(_seconds(span) for span in waits),
        first_rollouts=(
            max(span.ended_at for span in rollouts) - min(span.started_at for span in rollouts)
        ).total_seconds(),
        spans=[span for span in spans if span.ended_at >= begin and span.started_at <= end],
    )


def assign_lanes(windows: Sequence[SyncWindow]) -> dict[str, list[tuple[str, float, float]]]:
    """Returns (name, start, end) of the spans in seconds, by lane.

    Every component has a lane, and more of them for spans that overlap.
    """
    # A span that crosses the end of a window belongs to both windows.
    unique_spans = {
        (span.component, span.name, span.started_at): span
        for window in windows
        for span in window.spans
    }.values()
    lanes: dict[str, list[tuple[str, float, float]]] = {}
    for span in sorted(unique_spans, key=lambda span: (_order(span), span.started_at)):
        start = max(0.0, (span.started_at - windows[0].begin).total_seconds())
        end = (span.ended_at - windows[0].begin).total_seconds()
        if end - start < _SHORTEST_SPAN_S:
            continue
        owner = "scoring" if span.name in ("verify", "deliver") else span.component
        number, lane = 1, owner
        while lanes.get(lane) and lanes[lane][-1][2] > start + _SAME_TIME_S:
            number += 1
            lane = f"{owner} ({number})"
        lanes.setdefault(lane, []).append((span.name, start, end))
    return lanes


def _order(span: SpanView) -> tuple[int, str]:
    """Sort key: the trainer, the collector, the collector's scoring, then the replicas by name."""
    first = ("trainer", "collector")
    if span.component not in first:
        return len(first), span.component
    return first.index(span.component), "scoring" * (span.name in ("verify", "deliver"))


def _seconds(span: SpanView) -> float:
    return (span.ended_at - span.started_at).total_seconds()
