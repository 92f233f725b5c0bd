"""Spans: what the components of a run did and when, on the database's clock."""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy import func, select
from sqlalchemy.dialects.postgresql import insert

from services.buffer.api import wire
from services.buffer.storage.tables import Run, SpanRow
from services.common.problems import bad_request

MAX_SPANS = 20_000
"""Most spans in one answer."""


def record_spans(run: Run, batch: wire.SpanBatch) -> None:
    """Records the spans of one component, each once, however often it is sent.

    Times are placed on the database's clock, because the clocks of machines differ.
    """
    now = run.session.scalar(select(func.now()))
    assert now is not None
    rows = []
    for span in batch.spans:
        ended_at = now - timedelta(seconds=span.ended_ago_s)
        rows.append(
            {
                "run_id": run.id,
                "key": span.key,
                "component": batch.component,
                "name": span.name,
                "step": span.step,
                "started_at": ended_at - timedelta(seconds=span.seconds),
                "ended_at": ended_at,
            }
        )
    if rows:
        run.session.execute(insert(SpanRow).on_conflict_do_nothing(), rows)


def list_spans(run: Run, first: int, last: int) -> list[wire.SpanView]:
    """Returns the spans of all components while the trainer was at steps `first` to `last`.

    Raises 400 if there are more than `MAX_SPANS`.
    """
    begin, end = run.session.execute(
        select(func.min(SpanRow.started_at), func.max(SpanRow.ended_at)).where(
            SpanRow.run_id == run.id,
            SpanRow.component == "trainer",
            SpanRow.step.between(first, last),
        )
    ).one()
    if begin is None:
        return []
    rows = run.session.scalars(
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
            f"steps {first} to {last} have more than {MAX_SPANS:,} spans; ask for fewer steps"
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
