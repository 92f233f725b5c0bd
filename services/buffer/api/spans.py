"""Spans: what a component of a run did and when, recorded locally and sent in batches."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from uuid import uuid4

from services.buffer.api.client import BufferClient
from services.buffer.api.wire import Span, SpanBatch

SPANS_PER_REQUEST = 500


@dataclass(frozen=True, slots=True)
class _RecordedSpan:
    key: str
    name: str
    step: int
    started: float
    """In seconds of `time.monotonic`, because the clocks of machines differ and jump."""
    ended: float
    """In seconds of `time.monotonic`."""


class SpanRecorder:
    """Keeps the spans of one component until `flush` has sent them to the buffer service."""

    def __init__(self, buffer: BufferClient, component: str) -> None:
        self._buffer, self._component = buffer, component
        self._spans: list[_RecordedSpan] = []

    @contextmanager
    def span(self, name: str, step: int) -> Iterator[None]:
        """Records a span that lasts as long as its block."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.record(name, step, started)

    def record(self, name: str, step: int, started: float) -> None:
        """Records a span that ends now; `started` is in seconds of `time.monotonic`."""
        self._spans.append(_RecordedSpan(uuid4().hex, name, step, started, time.monotonic()))

    def flush(self) -> None:
        """Sends all recorded spans; keeps those that could not be sent for the next call.

        Raises what `BufferClient.post_spans` raises.
        """
        while spans := self._spans[:SPANS_PER_REQUEST]:
            now = time.monotonic()
            self._buffer.post_spans(
                SpanBatch(
                    component=self._component,
                    spans=[
                        Span(
                            key=span.key,
                            name=span.name,
                            step=span.step,
                            seconds=span.ended - span.started,
                            ended_ago_s=now - span.ended,
                        )
                        for span in spans
                    ],
                )
            )
            del self._spans[: len(spans)]
