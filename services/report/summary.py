"""Reads a run's history from the buffer service, and summarises it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bapo_core.config import RunConfig
from bapo_core.errors import BapoError
from services.buffer.api.client import BufferClient
from services.buffer.api.wire import (
    Evaluation,
    EvaluationSetView,
    Migration,
    RunState,
    StepView,
)
from services.report.timeline import SyncWindow, read_sync_windows


@dataclass(frozen=True, slots=True)
class RunHistory:
    """A run's steps, evaluations and difficulty, as the buffer service stores them."""

    state: RunState
    config: RunConfig
    steps: list[StepView]
    evaluations: list[Evaluation]
    """Evaluations on the primary set."""
    sets: list[EvaluationSetView]
    """All evaluation sets by name, with the evaluations on them."""
    migration: Migration
    """Movement of held-out prompts between accuracy bins, first to last evaluation."""
    unlocked_over_time: list[float]
    """At each evaluation, the share of the prompts with 0 correct responses in the first evaluation
    that have at least one now."""
    unlocked_training_prompts: tuple[int, int]
    """(number unlocked since, number with 0 of G correct at their first attempt)."""
    sync_windows: list[SyncWindow]
    """The last complete sync windows, with the spans of all components."""

    @property
    def rollouts(self) -> int:
        """Number of training responses generated, including discarded and re-evaluated ones."""
        return sum(step.rollouts for step in self.steps)


def read_history(buffer: BufferClient) -> RunHistory:
    """Reads the history of the client's run.

    Raises `BapoError` when it has no step or no evaluation yet.
    """
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
        sets=buffer.evaluation_sets(),
        migration=migrations[-1],
        unlocked_over_time=[migration.unlocked_fraction for migration in migrations],
        unlocked_training_prompts=_unlocked(buffer),
        sync_windows=read_sync_windows(buffer, state.config, steps[-1].step),
    )


def _unlocked(buffer: BufferClient) -> tuple[int, int]:
    unlocked = unsolved = 0
    for prompt in buffer.all_prompts():
        if prompt.first_mean == 0:
            unsolved += 1
            unlocked += prompt.best_mean > 0
    return unlocked, unsolved


def summarise(history: RunHistory, wall_seconds: float | None = None) -> dict[str, Any]:
    """Returns the contents of `summary.json`.

    wall_seconds: wall time of the run, where it is known.
    """
    unlocked, unsolved = history.unlocked_training_prompts
    seconds: dict[str, float] = {}
    for step in history.steps:
        for name, value in step.metrics.items():
            if name.startswith("seconds/"):
                phase = name.removeprefix("seconds/")
                seconds[phase] = seconds.get(phase, 0.0) + value
    if wall_seconds is not None:
        seconds["wall"] = wall_seconds
    origin = history.state.forked_from
    return {
        "run": history.state.name,
        "algorithm": history.config.algorithm,
        "seed": history.config.seed,
        "steps": len(history.steps),
        "forked_from": None if origin is None else origin.model_dump(mode="json"),
        "changes": [
            change.model_dump(mode="json", include={"first_step", "old", "new", "at"})
            for change in history.state.changes
        ],
        "rollouts": history.rollouts,
        "evaluation": {
            "initial": _evaluation(history.evaluations[0]),
            "final": _evaluation(history.evaluations[-1]),
        },
        "evaluation_sets": {
            view.name: {
                "initial": _evaluation(view.evaluations[0]),
                "final": _evaluation(view.evaluations[-1]),
            }
            for view in history.sets
            if view.evaluations
        },
        "unlocked_fraction": history.migration.unlocked_fraction,
        "unlocked_training_prompts": {"unlocked": unlocked, "initially_unsolved": unsolved},
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
        "trainer_idle": _idle(history.sync_windows),
        "tokens": {
            "generated": sum(step.tokens for step in history.steps),
            "trained": int(sum(step.metrics.get("trained_tokens", 0) for step in history.steps)),
            "evaluation": sum(
                evaluation.tokens for view in history.sets for evaluation in view.evaluations
            ),
        },
    }


def _idle(windows: Sequence[SyncWindow]) -> dict[str, float] | None:
    """Returns the share of the windows' wall time for which the trainer waited for rollouts, and
    the share that it cannot avoid: the first rollouts after a sync. None without windows."""
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
        "mean_reward": evaluation.mean_reward,
        "bins": evaluation.bins,
        "prompts": evaluation.prompts,
        "scores": [score.model_dump() for score in evaluation.scores],
    }
