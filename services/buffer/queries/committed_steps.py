"""Committed steps of a run: thresholds, composition of the batch, metrics."""

from __future__ import annotations

from sqlalchemy import Select, select

from services.buffer.api import wire
from services.buffer.storage.lineage import of_run
from services.buffer.storage.tables import Run, StepRecord


def list_steps(run: Run, after: int, limit: int) -> list[wire.StepView]:
    """Returns at most `limit` committed steps after `after`, in order."""
    statement = _committed(run).where(StepRecord.step > after).order_by(StepRecord.step)
    return [_step_view(record) for record in run.session.scalars(statement.limit(limit))]


def sample_steps(run: Run, after: int, points: int) -> list[wire.StepView]:
    """Returns at most `points` committed steps after `after`, evenly spaced, with the last one."""
    sampled = sampled_steps(run, after, points)
    statement = _committed(run).where(StepRecord.step.in_(sampled)).order_by(StepRecord.step)
    return [_step_view(record) for record in run.session.scalars(statement)]


def sampled_steps(run: Run, after: int, points: int) -> range:
    """Returns at most `points` committed steps after `after`, evenly spaced, with the last one."""
    stride = max(1, -(-(run.current_step - after) // points))
    return range(run.current_step, max(after, 0), -stride)


def _committed(run: Run) -> Select[StepRecord]:
    return select(StepRecord).where(
        of_run(run, StepRecord.run_id, StepRecord.step), StepRecord.committed_at.is_not(None)
    )


def _step_view(record: StepRecord) -> wire.StepView:
    assert record.committed_at is not None
    return wire.StepView(
        step=record.step,
        r_tot=record.r_tot,
        c2=record.c2,
        c3=record.c3,
        counts=record.counts,
        rollouts=record.rollouts,
        tokens=record.tokens,
        metrics=record.metrics or {},
        bins=record.bins,
        mean_reward=record.mean_reward,
        reward_parts=record.reward_parts,
        committed_at=record.committed_at,
        digests=record.digests and wire.ChainLink.model_validate(record.digests),
    )
