"""What people ask of a run: steps, evaluations, buffers, batches, groups, artifacts."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Select, and_, func, literal, select, union_all
from sqlalchemy.orm import Session

from bapo_core.metrics import migration_matrix, unlocked_fraction
from services.buffer.api import wire
from services.buffer.api.trajectories import TrajectoryGroup
from services.buffer.difficulty import bins_at, check_committed
from services.buffer.pages import after_cursor, page_of
from services.buffer.runs import run_config
from services.buffer.steps import in_buffer
from services.buffer.tables import (
    BufferEntry,
    Checkpoint,
    EvaluationRecord,
    PromptRow,
    Replica,
    RolloutGroup,
    Run,
    SpanRow,
    StepRecord,
    WeightVersion,
)
from services.common.errors import bad_request, not_found

# ---- steps --------------------------------------------------------------------------------------


def steps(session: Session, run: Run, after: int, limit: int) -> list[wire.StepView]:
    """Committed steps after `after`, in order."""
    statement = _committed(run).where(StepRecord.step > after).order_by(StepRecord.step)
    return [_step_view(record) for record in session.scalars(statement.limit(limit))]


def sampled_steps(session: Session, run: Run, after: int, points: int) -> list[wire.StepView]:
    """At most `points` committed steps after `after`, evenly apart, the last one among them."""
    stride = max(1, -(-(run.current_step - after) // points))
    chosen = range(run.current_step, max(after, 0), -stride)
    statement = _committed(run).where(StepRecord.step.in_(chosen)).order_by(StepRecord.step)
    return [_step_view(record) for record in session.scalars(statement)]


def _committed(run: Run) -> Select[StepRecord]:
    return select(StepRecord).where(
        StepRecord.run_id == run.id, StepRecord.committed_at.is_not(None)
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
        committed_at=record.committed_at,
    )


def batches(
    session: Session, run: Run, cursor: str | None, limit: int
) -> wire.Page[wire.BatchSummary]:
    """The composition of every batch, in order."""
    statement = select(StepRecord).where(StepRecord.run_id == run.id)
    order = (StepRecord.step.expression,)
    rows = list(session.scalars(after_cursor(statement, order, "step", cursor, limit)))
    return page_of(
        rows,
        limit,
        "step",
        lambda row: (row.step,),
        lambda row: wire.BatchSummary(
            step=row.step, counts=row.counts, c2=row.c2, c3=row.c3, r_tot=row.r_tot
        ),
    )


# ---- evaluations --------------------------------------------------------------------------------


def evaluations(session: Session, run: Run) -> list[wire.Evaluation]:
    """Every complete evaluation, by policy version."""
    rows = session.scalars(
        select(EvaluationRecord)
        .where(EvaluationRecord.run_id == run.id)
        .order_by(EvaluationRecord.version)
    )
    return [
        wire.Evaluation(
            version=row.version,
            mean_accuracy=row.mean_accuracy,
            bins=row.bins,
            prompts=row.prompts,
            tokens=row.tokens,
        )
        for row in rows
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
    if session.get(EvaluationRecord, (run.id, version)) is None:
        raise not_found(f"complete evaluation of version {version} in run {run.name!r}")
    rows = session.execute(
        select(PromptRow.uid, RolloutGroup.correct)
        .join(PromptRow, PromptRow.id == RolloutGroup.prompt_id)
        .where(
            RolloutGroup.run_id == run.id,
            RolloutGroup.kind == "evaluation",
            RolloutGroup.step == version,
        )
    )
    return {uid: correct for uid, correct in rows}


# ---- buffers ------------------------------------------------------------------------------------


def buffer_items(
    session: Session,
    run: Run,
    buffer: wire.BufferName,
    step: int | None,
    cursor: str | None,
    limit: int,
) -> wire.Page[wire.BufferItem]:
    """A buffer after the commit of `step` (default: now), in the order of admission."""
    if step is None:
        step = run.current_step
    check_committed(run, step, "step")
    statement = (
        select(BufferEntry, RolloutGroup, PromptRow.uid)
        .join(RolloutGroup, RolloutGroup.id == BufferEntry.group_id)
        .join(PromptRow, PromptRow.id == RolloutGroup.prompt_id)
        .where(in_buffer(run, buffer, step))
    )
    order = (BufferEntry.id.expression,)
    rows = session.execute(after_cursor(statement, order, "id", cursor, limit)).all()
    return page_of(
        rows,
        limit,
        "id",
        lambda row: (row[0].id,),
        lambda row: _buffer_item(row[0], row[1], row[2], step),
    )


def _buffer_item(entry: BufferEntry, group: RolloutGroup, uid: str, step: int) -> wire.BufferItem:
    return wire.BufferItem(
        group_id=entry.group_id,
        prompt_uid=uid,
        step=group.step,
        policy_version=group.policy_version,
        age=step - group.step,
        staleness=step - group.policy_version,
        mean_reward=entry.mean_reward,
        inserted_step=entry.inserted_step,
        evicted_step=entry.evicted_step,
        eviction_reason=entry.eviction_reason,
    )


def buffer_events(
    session: Session,
    run: Run,
    buffer: wire.BufferName,
    after: int,
    cursor: str | None,
    limit: int,
) -> wire.Page[wire.BufferEvent]:
    """Admissions and evictions after step `after`, by step; within one, evictions come first."""
    own = (BufferEntry.run_id == run.id, BufferEntry.buffer == buffer)

    def half(what: str, step: Any) -> Select[Any]:
        columns = (
            step.label("step"),
            literal(what).label("event"),
            BufferEntry.id.label("id"),
            BufferEntry.eviction_reason.label("reason"),
            BufferEntry.group_id.label("group_id"),
            BufferEntry.mean_reward.label("mean_reward"),
        )
        found = select(*columns).where(*own, step > after)
        # Each half in its index's order, and no longer than the page: cheap at any length of run.
        part = after_cursor(
            found,
            (step, literal(-1 if what == "evicted" else 1), BufferEntry.id.expression),
            "event",
            cursor,
            limit,
        ).subquery()
        return select(part)

    both = union_all(
        half("evicted", BufferEntry.evicted_step), half("admitted", BufferEntry.inserted_step)
    ).subquery()
    rows = session.execute(
        select(both, PromptRow.uid)
        .join(RolloutGroup, RolloutGroup.id == both.c.group_id)
        .join(PromptRow, PromptRow.id == RolloutGroup.prompt_id)
        .order_by(both.c.step, both.c.event.desc(), both.c.id)
        .limit(limit + 1)
    ).all()
    return page_of(
        rows,
        limit,
        "event",
        lambda row: (row.step, -1 if row.event == "evicted" else 1, row.id),
        lambda row: wire.BufferEvent(
            step=row.step,
            event=row.event,
            reason=row.reason if row.event == "evicted" else _ADMITTED[buffer],
            group_id=row.group_id,
            prompt_uid=row.uid,
            mean_reward=row.mean_reward,
        ),
    )


_ADMITTED: dict[wire.BufferName, str] = {
    "hard": "mean reward at most c1",
    "high_quality": "mean reward in [c2, c3] of its step",
}


# ---- groups -------------------------------------------------------------------------------------


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
        prompt_token_ids=trajectory.prompt_token_ids,
        responses=[
            wire.ResponseView(
                text=response.text,
                reward=response.reward,
                finish_reason=response.finish_reason,
                token_ids=response.token_ids,
                logprobs=response.logprobs,
            )
            for response in trajectory.responses
        ],
    )


# ---- artifacts ----------------------------------------------------------------------------------


def weights(session: Session, run: Run) -> list[wire.WeightView]:
    """Every version ever published, newest first; what is pruned is only remembered."""
    rows = session.scalars(
        select(WeightVersion)
        .where(WeightVersion.run_id == run.id)
        .order_by(WeightVersion.version.desc())
        .limit(1000)
    )
    return [
        wire.WeightView(
            version=row.version,
            uri=row.uri,
            manifest_digest=row.manifest_digest,
            status=row.status,
            created_at=row.created_at,
        )
        for row in rows
    ]


def checkpoints(session: Session, run: Run) -> list[wire.CheckpointView]:
    evaluated = and_(
        EvaluationRecord.run_id == Checkpoint.run_id,
        EvaluationRecord.version == Checkpoint.step + 1,
    )
    rows = session.execute(
        select(Checkpoint, EvaluationRecord.mean_accuracy)
        .outerjoin(EvaluationRecord, evaluated)
        .where(Checkpoint.run_id == run.id)
        .order_by(Checkpoint.step.desc())
    )
    return [
        wire.CheckpointView(
            step=row.step,
            uri=row.uri,
            manifest_digest=row.manifest_digest,
            created_at=row.created_at,
            accuracy=accuracy,
        )
        for row, accuracy in rows.tuples()
    ]


def replicas(session: Session, run: Run) -> list[wire.ReplicaView]:
    # The database's clock on both sides: those of other machines may differ.
    now = session.scalar(select(func.now()))
    assert now is not None
    rows = session.scalars(select(Replica).where(Replica.run_id == run.id).order_by(Replica.name))
    return [
        wire.ReplicaView(
            name=row.name,
            url=row.url,
            state=row.state,
            detail=row.detail,
            loaded_version=row.loaded_version,
            manifest_digest=row.manifest_digest,
            prompts_per_request=row.prompts_per_request,
            last_seen=row.last_seen,
            silent_s=max(0.0, (now - row.last_seen).total_seconds()),
        )
        for row in rows
    ]


MAX_SPANS = 20_000


def spans(session: Session, run: Run, first: int, last: int) -> list[wire.SpanView]:
    """What all parts did while the trainer was at the steps from `first` to `last`."""
    begin, end = session.execute(
        select(func.min(SpanRow.started_at), func.max(SpanRow.ended_at)).where(
            SpanRow.run_id == run.id,
            SpanRow.component == "trainer",
            SpanRow.step.between(first, last),
        )
    ).one()
    if begin is None:
        return []
    rows = session.scalars(
        select(SpanRow)
        .where(
            SpanRow.run_id == run.id,
            SpanRow.ended_at >= begin,
            SpanRow.started_at <= end,
        )
        .order_by(SpanRow.started_at, SpanRow.key)
        .limit(MAX_SPANS + 1)
    ).all()
    if len(rows) > MAX_SPANS:
        raise bad_request(
            f"steps {first} to {last} have more than {MAX_SPANS:,} spans; ask for fewer"
        )
    return [
        wire.SpanView(
            component=row.component,
            name=row.name,
            step=row.step,
            started_at=row.started_at,
            ended_at=row.ended_at,
        )
        for row in rows
    ]


# ---- two runs -----------------------------------------------------------------------------------


def compare(session: Session, first: Run, second: Run) -> wire.RunComparison:
    """Two runs side by side: what was set differently, and what came of it."""
    pair = (first, second)
    accuracy = [
        {each.version: each.mean_accuracy for each in evaluations(session, run)} for run in pair
    ]
    totals = [_totals(session, run) for run in pair]
    bins = [bins_at(session, run, run.current_step) for run in pair]
    flat = [_flat(run.config) for run in pair]
    return wire.RunComparison(
        runs=(first.name, second.name),
        differing_config={
            key: (flat[0].get(key), flat[1].get(key))
            for key in sorted(flat[0].keys() | flat[1].keys())
            if flat[0].get(key) != flat[1].get(key)
        },
        steps=(first.current_step, second.current_step),
        rollouts=(totals[0][0], totals[1][0]),
        tokens=(totals[0][1], totals[1][1]),
        difficulty=(bins[0], bins[1]),
        evaluations=[
            (version, accuracy[0].get(version), accuracy[1].get(version))
            for version in sorted(accuracy[0].keys() | accuracy[1].keys())
        ],
    )


def _totals(session: Session, run: Run) -> tuple[int, int]:
    """(responses, tokens) generated for training by the committed steps."""
    rollouts, tokens = session.execute(
        select(
            func.coalesce(func.sum(StepRecord.rollouts), 0),
            func.coalesce(func.sum(StepRecord.tokens), 0),
        ).where(StepRecord.run_id == run.id, StepRecord.step <= run.current_step)
    ).one()
    return int(rollouts), int(tokens)


def _flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
