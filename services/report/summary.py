"""Everything that the report of a run shows, gathered from the buffer service."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bapo_core.config import RunConfig
from bapo_core.errors import BapoError
from services.buffer.api.client import BufferClient
from services.buffer.api.wire import Evaluation, Migration, RunState, StepView
from services.report.timeline import Window, read_windows


@dataclass(frozen=True, slots=True)
class RunHistory:
    """A run as the buffer service remembers it."""

    state: RunState
    config: RunConfig
    steps: list[StepView]
    evaluations: list[Evaluation]
    migration: Migration
    """From the first to the last evaluation."""
    unlocked_over_time: list[float]
    """For each evaluation: share of the prompts at 0 in the first one that have some correct."""
    difficulty_bins: list[int]
    """Training prompts by k of G correct at their last attempt."""
    unlocked_training_prompts: tuple[int, int]
    """(unlocked, all that were 0 of G at first)."""

    windows: list[Window]
    """The last whole ones, with what all parts did."""

    @property
    def rollouts(self) -> int:
        """Training responses generated, discarded and re-evaluated ones included."""
        return sum(step.rollouts for step in self.steps)


def read_history(buffer: BufferClient) -> RunHistory:
    """The history of the client's run. An error while there is nothing to show."""
    state = buffer.run_state()
    evaluations = buffer.evaluations()
    steps = buffer.steps()
    if not evaluations or not steps:
        raise BapoError(
            f"run {state.name!r} has committed {len(steps)} steps and finished "
            f"{len(evaluations)} evaluations; a report needs one of each"
        )
    versions = [evaluation.version for evaluation in evaluations]
    migrations = [buffer.evaluation_migration(versions[0], version) for version in versions]
    return RunHistory(
        state=state,
        config=state.config,
        steps=steps,
        evaluations=evaluations,
        migration=migrations[-1],
        unlocked_over_time=[migration.unlocked_fraction for migration in migrations],
        difficulty_bins=buffer.difficulty_bins().bins,
        unlocked_training_prompts=_unlocked(buffer),
        windows=read_windows(buffer, state.config, steps[-1].step),
    )


def _unlocked(buffer: BufferClient) -> tuple[int, int]:
    unlocked = unsolved = 0
    for prompt in buffer.all_prompts():
        if prompt.first_mean == 0:
            unsolved += 1
            unlocked += prompt.best_mean > 0
    return unlocked, unsolved


def summarise(history: RunHistory, wall_seconds: float | None = None) -> dict[str, Any]:
    """`summary.json`."""
    unlocked, unsolved = history.unlocked_training_prompts
    seconds: dict[str, float] = {}
    for step in history.steps:
        for name, value in step.metrics.items():
            if name.startswith("seconds/"):
                phase = name.removeprefix("seconds/")
                seconds[phase] = seconds.get(phase, 0.0) + value
    if wall_seconds is not None:
        seconds["wall"] = wall_seconds
    return {
        "run": history.state.name,
        "algorithm": history.config.algorithm,
        "seed": history.config.seed,
        "steps": len(history.steps),
        "rollouts": history.rollouts,
        "evaluation": {
            "initial": _evaluation(history.evaluations[0]),
            "final": _evaluation(history.evaluations[-1]),
        },
        "unlocked_fraction": history.migration.unlocked_fraction,
        "unlocked_training_prompts": {"unlocked": unlocked, "initially_unsolved": unsolved},
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
        "trainer_idle": _idle(history.windows),
        "tokens": {
            "generated": sum(step.tokens for step in history.steps),
            "trained": int(sum(step.metrics.get("trained_tokens", 0) for step in history.steps)),
            "evaluation": sum(evaluation.tokens for evaluation in history.evaluations),
        },
    }


def _idle(windows: Sequence[Window]) -> dict[str, float] | None:
    """Of the time of these windows, how much the trainer waited, and how much it had to."""
    if not windows:
        return None
    total = sum(window.seconds for window in windows)
    return {
        "windows": len(windows),
        "waited_share": round(sum(window.waited for window in windows) / total, 4),
        "first_rollouts_share": round(sum(window.first_rollouts for window in windows) / total, 4),
    }


def _evaluation(evaluation: Evaluation) -> dict[str, Any]:
    return {
        "version": evaluation.version,
        "mean_accuracy": evaluation.mean_accuracy,
        "bins": evaluation.bins,
        "prompts": evaluation.prompts,
    }
