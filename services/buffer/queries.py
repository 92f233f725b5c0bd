"""What people ask of a run: steps, evaluations, difficulty, buffers, trajectories."""

from __future__ import annotations

from collections import defaultdict

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from bapo_core.metrics import accuracy_bins, migration_matrix, unlocked_fraction
from services.buffer import wire
from services.buffer.runs import run_config
from services.buffer.tables import (
    BufferEntry,
    PromptDifficulty,
    PromptRow,
    RolloutGroup,
    Run,
    StepRecord,
)
from services.buffer.trajectories import TrajectoryGroup
from services.common.errors import not_found


def steps(session: Session, run: Run, after: int, limit: int) -> list[wire.StepView]:
    """Committed steps after `after`, in order."""
    records = list(
        session.scalars(
            select(StepRecord)
            .where(
                StepRecord.run_id == run.id,
                StepRecord.step > after,
                StepRecord.committed_at.is_not(None),
            )
            .order_by(StepRecord.step)
            .limit(limit)
        )
    )
    if not records:
        return []
    size = run_config(run).rollout.group_size
    counts = session.execute(
        select(RolloutGroup.step, RolloutGroup.correct, func.count())
        .where(
            RolloutGroup.run_id == run.id,
            RolloutGroup.kind == "fresh",
            RolloutGroup.step.between(records[0].step, records[-1].step),
        )
        .group_by(RolloutGroup.step, RolloutGroup.correct)
    )
    bins: dict[int, list[int]] = defaultdict(lambda: [0] * (size + 1))
    for step, correct, count in counts:
        bins[step][correct] = count
    return [
        wire.StepView(
            step=record.step,
            r_tot=record.r_tot,
            c2=record.c2,
            c3=record.c3,
            counts=record.counts,
            rollouts=record.rollouts,
            tokens=record.tokens,
            metrics=record.metrics or {},
            bins=bins[record.step],
            committed_at=record.committed_at,
        )
        for record in records
        if record.committed_at is not None
    ]


def evaluations(session: Session, run: Run) -> list[wire.Evaluation]:
    """Every complete evaluation, by policy version."""
    config = run_config(run)
    rows = session.execute(
        select(RolloutGroup.step, RolloutGroup.correct, RolloutGroup.token_count).where(
            RolloutGroup.run_id == run.id, RolloutGroup.kind == "evaluation"
        )
    )
    corrects: dict[int, list[int]] = defaultdict(list)
    tokens: dict[int, int] = defaultdict(int)
    for step, correct, token_count in rows:
        corrects[step].append(correct)
        tokens[step] += token_count
    wanted = session.scalar(
        select(func.count()).select_from(PromptRow).where(PromptRow.dataset == run.test_dataset)
    )
    size = config.evaluation_samples
    return [
        wire.Evaluation(
            version=step,
            mean_accuracy=sum(found) / (len(found) * size),
            bins=accuracy_bins(found, size),
            prompts=len(found),
            tokens=tokens[step],
        )
        for step, found in sorted(corrects.items())
        if len(found) == wanted
    ]


def migration(session: Session, run: Run, before: int, after: int) -> wire.Migration:
    """How the held-out prompts moved between bins from one evaluated version to another."""
    size = run_config(run).evaluation_samples
    first, second = (_evaluated(session, run, version) for version in (before, after))
    return wire.Migration(
        before=before,
        after=after,
        matrix=migration_matrix(first, second, size),
        unlocked_fraction=unlocked_fraction(first, second),
    )


def _evaluated(session: Session, run: Run, version: int) -> dict[str, int]:
    rows = session.execute(
        select(PromptRow.uid, RolloutGroup.correct)
        .join(PromptRow, PromptRow.id == RolloutGroup.prompt_id)
        .where(
            RolloutGroup.run_id == run.id,
            RolloutGroup.kind == "evaluation",
            RolloutGroup.step == version,
        )
    )
    found = {uid: correct for uid, correct in rows}
    if not found:
        raise not_found(f"evaluation of version {version} in run {run.name!r}")
    return found


def difficulty_bins(session: Session, run: Run) -> list[int]:
    """Training prompts by k of G correct at their last attempt."""
    size = run_config(run).rollout.group_size
    bins = [0] * (size + 1)
    rows = session.execute(
        select(PromptDifficulty.bin, func.count())
        .where(PromptDifficulty.run_id == run.id)
        .group_by(PromptDifficulty.bin)
    )
    for correct, count in rows:
        bins[correct] = count
    return bins


def difficulty(
    session: Session, run: Run, bin_: int | None, after: str, limit: int
) -> wire.DifficultyPage:
    """Training prompts and their history, by uid."""
    statement = (
        select(PromptDifficulty, PromptRow)
        .join(PromptRow, PromptRow.id == PromptDifficulty.prompt_id)
        .where(PromptDifficulty.run_id == run.id, PromptRow.uid > after)
        .order_by(PromptRow.uid)
        .limit(limit + 1)
    )
    if bin_ is not None:
        statement = statement.where(PromptDifficulty.bin == bin_)
    rows = list(session.execute(statement))
    views = [
        wire.DifficultyView(
            uid=prompt.uid,
            payload=prompt.payload,
            attempts=row.attempts,
            first_mean=row.first_mean,
            last_mean=row.last_mean,
            best_mean=row.best_mean,
            first_solved_step=row.first_solved_step,
            last_step=row.last_step,
            bin=row.bin,
        )
        for row, prompt in rows[:limit]
    ]
    return wire.DifficultyPage(
        prompts=views, next_after=views[-1].uid if len(rows) > limit else None
    )


def buffer_items(
    session: Session, run: Run, buffer: wire.Buffer, step: int | None
) -> list[wire.BufferItem]:
    """A buffer after the commit of `step` (default: now), oldest first."""
    step = run.current_step if step is None else step
    rows = session.execute(
        select(BufferEntry, RolloutGroup.step, PromptRow.uid)
        .join(RolloutGroup, RolloutGroup.id == BufferEntry.group_id)
        .join(PromptRow, PromptRow.id == RolloutGroup.prompt_id)
        .where(
            BufferEntry.run_id == run.id,
            BufferEntry.buffer == buffer,
            BufferEntry.inserted_step <= step,
            BufferEntry.evicted_step.is_(None) | (BufferEntry.evicted_step > step),
        )
        .order_by(BufferEntry.id)
    )
    return [
        wire.BufferItem(
            group_id=entry.group_id,
            prompt_uid=uid,
            step=group_step,
            mean_reward=entry.mean_reward,
            inserted_step=entry.inserted_step,
            evicted_step=entry.evicted_step,
            eviction_reason=entry.eviction_reason,
        )
        for entry, group_step, uid in rows
    ]


def find_group(session: Session, run: Run, group_id: int) -> tuple[RolloutGroup, PromptRow]:
    found = session.execute(
        select(RolloutGroup, PromptRow)
        .join(PromptRow, PromptRow.id == RolloutGroup.prompt_id)
        .where(RolloutGroup.run_id == run.id, RolloutGroup.id == group_id)
    ).first()
    if found is None:
        raise not_found(f"group {group_id} in run {run.name!r}")
    return found[0], found[1]


def group_view(
    group: RolloutGroup, prompt: PromptRow, trajectory: TrajectoryGroup
) -> wire.GroupView:
    return wire.GroupView(
        group_id=group.id,
        prompt_uid=prompt.uid,
        payload=prompt.payload,
        step=group.step,
        kind=group.kind,
        policy_version=group.policy_version,
        mean_reward=group.mean_reward,
        responses=[
            {
                "text": response.text,
                "reward": response.reward,
                "finish_reason": response.finish_reason,
                "token_ids": response.token_ids,
                "logprobs": response.logprobs,
            }
            for response in trajectory.responses
        ],
    )
