"""Comparison of runs: their curves over what they cost, and how their configurations differ."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Float, func, select
from sqlalchemy.dialects.postgresql import JSONB

from bapo_core.config import flatten
from services.buffer.api import wire
from services.buffer.queries.committed_steps import sampled_steps
from services.buffer.queries.difficulty import bins_at
from services.buffer.queries.evaluations import list_evaluations
from services.buffer.storage.tables import Run, StepRecord


def compare_runs(runs: Sequence[Run], points: int) -> wire.RunComparison:
    """Returns the curves of runs, of at most `points` steps each, and differing configuration."""
    configs = [flatten(run.values) for run in runs]
    keys = sorted(set().union(*configs) - {"name"})
    values = {key: [config.get(key) for config in configs] for key in keys}
    return wire.RunComparison(
        runs=[_compared(run, points) for run in runs],
        differing_config={
            key: found for key, found in values.items() if any(v != found[0] for v in found)
        },
    )


def _compared(run: Run, points: int) -> wire.ComparedRun:
    evaluations = list_evaluations(run)
    sampled = set(sampled_steps(run, 0, points))
    evaluated = {evaluation.version - 1 for evaluation in evaluations}
    fresh = _fresh_accuracy(run, sampled | evaluated)
    # Version v holds the weights after v - 1 steps.
    costs = {point.step: _cost(point) for point in fresh}
    return wire.ComparedRun(
        run=run.name,
        step=run.current_step,
        cost=costs.get(run.current_step, wire.Cost()),
        fresh=[point for point in fresh if point.step in sampled],
        evaluations=[
            wire.AccuracyPoint(
                version=evaluation.version,
                mean_accuracy=evaluation.mean_accuracy,
                **costs.get(evaluation.version - 1, wire.Cost()).model_dump(),
            )
            for evaluation in evaluations
        ],
        difficulty=bins_at(run, run.current_step),
    )


def _cost(point: wire.FreshAccuracyPoint) -> wire.Cost:
    return wire.Cost(rollouts=point.rollouts, tokens=point.tokens, seconds=point.seconds)


def _fresh_accuracy(run: Run, steps: set[int]) -> list[wire.FreshAccuracyPoint]:
    """Returns the fresh accuracy of each of these steps, with the sums over all steps up to it."""
    metric = func.jsonb_each_text(StepRecord.metrics.cast(JSONB)).table_valued("key", "value")
    phases = (
        select(func.coalesce(func.sum(metric.c.value.cast(Float)), 0.0))
        .where(metric.c.key.like("seconds/%"))
        .scalar_subquery()
    )
    totals = (
        select(
            StepRecord.step,
            StepRecord.bins,
            func.sum(StepRecord.rollouts).over(order_by=StepRecord.step).label("rollouts"),
            func.sum(StepRecord.tokens).over(order_by=StepRecord.step).label("tokens"),
            func.sum(phases).over(order_by=StepRecord.step).label("seconds"),
        )
        .where(StepRecord.run_id == run.id, StepRecord.committed_at.is_not(None))
        .subquery()
    )
    statement = select(totals).where(totals.c.step.in_(steps)).order_by(totals.c.step)
    return [
        wire.FreshAccuracyPoint(
            step=row.step,
            accuracy=wire.accuracy(row.bins),
            rollouts=int(row.rollouts),
            tokens=int(row.tokens),
            seconds=float(row.seconds),
        )
        for row in run.session.execute(statement)
    ]
