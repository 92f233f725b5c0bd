"""The metrics of a run as curves, for other tools than ours.

They are the buffer service's, so any run can be shown anywhere, also one that trains elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bapo_core.errors import BapoError
from services.buffer.api.client import BufferClient
from services.buffer.api.wire import Evaluation, StepView

LOOK_EVERY_S = 5.0
ENDED = ("finished", "failed", "stopped", "deleting")


def curves(step: StepView) -> dict[str, float]:
    """Everything known of a step, by name."""
    counts = {f"groups/{name}": float(count) for name, count in step.counts.items()}
    own = {"reward": step.r_tot, "window/c2": step.c2, "window/c3": step.c3}
    return own | counts | {"rollout_tokens": float(step.tokens)} | step.metrics


def evaluation_curves(evaluation: Evaluation) -> dict[str, float]:
    """At the step after which the policy was the one that was evaluated: its version - 1."""
    return {
        "evaluation/accuracy": evaluation.mean_accuracy,
        "evaluation/prompts_at_0": float(evaluation.bins[0]),
    }


def write_tensorboard(
    buffer: BufferClient, directory: Path, *, follow: bool, say: Callable[[str], None]
) -> None:
    """Writes the run's curves below `directory`, under the run's name; with `follow` until it
    ends."""
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ModuleNotFoundError as error:
        raise BapoError("TensorBoard is not installed; `pip install tensorboard`") from error
    place = directory / buffer.run

    def write() -> int:
        # Begun anew each time: a point that is written twice is drawn twice.
        for old in place.glob("events.*"):
            old.unlink()
        writer = EventFileWriter(str(place))
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
        with suppress(_TakenBack):
            say(f"{write()} points; `tensorboard --logdir {directory}` shows them")
            return


class _TakenBack(Exception):
    """The run went back to a checkpoint: steps that were written come again."""


@dataclass
class Place:
    """How far a run has been read: the last step, and the last version that was evaluated."""

    step: int = 0
    version: int = 0


def new_points(buffer: BufferClient, place: Place) -> Iterator[tuple[int, float, dict[str, float]]]:
    """(step, when, values) of the steps and evaluations after `place`, which moves along."""
    when = 0.0
    for step in buffer.steps(after=place.step):
        place.step, when = step.step, step.committed_at.timestamp()
        yield step.step, when, curves(step)
    for evaluation in buffer.evaluations():
        if evaluation.version > place.version:
            place.version = evaluation.version
            yield place.version - 1, when or time.time(), evaluation_curves(evaluation)


def _points(buffer: BufferClient, follow: bool) -> Iterator[tuple[int, float, dict[str, float]]]:
    """(step, when, values) of steps and evaluations, each once."""
    place = Place()
    while True:
        state = buffer.run_state()
        if state.current_step < place.step:
            raise _TakenBack
        yield from new_points(buffer, place)
        if state.status in ENDED or not follow:
            return
        time.sleep(LOOK_EVERY_S)
