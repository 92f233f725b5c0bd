"""The hard buffer (B_bad) and the high-quality buffer (B_high) of a run, now and at any step.

An entry is stamped with the steps of its admission and its eviction, so the contents after any
commit can be read without a copy. The rules of admission are `bapo_core.buffers`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Select,
    and_,
    cast,
    func,
    insert,
    literal,
    or_,
    select,
    union_all,
    update,
)

from bapo_core.buffers import BufferChange
from bapo_core.types import GroupSummary
from services.buffer.api import wire
from services.buffer.queries.difficulty import check_committed
from services.buffer.storage.bulk import insert_columns
from services.buffer.storage.lineage import of_run
from services.buffer.storage.pages import after_cursor, page_of
from services.buffer.storage.stored_groups import SUMMARY_COLUMNS
from services.buffer.storage.tables import BufferEntry, PromptRow, RolloutGroup, Run


def buffer_as_of(run: Run, buffer: wire.BufferName, step: int) -> list[GroupSummary]:
    """Returns the buffer after the commit of `step`, oldest first."""
    rows = run.session.execute(
        select(*SUMMARY_COLUMNS)
        .join(BufferEntry, BufferEntry.group_id == RolloutGroup.id)
        .join(PromptRow, PromptRow.id == RolloutGroup.prompt_id)
        .where(_in_buffer(run, buffer, step))
        # As they were admitted: of a step, fresh groups precede re-evaluated ones.
        .order_by(RolloutGroup.step, RolloutGroup.kind, RolloutGroup.position)
    )
    return [GroupSummary(*row) for row in rows]


def share_entries(run: Run, parent: Run, step: int) -> None:
    """Gives a fork entries of its own for the groups in the buffers of `parent` after `step`, which
    commits of the fork evict without an effect on the parent."""
    columns = (BufferEntry.buffer, BufferEntry.group_id, BufferEntry.accuracy)
    for buffer in get_args(wire.BufferName):
        run.session.execute(
            insert(BufferEntry).from_select(
                ["run_id", "inserted_step", *(column.key for column in columns)],
                select(literal(run.id), BufferEntry.inserted_step, *columns)
                .where(_in_buffer(parent, buffer, step))
                .order_by(BufferEntry.id),
            )
        )


def entries_of_groups(run: Run, group_ids: Sequence[int]) -> list[BufferEntry]:
    """Returns the residencies of groups in the buffers of a run, in the order of admission.

    The entries of a fork stand for those that were in its parent's buffers when it began.
    """
    own, *before = run.lineage
    entries = or_(
        BufferEntry.run_id == own.run_id,
        *(
            and_(
                BufferEntry.run_id == ancestor.run_id,
                BufferEntry.evicted_step <= ancestor.last_step,
            )
            for ancestor in before
        ),
    )
    return list(
        run.session.scalars(
            select(BufferEntry)
            .where(BufferEntry.group_id.in_(group_ids), entries)
            .order_by(BufferEntry.id)
        )
    )


def apply_change(run: Run, buffer: wire.BufferName, step: int, change: BufferChange) -> None:
    """Stamps the admissions and evictions of a commit with its step."""
    insert_columns(
        run.session,
        BufferEntry,
        {"run_id": run.id, "buffer": buffer, "inserted_step": step},
        {
            "group_id": [group.group_id for group in change.admitted],
            "accuracy": [group.accuracy for group in change.admitted],
        },
    )
    group_ids_by_reason: dict[str, list[int]] = {}
    for group, reason in change.evicted:
        group_ids_by_reason.setdefault(reason.value, []).append(group.group_id)
    for reason_name, group_ids in group_ids_by_reason.items():
        run.session.execute(
            update(BufferEntry)
            .where(
                BufferEntry.run_id == run.id,
                BufferEntry.buffer == buffer,
                BufferEntry.group_id.in_(group_ids),
                BufferEntry.evicted_step.is_(None),
            )
            .values(evicted_step=step, eviction_reason=reason_name)
        )


def _in_buffer(run: Run, buffer: wire.BufferName, step: int) -> ColumnElement[bool]:
    """Matches entries admitted by `step` and not evicted by then."""
    run = run.of_step(step)
    if step >= run.current_step:
        # The current contents have a partial index.
        residency = BufferEntry.evicted_step.is_(None)
    else:
        steps = func.int8range(BufferEntry.inserted_step, BufferEntry.evicted_step)
        residency = steps.op("@>")(cast(step, BigInteger))
    return and_(BufferEntry.run_id == run.id, BufferEntry.buffer == buffer, residency)


# ---- listings -----------------------------------------------------------------------------------


def list_entries(
    run: Run,
    buffer: wire.BufferName,
    step: int | None,
    cursor: str | None,
    limit: int,
) -> wire.Page[wire.BufferItem]:
    """Returns a page of a buffer after the commit of `step` (default: now), by admission.

    Raises 400 unless `step` is committed.
    """
    if step is None:
        step = run.current_step
    check_committed(run, step, "step")
    statement = (
        select(BufferEntry, RolloutGroup, PromptRow.uid)
        .join(RolloutGroup, RolloutGroup.id == BufferEntry.group_id)
        .join(PromptRow, PromptRow.id == RolloutGroup.prompt_id)
        .where(_in_buffer(run, buffer, step))
    )
    order = (BufferEntry.id.expression,)
    rows = run.session.execute(after_cursor(statement, order, "id", cursor, limit)).all()
    return page_of(
        rows,
        limit,
        "id",
        lambda row: (row[0].id,),
        lambda row: _buffer_item(row[0], row[1], row[2], step),
    )


def summarise_buffers(run: Run, step: int | None) -> list[wire.BufferSummary]:
    """Returns the sizes of both buffers after the commit of `step` (default: now).

    Raises 400 unless `step` is committed.
    """
    if step is None:
        step = run.current_step
    check_committed(run, step, "step")
    config = run.config_at(step + 1)
    capacities: dict[wire.BufferName, int] = {
        "hard": config.hard_capacity,
        "high_quality": config.high_quality_buffer.capacity,
    }
    return [_summarise(run, buffer, step, capacity) for buffer, capacity in capacities.items()]


def _summarise(run: Run, buffer: wire.BufferName, step: int, capacity: int) -> wire.BufferSummary:
    age, staleness = step - RolloutGroup.step, step - RolloutGroup.policy_version
    numbers = run.session.execute(
        select(
            func.count(),
            func.avg(BufferEntry.accuracy),
            func.avg(age),
            func.max(age),
            func.avg(staleness),
            func.max(staleness),
        )
        .join(RolloutGroup, RolloutGroup.id == BufferEntry.group_id)
        .where(_in_buffer(run, buffer, step))
    ).one()
    entries, mean_accuracy, mean_age, max_age, mean_staleness, max_staleness = numbers
    return wire.BufferSummary(
        buffer=buffer,
        step=step,
        entries=entries,
        capacity=capacity,
        mean_accuracy=mean_accuracy,
        mean_age=mean_age,
        max_age=max_age,
        mean_staleness=mean_staleness,
        max_staleness=max_staleness,
    )


def _buffer_item(entry: BufferEntry, group: RolloutGroup, uid: str, step: int) -> wire.BufferItem:
    return wire.BufferItem(
        group_id=entry.group_id,
        prompt_uid=uid,
        step=group.step,
        policy_version=group.policy_version,
        age=step - group.step,
        staleness=step - group.policy_version,
        accuracy=entry.accuracy,
        inserted_step=entry.inserted_step,
        evicted_step=entry.evicted_step,
        eviction_reason=entry.eviction_reason,
    )


def list_events(
    run: Run,
    buffer: wire.BufferName,
    after: int,
    cursor: str | None,
    limit: int,
) -> wire.Page[wire.BufferEvent]:
    """Returns a page of admissions and evictions after step `after`, by step.

    Within a step, evictions come first.
    """

    def events_of(event: str, step: Any) -> Select[Any]:
        columns = (
            step.label("step"),
            literal(event).label("event"),
            BufferEntry.id.label("id"),
            BufferEntry.eviction_reason.label("reason"),
            BufferEntry.group_id.label("group_id"),
            BufferEntry.accuracy.label("accuracy"),
        )
        statement = select(*columns).where(
            of_run(run, BufferEntry.run_id, step), BufferEntry.buffer == buffer, step > after
        )
        # Each half follows its index and is no longer than a page: its cost does not grow with
        # the run.
        page = after_cursor(
            statement,
            (step, literal(-1 if event == "evicted" else 1), BufferEntry.id.expression),
            "event",
            cursor,
            limit,
        ).subquery()
        return select(page)

    events = union_all(
        events_of("evicted", BufferEntry.evicted_step),
        events_of("admitted", BufferEntry.inserted_step),
    ).subquery()
    rows = run.session.execute(
        select(events, PromptRow.uid)
        .join(RolloutGroup, RolloutGroup.id == events.c.group_id)
        .join(PromptRow, PromptRow.id == RolloutGroup.prompt_id)
        .order_by(events.c.step, events.c.event.desc(), events.c.id)
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
            reason=row.reason if row.event == "evicted" else _ADMISSION_REASON[buffer],
            group_id=row.group_id,
            prompt_uid=row.uid,
            accuracy=row.accuracy,
        ),
    )


_ADMISSION_REASON: dict[wire.BufferName, str] = {
    "hard": "accuracy at most c1",
    "high_quality": "accuracy in the replay window [c2, c3] of its step",
}
