"""What a part of a run did and when: noted at once, told to the buffer service when it suits."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from uuid import uuid4

from services.buffer.client import BufferClient
from services.buffer.wire import Activities, Activity

AT_ONCE = 500


@dataclass(frozen=True, slots=True)
class _Noted:
    key: str
    name: str
    step: int
    started: float
    ended: float
    """Both by `time.monotonic`: the clocks of machines differ, and jump."""


class Timeline:
    """The activities of one part, until they are told."""

    def __init__(self, buffer: BufferClient, part: str) -> None:
        self._buffer, self._part = buffer, part
        self._noted: list[_Noted] = []

    @contextmanager
    def activity(self, name: str, step: int) -> Iterator[None]:
        """Notes what happens in its block."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.note(name, step, started)

    def note(self, name: str, step: int, started: float) -> None:
        """An activity that ends now. `started` is by `time.monotonic`."""
        self._noted.append(_Noted(uuid4().hex, name, step, started, time.monotonic()))

    def tell(self) -> None:
        """Sends what has been noted; what could not be sent is kept."""
        while noted := self._noted[:AT_ONCE]:
            now = time.monotonic()
            self._buffer.post_activities(
                Activities(
                    part=self._part,
                    activities=[
                        Activity(
                            key=each.key,
                            name=each.name,
                            step=each.step,
                            seconds=each.ended - each.started,
                            ended_ago_s=now - each.ended,
                        )
                        for each in noted
                    ],
                )
            )
            del self._noted[: len(noted)]
