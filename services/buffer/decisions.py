"""Explains why a prompt is, or is not, in the training batch of a step.

Nothing is stored for this: a batch is a function of committed state and the seed, so the decision
of each source can be computed again with the functions that made it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from bapo_core.buffers import dedup_key
from bapo_core.config import RunConfig
from bapo_core.thresholds import within
from bapo_core.types import GroupSummary
from services.buffer.api import wire
from services.buffer.batches import filter_fresh, find_mixed, is_promoted
from services.buffer.buffers import buffer_as_of, reevaluated_entries
from services.buffer.demonstrations import demonstrated_groups
from services.buffer.prompts import find_prompt
from services.buffer.response_replay import choose_replayed
from services.buffer.runs import run_config
from services.buffer.samplers import explain_draw
from services.buffer.step_groups import reevaluates_at
from services.buffer.stored_groups import read_summaries
from services.buffer.tables import BatchMemberRow, PromptRow, RolloutGroup, Run, StepRecord
from services.common.problems import not_found

NOT_CONSIDERED = "not_considered"


@dataclass(frozen=True, slots=True)
class _Case:
    """A prompt and a step, with the batch that was built at this step."""

    session: Session
    run: Run
    config: RunConfig
    record: StepRecord
    uid: str
    member: tuple[str, int] | None
    """(source, group id) of the prompt in the batch, or None if it is not in the batch."""
    draw: wire.PromptDraw | None
    """How an adaptive sampler decided on the prompt; None with the uniform sampler."""

    def newest_group(self, groups: Sequence[GroupSummary]) -> GroupSummary | None:
        """Returns the last group of the prompt among `groups`, which are oldest first."""
        return next((group for group in reversed(groups) if group.prompt_uid == self.uid), None)

    def is_used_as(self, source: str) -> bool:
        return self.member is not None and self.member[0] == source

    def decide(
        self, source: str, outcome: str, reason: str, group: GroupSummary | None = None
    ) -> wire.SourceDecision:
        return wire.SourceDecision.model_validate(
            {
                "source": source,
                "outcome": outcome,
                "reason": reason,
                "group_id": None if group is None else group.group_id,
                "accuracy": None if group is None else group.accuracy,
            }
        )

    def explain_no_place(self) -> str:
        """Explains why a group that passed the rules of its source has no place in the batch."""
        if self.member is not None:
            return f"the prompt is in the batch already, as {_SOURCE_NAMES[self.member[0]]}"
        return f"the batch was full (batch.capacity = {self.config.batch_capacity} groups)"


_SOURCE_NAMES = {"fresh": "fresh", "reevaluated": "re-evaluated", "replayed": "replayed"}


def explain_decision(session: Session, run: Run, step: int, uid: str) -> wire.Decision:
    """Returns what X1, X2 and X3 decided about a prompt at a step.

    Raises 404 if the batch of the step has not been built, or if the run has no such prompt.
    """
    record = session.get(StepRecord, (run.id, step))
    if record is None:
        raise not_found(f"batch of step {step} in run {run.name!r}")
    prompt = find_prompt(session, run, uid)
    config = run_config(run)
    row = session.execute(
        select(BatchMemberRow.source, BatchMemberRow.group_id)
        .join(RolloutGroup, RolloutGroup.id == BatchMemberRow.group_id)
        .where(
            BatchMemberRow.run_id == run.id,
            BatchMemberRow.step == step,
            RolloutGroup.prompt_id == prompt.id,
        )
        .order_by(BatchMemberRow.position)
    ).first()
    member = None if row is None else (row[0], row[1])
    draw = explain_draw(session, run, config, step, prompt)
    case = _Case(session, run, config, record, uid, member, draw)
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
        considered=[_decide_fresh(case), _decide_reevaluated(case), _decide_replayed(case)],
        draw=draw,
    )


def _decide_fresh(case: _Case) -> wire.SourceDecision:
    """Explains the decision of X1."""
    groups = read_summaries(case.session, case.run, case.record.step, "fresh")
    group = case.newest_group(groups)
    if group is None:
        reason = (
            f"it is not among the {len(groups)} prompts of this step (each epoch is a permutation "
            "of the dataset)"
            if case.draw is None
            else case.draw.reason
        )
        return case.decide("fresh", NOT_CONSIDERED, f"not drawn: {reason}")
    if case.is_used_as("fresh"):
        return case.decide("fresh", "used", f"drawn at this step: {_score(group)}", group)
    replayed = choose_replayed(case.session, case.run, case.config, case.record.step, groups)
    demonstrated = demonstrated_groups(case.session, case.run, case.config, groups)
    mixed = find_mixed(case.config, groups, replayed, demonstrated)
    kept = {kept.group_id for kept in filter_fresh(case.config, case.record.step, groups, mixed)}
    if group.group_id in kept:
        return case.decide("fresh", "not_used", case.explain_no_place(), group)
    name = case.config.fresh.filter
    reason = f"{_score(group)}: removed by the online filter (fresh.filter = {name})"
    # The uniform filter does not depend on the rewards.
    if not group.mixed and name != "uniform":
        reason += ", because a group with equal rewards has no advantage and no gradient"
    elif name in ("gaussian", "uniform"):
        reason += ", which keeps groups at random"
    return case.decide("fresh", "not_used", reason, group)


def _decide_reevaluated(case: _Case) -> wire.SourceDecision:
    """Explains the decision of X2."""
    config, step = case.config, case.record.step
    if not reevaluates_at(config, step):
        setting = (
            f"sync.reevaluate_every = {config.sync.reevaluate_every}"
            if config.reevaluate.enabled
            else "reevaluate.enabled = false"
        )
        return case.decide(
            "reevaluated", NOT_CONSIDERED, f"this step has no re-evaluation ({setting})"
        )
    hard = buffer_as_of(case.session, case.run, "hard", step - 1)
    stored = case.newest_group(hard)
    if stored is None:
        return case.decide(
            "reevaluated", NOT_CONSIDERED, "it was not in the hard buffer before this step"
        )
    sampled = reevaluated_entries(case.session, case.run, config, step)
    if case.newest_group(sampled) is None:
        return case.decide(
            "reevaluated",
            "not_used",
            f"not sampled: {len(sampled)} of {len(hard)} hard entries were drawn for "
            f"re-evaluation (reevaluate.max_prompts = {config.most_reevaluated})",
            stored,
        )
    group = case.newest_group(read_summaries(case.session, case.run, step, "reevaluation"))
    if group is None:
        return case.decide(
            "reevaluated", "not_used", "its re-evaluated group has not landed", stored
        )
    change = f"accuracy {stored.accuracy:g} when stored, {group.accuracy:g} re-evaluated"
    if case.is_used_as("reevaluated"):
        return case.decide("reevaluated", "used", change, group)
    if is_promoted(config, stored, group):
        reason = f"{change}: promoted, but {case.explain_no_place()}"
        return case.decide("reevaluated", "not_used", reason, group)
    return case.decide(
        "reevaluated",
        "not_used",
        f"{change}: not promoted under reevaluate.rule = {config.reevaluate.rule} with "
        f"reevaluate.c1 = {config.reevaluate.c1:g}",
        group,
    )


def _decide_replayed(case: _Case) -> wire.SourceDecision:
    """Explains the decision of X3, or of response replay."""
    config, record = case.config, case.record
    if config.response_replay.enabled:
        replayed = _explain_responses(case)
        if replayed or not config.replay.enabled:
            outcome = "used" if replayed else "not_used"
            reason = replayed or (
                "no response of an earlier step joined its fresh group (response_replay.groups = "
                f"{config.response_replay.groups}, response_replay.min_cache = "
                f"{config.response_replay.min_cache})"
            )
            return case.decide("replayed", outcome, reason)
    if not config.replays_at(record.step):
        reason = (
            f"this step has no replay (replay.last_step = {config.replay.last_step})"
            if config.replay.enabled
            else "this run has no replay (replay.enabled = false)"
        )
        return case.decide("replayed", NOT_CONSIDERED, reason)
    entries = buffer_as_of(case.session, case.run, "high_quality", record.step - 1)
    stored = case.newest_group(entries)
    if stored is None:
        return case.decide(
            "replayed", NOT_CONSIDERED, "it was not in the high-quality buffer before this step"
        )
    name = "the mixed rewards" if config.replay.select == "mixed" else "the replay window [c2, c3]"
    window = f"{name} = [{record.c2:.3f}, {record.c3:.3f}]"
    if case.is_used_as("replayed"):
        return case.decide("replayed", "used", f"{_score(stored)}, within {window}", stored)
    # The buffer holds no entry that is too old: the commit of the step before evicted it.
    if not within(stored.accuracy, record.c2, record.c3):
        reason = f"{_score(stored)}, outside {window}"
    elif case.member is not None:
        reason = case.explain_no_place()
    else:
        room = config.batch_capacity - record.counts["fresh"] - record.counts["reevaluated"]
        reason = (
            f"not sampled: {_count_candidates(case, entries)} entries within {window} had no group "
            f"in the batch yet, and {room} of them were drawn for the places left"
        )
    return case.decide("replayed", "not_used", reason, stored)


def _explain_responses(case: _Case) -> str:
    """Describes the responses of earlier steps that joined the prompt's fresh group; "" if none."""
    members = case.session.execute(
        select(RolloutGroup.step, BatchMemberRow.rows)
        .join(RolloutGroup, RolloutGroup.id == BatchMemberRow.group_id)
        .join(PromptRow, PromptRow.id == RolloutGroup.prompt_id)
        .where(
            BatchMemberRow.run_id == case.run.id,
            BatchMemberRow.step == case.record.step,
            BatchMemberRow.source == "replayed",
            BatchMemberRow.rows.is_not(None),
            PromptRow.uid == case.uid,
        )
        .order_by(BatchMemberRow.position)
    ).all()
    if not members:
        return ""
    counts = ", ".join(f"{len(rows)} of step {step}" for step, rows in members)
    return (
        f"responses of earlier steps joined its fresh group: {counts} "
        f"(response_replay.strategy = {case.config.response_replay.strategy})"
    )


def _count_candidates(case: _Case, entries: Sequence[GroupSummary]) -> int:
    """Returns the number of entries that X3 was drawn from."""
    record = case.record
    taken = case.session.scalars(
        select(PromptRow.uid)
        .join(RolloutGroup, RolloutGroup.prompt_id == PromptRow.id)
        .join(BatchMemberRow, BatchMemberRow.group_id == RolloutGroup.id)
        .where(
            BatchMemberRow.run_id == case.run.id,
            BatchMemberRow.step == record.step,
            BatchMemberRow.source != "replayed",
        )
    )
    dedup = case.config.batch.dedup
    excluded: set[str | int] = set(taken) if dedup == "prompt" else set()
    keys = {
        dedup_key(entry, dedup) for entry in entries if within(entry.accuracy, record.c2, record.c3)
    }
    return len(keys - excluded)


def _score(group: GroupSummary) -> str:
    return f"{group.correct} of {group.size} correct at step {group.step}"
