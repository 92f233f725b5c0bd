"""Reads a run's metrics from the buffer service as points of named curves, for other tools."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from services.buffer.api.client import BufferClient
from services.buffer.api.wire import Evaluation, StepView

POLL_INTERVAL_S = 5.0
FINAL_STATUSES = ("finished", "failed", "stopped", "deleting")


@dataclass
class Position:
    """How far a run has been read: the last step, and the last version whose evaluation is read."""

    step: int = 0
    version: int = 0


def curves(step: StepView) -> dict[str, float]:
    """Returns the value of every curve at a training step, by the curve's name."""
    counts = {f"groups/{source}": float(count) for source, count in step.counts.items()}
    rewards = {"reward": step.mean_reward, "accuracy": step.accuracy}
    rewards |= {f"reward/{name}": value for name, value in step.reward_parts.items()}
    rewards |= {"window/c2": step.c2, "window/c3": step.c3}
    return rewards | counts | {"rollout_tokens": float(step.tokens)} | step.metrics


def evaluation_curves(evaluation: Evaluation, prefix: str = "evaluation") -> dict[str, float]:
    """Returns the curves' values of an evaluation, by name below `prefix`.

    They belong to step `version - 1`, whose update made the version.
    """
    return {
        f"{prefix}/accuracy": evaluation.mean_accuracy,
        f"{prefix}/reward": evaluation.mean_reward,
        f"{prefix}/prompts_at_0": float(evaluation.bins[0]),
    }


def new_points(
    buffer: BufferClient, position: Position
) -> Iterator[tuple[int, float, dict[str, float]]]:
    """Yields (step, Unix time, values) of the steps and evaluations after `position`, and moves it.

    Evaluations have no time of their own; they get that of the last step.
    """
    unix_time = 0.0
    for step in buffer.steps(after=position.step):
        position.step, unix_time = step.step, step.committed_at.timestamp()
        yield step.step, unix_time, curves(step)
    for version, values in _complete_evaluations(buffer, position.version):
        position.version = version
        yield version - 1, unix_time or time.time(), values


def _complete_evaluations(
    buffer: BufferClient, after: int
) -> Iterator[tuple[int, dict[str, float]]]:
    """Yields (version, values on all sets) in order, up to the first that lacks an evaluation."""
    history, sets = buffer.run_state().history, buffer.evaluation_sets()
    evaluations: dict[int, dict[str, Evaluation]] = defaultdict(dict)
    for view in sets:
        for evaluation in view.evaluations:
            evaluations[evaluation.version][view.name] = evaluation
    for version in sorted(version for version in evaluations if version > after):
        measured = evaluations[version]
        # A change of the configuration leaves evaluations that are not due any more.
        if not measured.keys() >= {*history.at(version).evaluation_sets_at(version)}:
            return
        values: dict[str, float] = {}
        for name, evaluation in measured.items():
            prefix = "evaluation" if name == history.current.primary_set else f"evaluation/{name}"
            values |= evaluation_curves(evaluation, prefix)
        yield version, values
