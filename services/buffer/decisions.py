"""Why a prompt is, or is not, in the training batch of a step.

Nothing is stored for this: a batch is a function of committed state and the seed, so what each
source made of the prompt can be worked out again, with the functions that decided it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from bapo_core.config import RunConfig
from bapo_core.thresholds import within
from bapo_core.types import GroupSummary
from services.buffer.api import wire
from services.buffer.prompts import find_prompt
from services.buffer.runs import run_config
from services.buffer.steps import (
    buffer_as_of,
    filtered,
    promotes,
    reevaluated_entries,
    reevaluates_at,
    summaries,
)
from services.buffer.tables import BatchMemberRow, RolloutGroup, Run, StepRecord
from services.common.errors import not_found

NOT_CONSIDERED = "not_considered"


@dataclass(frozen=True, slots=True)
class _Case:
    """A prompt, a step, and what the batch of that step holds."""

    session: Session
    run: Run
    config: RunConfig
    record: StepRecord
    uid: str
    member: tuple[str, int] | None
    """(source, group) of the prompt's place in the batch, if it has one."""

    def own(self, groups: Sequence[GroupSummary]) -> GroupSummary | None:
        return next((group for group in reversed(groups) if group.prompt_uid == self.uid), None)

    def used_as(self, source: str) -> bool:
        return self.member is not None and self.member[0] == source

    def answer(
        self, source: str, outcome: str, reason: str, group: GroupSummary | None = None
    ) -> wire.SourceDecision:
        return wire.SourceDecision.model_validate(
            {
                "source": source,
                "outcome": outcome,
                "reason": reason,
                "group_id": None if group is None else group.group_id,
                "mean_reward": None if group is None else group.mean_reward,
            }
        )

    def crowded_out(self) -> str:
        if self.member is not None:
            return f"the prompt is in the batch already, as {self.member[0]}"
        return f"the batch was full: {self.config.batch_capacity} groups"


def decision(session: Session, run: Run, step: int, uid: str) -> wire.Decision:
    """What X1, X2 and X3 made of the prompt at a step whose batch has been built."""
    record = session.get(StepRecord, (run.id, step))
    if record is None:
        raise not_found(f"batch of step {step} in run {run.name!r}")
    prompt = find_prompt(session, run, uid)
    config = run_config(run)
    found = session.execute(
        select(BatchMemberRow.source, BatchMemberRow.group_id)
        .join(RolloutGroup, RolloutGroup.id == BatchMemberRow.group_id)
        .where(
            BatchMemberRow.run_id == run.id,
            BatchMemberRow.step == step,
            RolloutGroup.prompt_id == prompt.id,
        )
    ).first()
    member = None if found is None else (found[0], found[1])
    case = _Case(session, run, config, record, uid, member)
    return wire.Decision(
        step=step,
        uid=uid,
        used=member is not None,
        source=None if member is None else member[0],
        c1=config.reevaluate.c1,
        c2=record.c2,
        c3=record.c3,
        capacity=config.batch_capacity,
        counts=record.counts,
        considered=[_fresh(case), _reevaluated(case), _replayed(case)],
    )


def _fresh(case: _Case) -> wire.SourceDecision:
    groups = summaries(case.session, case.run, case.record.step, "fresh")
    group = case.own(groups)
    if group is None:
        return case.answer(
            "fresh",
            NOT_CONSIDERED,
            f"it is not among the {len(groups)} prompts drawn at this step "
            "(each epoch is a permutation of the dataset)",
        )
    if case.used_as("fresh"):
        return case.answer("fresh", "used", f"drawn at this step, {_score(group)}", group)
    kept = {each.group_id for each in filtered(case.config, case.record.step, groups)}
    if group.group_id in kept:
        return case.answer("fresh", "not_used", case.crowded_out(), group)
    name = case.config.fresh.filter
    reason = f"{_score(group)}: the {name} filter left it out"
    if not group.mixed:
        reason += ", since equal rewards have no advantage"
    elif name in ("gaussian", "uniform"):
        reason += " by its dice"
    return case.answer("fresh", "not_used", reason, group)


def _reevaluated(case: _Case) -> wire.SourceDecision:
    config, step = case.config, case.record.step
    if not reevaluates_at(config, step):
        why = (
            f"m = {config.sync.reevaluate_every}"
            if config.reevaluate.enabled
            else "X2 is switched off"
        )
        return case.answer("reevaluated", NOT_CONSIDERED, f"this step re-evaluates nothing ({why})")
    hard = buffer_as_of(case.session, case.run, "hard", step - 1)
    stored = case.own(hard)
    if stored is None:
        return case.answer(
            "reevaluated", NOT_CONSIDERED, "it was not in the hard buffer before this step"
        )
    chosen = reevaluated_entries(case.session, case.run, config, step)
    if case.own(chosen) is None:
        return case.answer(
            "reevaluated",
            "not_used",
            f"the dice chose {len(chosen)} of {len(hard)} hard entries to generate again "
            f"(reevaluate.max_prompts = {config.reevaluate.max_prompts}), and not this one",
            stored,
        )
    group = case.own(summaries(case.session, case.run, step, "reevaluation"))
    if group is None:
        return case.answer("reevaluated", "not_used", "its new group has not landed", stored)
    gain = f"from {stored.mean_reward:g} to {group.mean_reward:g} when generated again"
    if case.used_as("reevaluated"):
        return case.answer("reevaluated", "used", gain, group)
    if promotes(config, stored, group):
        return case.answer("reevaluated", "not_used", f"{gain}, but {case.crowded_out()}", group)
    return case.answer(
        "reevaluated",
        "not_used",
        f"{gain}: not promoted under reevaluate.rule = {config.reevaluate.rule} with "
        f"c1 = {config.reevaluate.c1:g}",
        group,
    )


def _replayed(case: _Case) -> wire.SourceDecision:
    config, record = case.config, case.record
    if not config.replay.enabled:
        return case.answer("replayed", NOT_CONSIDERED, "X3 is switched off")
    entries = buffer_as_of(case.session, case.run, "high_quality", record.step - 1)
    stored = case.own(entries)
    if stored is None:
        return case.answer(
            "replayed", NOT_CONSIDERED, "it was not in the high-quality buffer before this step"
        )
    if case.used_as("replayed"):
        return case.answer("replayed", "used", f"{_score(stored)}, in the window", stored)
    age = record.step - stored.step
    oldest = config.high_quality_buffer.max_age
    if age > oldest:
        reason = f"its group is {age} steps old; high_quality_buffer.max_age is {oldest}"
    elif not within(stored.mean_reward, record.c2, record.c3):
        reason = f"{_score(stored)}, outside the window [{record.c2:.3f}, {record.c3:.3f}]"
    elif case.member is not None:
        reason = case.crowded_out()
    else:
        room = config.batch_capacity - record.counts["fresh"] - record.counts["reevaluated"]
        candidates = [entry for entry in entries if within(entry.mean_reward, record.c2, record.c3)]
        reason = (
            f"eligible, but the dice filled the {room} places left from {len(candidates)} entries "
            "in the window, and not with this one"
        )
    return case.answer("replayed", "not_used", reason, stored)


def _score(group: GroupSummary) -> str:
    return f"{group.correct} of {group.size} correct at step {group.step}"
