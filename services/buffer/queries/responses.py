"""Lists and searches what the model wrote, in the stored trajectories of a range of steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from sqlalchemy import ColumnElement, and_, func, select

from bapo_core.outcomes import Outcome
from services.buffer.api import wire
from services.buffer.queries.evaluations import resolve_set
from services.buffer.queries.exports import rows_of_groups
from services.buffer.runs import runs
from services.buffer.service import Service
from services.buffer.storage.lineage import of_run
from services.buffer.storage.pages import after_cursor, decode_cursor, encode_cursor
from services.buffer.storage.stored_groups import LOCATION_COLUMNS
from services.buffer.storage.tables import PromptRow, RolloutGroup, Run
from services.common.problems import bad_request

MOST_GROUPS = 256
"""Most groups whose trajectories are read for one page, so that a search for rare words is many
short requests."""
ORDER = "responses"
# A cursor is the number of rows that were read of a group. The group is on the next page, too, as
# long as it has more rows.
_KEY = (
    RolloutGroup.step.expression,
    RolloutGroup.id.expression,
    RolloutGroup.row_count.expression,
)


@dataclass(frozen=True, slots=True)
class Filter:
    """Selects responses to list. A field that is None does not restrict the list."""

    evaluation_set: str | None = None
    """Responses to this set; None selects those to training prompts."""
    first: int | None = None
    """First step, or policy version of an evaluation; None is `last`."""
    last: int | None = None
    """Last step, or policy version of an evaluation; None is the newest that has groups."""
    correct: bool | None = None
    contains: str | None = None
    """Part of the text, in any case."""


class _Group(NamedTuple):
    member: wire.ManifestMember
    payload: dict[str, Any]


def list_responses(
    service: Service, name: str, filter_: Filter, cursor: str | None, limit: int
) -> wire.Page[wire.ListedResponse]:
    """Returns a page of the responses that pass the filter, by step and group.

    A page reads at most `MOST_GROUPS` groups, so it may hold fewer responses than `limit`, or
    none, although a page follows.

    Raises 404 for an evaluation set that the run does not have, and 400 for a range that ends
    before it begins.
    """
    with service.sessions() as session:
        groups = _select_groups(runs.get_run(session, name), filter_, cursor)
    skipped = 0 if cursor is None else _skipped(groups, cursor)
    page: list[wire.ListedResponse] = []
    read = groups[:MOST_GROUPS]
    with closing(rows_of_groups(service.store, [group.member for group in read])) as tables:
        for group, rows in zip(read, tables, strict=True):
            for index in _matching(rows, filter_, skipped):
                if len(page) == limit:
                    key = (page[-1].step, page[-1].group_id, page[-1].index + 1)
                    return wire.Page(items=page, next=encode_cursor(ORDER, key))
                page.append(_view(group, rows, index))
            skipped = 0
    if len(groups) <= MOST_GROUPS:
        return wire.Page(items=page)
    last = read[-1].member
    return wire.Page(
        items=page, next=encode_cursor(ORDER, (last.step, last.group_id, last.row_count))
    )


def _select_groups(run: Run, filter_: Filter, cursor: str | None) -> list[_Group]:
    """Returns the groups after the cursor that may have such responses, and one more than a page
    reads if there are more."""
    kinds = _of_kind(run, filter_.evaluation_set)
    first, last = _range(run, filter_, kinds, cursor)
    statement = (
        select(RolloutGroup.kind.label("source"), *LOCATION_COLUMNS, PromptRow.payload)
        .join(PromptRow, PromptRow.id == RolloutGroup.prompt_id)
        .where(
            of_run(run, RolloutGroup.run_id, RolloutGroup.step),
            kinds,
            RolloutGroup.step.between(first, last),
        )
    )
    if filter_.correct is not None:
        has_such = RolloutGroup.correct > 0
        if not filter_.correct:
            has_such = RolloutGroup.correct < RolloutGroup.size
        statement = statement.where(has_such)
    rows = run.session.execute(after_cursor(statement, _KEY, ORDER, cursor, MOST_GROUPS))
    groups = []
    for row in rows:
        columns = dict(row._mapping)
        payload = columns.pop("payload")
        groups.append(_Group(wire.ManifestMember(**columns), payload))
    return groups


def _of_kind(run: Run, evaluation_set: str | None) -> ColumnElement[bool]:
    if evaluation_set is None:
        return RolloutGroup.kind != "evaluation"
    name, _ = resolve_set(run, evaluation_set)
    return and_(RolloutGroup.kind == "evaluation", PromptRow.dataset == run.test_datasets[name])


def _range(
    run: Run, filter_: Filter, kinds: ColumnElement[bool], cursor: str | None
) -> tuple[int, int]:
    """Returns the first and the last step, or policy version, of the list."""
    last = filter_.last
    if last is None and filter_.first is None and cursor is not None:
        # The newest step when the list began, while the run goes on.
        last = decode_cursor(cursor, ORDER, _KEY)[0]
    if last is None:
        newest = (
            select(func.max(RolloutGroup.step))
            .join(PromptRow, PromptRow.id == RolloutGroup.prompt_id)
            .where(of_run(run, RolloutGroup.run_id, RolloutGroup.step), kinds)
        )
        last = run.session.scalar(newest) or 0
    first = last if filter_.first is None else filter_.first
    if filter_.last is not None and first > last:
        raise bad_request(f"first: {first} is after last: {last}; swap them")
    return first, last


def _skipped(groups: list[_Group], cursor: str) -> int:
    """Returns how many rows of the first group the page before has read."""
    _, group_id, rows = decode_cursor(cursor, ORDER, _KEY)
    return int(rows) if groups and groups[0].member.group_id == group_id else 0


def _matching(rows: pa.Table, filter_: Filter, skipped: int) -> Iterator[int]:
    """Yields the indexes of the rows that pass the filter, without the first `skipped` ones."""
    mask = pc.greater_equal(rows["response_index"], skipped)
    if filter_.correct is not None:
        mask = pc.and_(mask, pc.equal(rows["correct"], filter_.correct))
    if filter_.contains is not None:
        mask = pc.and_(mask, pc.match_substring(rows["text"], filter_.contains, ignore_case=True))
    for index, matches in enumerate(mask.to_pylist()):
        if matches:
            yield index


def _view(group: _Group, rows: pa.Table, index: int) -> wire.ListedResponse:
    member = group.member
    row = rows.slice(index, 1).drop_columns(["logprobs", "prompt_token_ids"]).to_pylist()[0]
    return wire.ListedResponse(
        text=row["text"],
        reward=row["reward"],
        correct=row["correct"],
        reward_parts=dict(row["reward_parts"]),
        finish_reason=row["finish_reason"],
        outcome=Outcome(row["outcome"]),
        status=row["status"],
        extracted=row["extracted"],
        failure=row["failure"],
        group_id=member.group_id,
        index=index,
        prompt_uid=member.prompt_uid,
        payload=group.payload,
        kind=member.source,
        step=member.step,
        policy_version=member.policy_version,
        tokens=len(row["token_ids"]),
    )
