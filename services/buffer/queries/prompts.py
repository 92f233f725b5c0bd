"""Lists and searches the prompts of a run by difficulty, and reads the history of one prompt."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Select, Text, and_, cast, false, select

from services.buffer.api import wire
from services.buffer.steps.buffers import entries_of_groups
from services.buffer.steps.samplers import current_posterior
from services.buffer.storage.lineage import of_run
from services.buffer.storage.pages import Key, after_cursor, page_of
from services.buffer.storage.tables import (
    BatchMemberRow,
    BufferEntry,
    PromptDifficulty,
    PromptRow,
    RolloutGroup,
    Run,
)
from services.common.problems import bad_request, not_found


@dataclass(frozen=True, slots=True)
class Filter:
    """Selects prompts to list. A field that is None does not restrict the list."""

    bin: int | None = None
    """k of G correct at the last attempt."""
    trend: wire.Trend | None = None
    unlocked_after: int | None = None
    """Selects prompts first solved after this step that had begun at 0 of G."""
    unlocked_until: int | None = None
    """Selects prompts first solved by this step that had begun at 0 of G."""
    search: str | None = None
    """Part of the uid or the payload, in any case."""

    @property
    def selects_unlocked(self) -> bool:
        return self.unlocked_after is not None or self.unlocked_until is not None


_DECREASE = PromptDifficulty.first_mean - PromptDifficulty.last_mean
_ORDERS: dict[wire.Order, tuple[ColumnElement[Any], ...]] = {
    "stored": (PromptDifficulty.prompt_id.expression,),
    "hardest": (
        PromptDifficulty.best_mean.expression,
        -PromptDifficulty.attempts,
        PromptDifficulty.prompt_id.expression,
    ),
    "most_improved": (_DECREASE, PromptDifficulty.prompt_id.expression),
    "unlocked": (
        PromptDifficulty.first_solved_step.expression,
        PromptDifficulty.prompt_id.expression,
    ),
}
_TRENDS: dict[wire.Trend, ColumnElement[bool]] = {
    "improving": _DECREASE < 0,
    "worsening": _DECREASE > 0,
    "steady": _DECREASE == 0,
    "forgotten": and_(PromptDifficulty.bin == 0, PromptDifficulty.best_mean > 0),
    "never_solved": PromptDifficulty.best_mean == 0,
}


def list_prompts(
    run: Run,
    filter_: Filter,
    order: wire.Order | None,
    cursor: str | None,
    limit: int,
) -> wire.Page[wire.DifficultyView]:
    """Returns a page of the attempted training prompts that pass the filter.

    The order `unlocked` lists only prompts that began at 0 of G and were solved later, by the step
    of their first solution. It is the default if the filter selects such prompts; otherwise
    `stored` is. Raises 400 if `filter_.bin` is above G.
    """
    if order is None:
        order = "unlocked" if filter_.selects_unlocked else "stored"
    statement = _filtered(run, filter_)
    if order == "unlocked" and not filter_.selects_unlocked:
        statement = statement.where(_unlocked(0, run.current_step))
    rows = run.session.execute(after_cursor(statement, _ORDERS[order], order, cursor, limit)).all()
    return page_of(
        rows,
        limit,
        order,
        lambda row: _order_key(row[0], order),
        lambda row: _difficulty_view(row[0], row[1]),
    )


def _filtered(run: Run, filter_: Filter) -> Select[PromptDifficulty, PromptRow]:
    statement = (
        select(PromptDifficulty, PromptRow)
        .join(PromptRow, PromptRow.id == PromptDifficulty.prompt_id)
        .where(PromptDifficulty.run_id == run.id)
    )
    if filter_.bin is not None:
        size = run.config.rollout.group_size
        if filter_.bin > size:
            raise bad_request(f"bin: {filter_.bin} is not in 0..{size}, the bins of this run")
        statement = statement.where(PromptDifficulty.bin == filter_.bin)
    if filter_.trend is not None:
        statement = statement.where(_TRENDS[filter_.trend])
    if filter_.selects_unlocked:
        first, last = filter_.unlocked_after or 0, filter_.unlocked_until
        statement = statement.where(_unlocked(first, run.current_step if last is None else last))
    if filter_.search is not None:
        statement = statement.where(_matches(filter_.search))
    return statement


def _unlocked(after: int, until: int) -> ColumnElement[bool]:
    """Matches prompts that began at 0 of G and were first solved in steps (after, until]."""
    if until < after:
        return false()
    return and_(
        PromptDifficulty.first_mean == 0,
        PromptDifficulty.first_solved_step > after,
        PromptDifficulty.first_solved_step <= until,
    )


def _matches(text: str) -> ColumnElement[bool]:
    """Matches prompts whose uid or payload contains the text, in any case.

    `ix_prompt_search` indexes this expression and must be changed with it.
    """
    return (PromptRow.uid + " " + cast(PromptRow.payload, Text)).icontains(text, autoescape=True)


def _order_key(row: PromptDifficulty, order: wire.Order) -> Key:
    match order:
        case "stored":
            return (row.prompt_id,)
        case "hardest":
            return (row.best_mean, -row.attempts, row.prompt_id)
        case "most_improved":
            return (row.first_mean - row.last_mean, row.prompt_id)
        case "unlocked":
            assert row.first_solved_step is not None
            return (row.first_solved_step, row.prompt_id)


def _difficulty_view(row: PromptDifficulty, prompt: PromptRow) -> wire.DifficultyView:
    return wire.DifficultyView(
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


def find_prompt(run: Run, uid: str) -> PromptRow:
    """Returns the training or held-out prompt of this uid; raises 404 if the run has none.

    Of a prompt that several evaluation sets have, that of the first dataset by name is returned.
    """
    datasets = [run.train_dataset, *run.test_datasets.values()]
    prompt = run.session.scalar(
        select(PromptRow)
        .where(PromptRow.dataset.in_(datasets), PromptRow.uid == uid)
        .order_by(PromptRow.dataset)
        .limit(1)
    )
    if prompt is None:
        raise not_found(f"prompt {uid!r} in the datasets of run {run.name!r}")
    return prompt


def prompt_history(run: Run, uid: str) -> wire.PromptHistory:
    """Returns every attempt at a prompt and its residencies in the buffers, oldest first.

    Raises 404 if the run has no such prompt.
    """
    prompt = find_prompt(run, uid)
    groups = list(
        run.session.scalars(
            select(RolloutGroup)
            .where(
                of_run(run, RolloutGroup.run_id, RolloutGroup.step),
                RolloutGroup.prompt_id == prompt.id,
            )
            .order_by(RolloutGroup.step, RolloutGroup.kind)
        )
    )
    ids = [group.id for group in groups]
    batches: dict[int, list[int]] = defaultdict(list)
    members = (
        select(BatchMemberRow.group_id, BatchMemberRow.step)
        .where(
            of_run(run, BatchMemberRow.run_id, BatchMemberRow.step),
            BatchMemberRow.group_id.in_(ids),
        )
        .order_by(BatchMemberRow.step)
    )
    for group_id, step in run.session.execute(members):
        batches[group_id].append(step)
    row = run.session.get(PromptDifficulty, (run.id, prompt.id))
    return wire.PromptHistory(
        uid=prompt.uid,
        dataset=prompt.dataset,
        task=prompt.task,
        payload=prompt.payload,
        difficulty=None if row is None else _difficulty_view(row, prompt),
        posterior=current_posterior(run, prompt),
        attempts=[_attempt(group, batches[group.id]) for group in groups],
        stays=[_stay(entry) for entry in entries_of_groups(run, ids)],
    )


def _attempt(group: RolloutGroup, batches: list[int]) -> wire.PromptAttempt:
    return wire.PromptAttempt(
        group_id=group.id,
        step=group.step,
        kind=group.kind,
        policy_version=group.policy_version,
        correct=group.correct,
        size=group.size,
        accuracy=group.accuracy,
        mean_reward=group.mean_reward,
        reward_parts=group.reward_parts,
        tokens=group.token_count,
        batches=batches,
    )


def _stay(entry: BufferEntry) -> wire.Residency:
    return wire.Residency(
        buffer=entry.buffer,
        group_id=entry.group_id,
        accuracy=entry.accuracy,
        inserted_step=entry.inserted_step,
        evicted_step=entry.evicted_step,
        eviction_reason=entry.eviction_reason,
    )
