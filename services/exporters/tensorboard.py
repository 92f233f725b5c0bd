"""Writes a run's metrics as TensorBoard events."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from bapo_core.errors import BapoError
from services.buffer.api.client import BufferClient
from services.exporters.curves import FINAL_STATUSES, POLL_INTERVAL_S, Position, new_points


class _RunRewound(Exception):
    """The run was rewound to a checkpoint, so steps that are written already will come again."""


def write_tensorboard(
    buffer: BufferClient, directory: Path, *, follow: bool, log: Callable[[str], None]
) -> None:
    """Writes the run's curves below `directory`, in a folder with the run's name.

    follow: keeps writing until the run has ended.
    log: gets one line about what was written.

    Raises `BapoError` when TensorBoard is not installed.
    """
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ModuleNotFoundError as error:
        raise BapoError("TensorBoard is not installed; `pip install tensorboard`") from error
    run_directory = directory / buffer.run

    def write_events() -> int:
        # TensorBoard draws a point twice that is written twice, so every call starts over.
        for old in run_directory.glob("events.*"):
            old.unlink()
        writer = EventFileWriter(str(run_directory))
        written = 0
        try:
            for step, wall_time, values in _points(buffer, follow):
                tags = [
                    Summary.Value(tag=name, simple_value=value) for name, value in values.items()
                ]
                writer.add_event(Event(wall_time=wall_time, step=step, summary=Summary(value=tags)))
                written += 1
        finally:
            writer.close()
        return written

    while True:
        with suppress(_RunRewound):
            log(f"{write_events()} points; `tensorboard --logdir {directory}` shows them")
            return


def _points(buffer: BufferClient, follow: bool) -> Iterator[tuple[int, float, dict[str, float]]]:
    """Yields (step, Unix time, values) of every step and evaluation once."""
    position = Position()
    while True:
        state = buffer.run_state()
        if state.current_step < position.step:
            raise _RunRewound
        yield from new_points(buffer, position)
        if state.status in FINAL_STATUSES or not follow:
            return
        time.sleep(POLL_INTERVAL_S)
