"""Times the phases of a training step, for metrics, timeline and traces."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch.profiler import record_function

from services.buffer.api.spans import SpanRecorder


@dataclass
class PhaseTimer:
    """Adds up the seconds of each phase of a step, and records each as a span."""

    recorder: SpanRecorder | None = None
    """Gets the spans, for the timeline; None records none."""
    step: int = 0
    """The step that spans belong to."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds by phase since `pop`."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times its block; a trace of `torch.profiler` shows the name around its operations."""
        started = time.monotonic()
        try:
            with record_function(name):
                yield
        finally:
            spent = time.monotonic() - started
            self.seconds[name] = self.seconds.get(name, 0.0) + spent
            if self.recorder is not None:
                self.recorder.record(name, self.step, started)

    def pop(self) -> dict[str, float]:
        """Returns the metrics `seconds/<phase>` since the last call, and starts again from 0."""
        metrics = {f"seconds/{name}": spent for name, spent in self.seconds.items()}
        self.seconds.clear()
        return metrics
