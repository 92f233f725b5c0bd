"""Reads the state of a step from the database, and records what Algorithm 1 decides by it.

The rules are `bapo_core.algorithm`'s, or those of a plug-in that `batch.rule` selects. A batch is a
function of committed state and the seed, so it can be composed again for as long as the run exists.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from sqlalchemy import ColumnElement, select, true
from sqlalchemy.orm import aliased

from bapo_core.algorithm import (
    BATCH_RULES,
    BatchRule,
    BufferChanges,
    Composition,
    StepState,
    get_batch_rule,
    receives_replayed,
)
from bapo_core.buffers import DECAY_STEPS, median_decay
from bapo_core.composition import Decision, Decisions
from bapo_core.config import RunConfig
from bapo_core.response_replay import StoredResponse
from bapo_core.tasks.base import DEMONSTRATION
from bapo_core.types import ESS_DECAY, GroupSummary, Source
from services.buffer.api import wire
from services.buffer.steps.buffers import buffer_as_of
from services.buffer.steps.samplers import draw_round, refuse_errors
from services.buffer.storage.lineage import of_run
from services.buffer.storage.stored_groups import SUMMARY_COLUMNS, read_summaries
from services.buffer.storage.tables import PromptRow, RolloutGroup, Run, StepRecord

DEMONSTRATION_TEXT = PromptRow.payload[DEMONSTRATION].astext
"""The text of a prompt's demonstration, null without one."""


@contextmanager
def batch_rule(config: RunConfig) -> Iterator[BatchRule]:
    """Gives the batch rule of a run; raises 400 if a plug-in's cannot be loaded, or fails."""
    with refuse_errors():
        yield BATCH_RULES.get(config.batch.rule) or get_batch_rule(config.batch.rule)


def settle_step(run: Run, record: StepRecord) -> BufferChanges:
    """Returns how the commit of a step changes the buffers; the step has its batch."""
    # Algorithm 1 settles by groups and buffers alone; a plug-in's rule may compose again.
    built_in = run.config.batch.rule in BATCH_RULES
    read = _read_groups_and_buffers if built_in else read_state
    state = read(run, record.step)
    supervised = supervised_ids(run, record)
    with batch_rule(run.config) as rule:
        return rule.settle(run.config, state, window=(record.c2, record.c3), supervised=supervised)


def supervised_ids(run: Run, record: StepRecord) -> list[int]:
    """Returns the hard entries whose demonstrations the step has a supervised update on."""
    if record.supervised is not None:
        return [entry["group_id"] for entry in record.supervised]
    if not run.config.demonstrations.supervise_every:
        return []
    # A batch of an earlier version, which did not record them.
    composition = compose_again(run, record.step)
    return [entry.group_id for entry in composition.supervised]


def reevaluated_entries(run: Run, step: int) -> list[GroupSummary]:
    """Returns the hard entries whose prompts are answered again at `step`.

    They are a function of the committed state of step - 1 and the seed.
    """
    if not run.config.reevaluates_at(step):
        return []
    hard = buffer_as_of(run, "hard", step - 1)
    with batch_rule(run.config) as rule:
        return rule.draw_reevaluated(run.config, step, hard)


def compose_again(run: Run, step: int) -> Composition:
    """Composes the recorded batch of a step again, from the same state."""
    state = read_state(run, step)
    with batch_rule(run.config) as rule:
        return rule.compose(run.config, state)


def _read_groups_and_buffers(run: Run, step: int) -> StepState:
    """Reads the groups of a step and the buffers before it: what its commit depends on."""
    hard: list[GroupSummary] = []
    high: list[GroupSummary] = []
    if run.config.keeps_hard_buffer:
        hard = buffer_as_of(run, "hard", step - 1)
    if run.config.replay.select != "off":
        high = buffer_as_of(run, "high_quality", step - 1)
    reevaluated = read_summaries(run, step, "reevaluation")
    if run.has_recorded_rollouts(step):
        # The parent may have answered other prompts again than this run would have.
        asked = {entry.prompt_uid for entry in reevaluated_entries(run, step)}
        reevaluated = [group for group in reevaluated if group.prompt_uid in asked]
    return StepState(
        step=step,
        fresh=read_summaries(run, step, "fresh"),
        reevaluated=reevaluated,
        hard=hard,
        high=high,
    )


def read_state(run: Run, step: int) -> StepState:
    """Reads all that the batch of a step depends on."""
    state = _read_groups_and_buffers(run, step)
    previous = run.session.get(StepRecord, (run.of_step(step - 1).id, step - 1))
    revisited = 0
    if run.config.response_replay.groups == "revisited":
        revisited = draw_round(run, step, generation_round=0).revisited
    receiving = receives_replayed(run.config, state.fresh, revisited)
    demonstrated: set[str] = set()
    if run.config.demonstrations.enabled:
        groups = (*state.fresh, *state.hard)
        demonstrated = _with_demonstration(run, {group.prompt_uid for group in groups})
    return replace(
        state,
        r_tot_before=None if previous is None else previous.r_tot,
        ess_decay=_read_ess_decay(run, step),
        revisited=revisited,
        caches=_read_caches(run, step, [group.prompt_uid for group in receiving]),
        demonstrated=demonstrated,
    )


def _read_ess_decay(run: Run, step: int) -> float | None:
    """Returns the decay of the effective share that committed steps before `step` measured."""
    if run.config.replay.select != "effective_sample_size":
        return None
    measured = run.session.scalars(
        select(StepRecord.metrics[ESS_DECAY].as_float())
        .where(
            of_run(run, StepRecord.run_id, StepRecord.step),
            StepRecord.step < step,
            StepRecord.metrics[ESS_DECAY].astext.is_not(None),
        )
        .order_by(StepRecord.step.desc())
        .limit(DECAY_STEPS)
    ).all()
    return median_decay(measured[::-1])


def _with_demonstration(run: Run, uids: set[str]) -> set[str]:
    """Returns those of the prompts that have a demonstration."""
    return set(
        run.session.scalars(
            select(PromptRow.uid).where(
                PromptRow.dataset == run.train_dataset,
                PromptRow.uid.in_(uids),
                DEMONSTRATION_TEXT.is_not(None),
            )
        )
    )


def _read_caches(run: Run, step: int, uids: Sequence[str]) -> dict[str, list[StoredResponse]]:
    """Returns responses to these prompts in groups of steps before `step`, oldest first.

    Of each prompt, only the newest groups are read that `choose_responses` can choose from: a
    prompt has the more groups, the longer the run. The cache of a prompt is the responses in its
    committed groups, so a rewind has nothing to undo.
    """
    settings = run.config.response_replay
    if settings.groups == "off" or not uids:
        return {}
    stored = aliased(RolloutGroup)
    usable: list[ColumnElement[bool]] = [stored.responses.is_not(None)]
    groups = math.ceil(settings.candidates / run.config.rollout.group_size)
    if settings.only_correct:
        usable.append(stored.correct > 0)
        groups = settings.candidates  # One correct response in each, in the worst case.
    newest = (
        select(stored.id)
        .where(
            of_run(run, stored.run_id, stored.step),
            stored.prompt_id == PromptRow.id,
            stored.step < step,
            stored.kind != "evaluation",
            *usable,
        )
        .order_by(stored.step.desc(), stored.kind.desc())
        .limit(groups)
        .correlate(PromptRow)
        .lateral()
    )
    rows = run.session.execute(
        select(*SUMMARY_COLUMNS, RolloutGroup.responses)
        .select_from(PromptRow)
        .join(newest, true())
        .join(RolloutGroup, RolloutGroup.id == newest.c.id)
        .where(PromptRow.dataset == run.train_dataset, PromptRow.uid.in_(uids))
        .order_by(RolloutGroup.step, RolloutGroup.kind)
    )
    caches: dict[str, list[StoredResponse]] = {}
    for *summary, responses in rows:
        group = GroupSummary(*summary)
        columns = (responses["rewards"], responses["correct"], responses["logprobs"])
        caches.setdefault(group.prompt_uid, []).extend(
            StoredResponse(group, row, *values)
            for row, values in enumerate(zip(*columns, strict=True))
        )
    return caches


# ---- recorded decisions -------------------------------------------------------------------------


def dump_decisions(decisions: Decisions) -> dict[str, Any]:
    """Returns decisions as JSON values, for `StepRecord.decisions`."""
    return {
        "by_prompt": {
            uid: [_dump(decision) for decision in of_prompt]
            for uid, of_prompt in decisions.by_prompt.items()
        },
        "otherwise": [_dump(decision) for decision in decisions.otherwise],
    }


def _dump(decision: Decision) -> dict[str, Any]:
    values: dict[str, Any] = {
        "source": decision.source.value,
        "outcome": decision.outcome,
        "reason": decision.reason,
    }
    if decision.group is not None:
        group = decision.group
        values |= {"group_id": group.group_id, "accuracy": group.accuracy}
    return values


def read_decisions(run: Run, step: int, uid: str) -> dict[Source, wire.SourceDecision]:
    """Returns how each source of a recorded batch decided on a prompt, in the order of X1 to X3.

    Batches of earlier versions have no recorded decisions, and are composed again for them.
    """
    recorded = StepRecord.decisions
    of_prompt, otherwise = run.session.execute(
        select(recorded["by_prompt"][uid], recorded["otherwise"]).where(
            StepRecord.run_id == run.of_step(step).id, StepRecord.step == step
        )
    ).one()
    if otherwise is None:
        values = dump_decisions(compose_again(run, step).decisions)
        of_prompt, otherwise = values["by_prompt"].get(uid), values["otherwise"]
    decided = {decision["source"]: decision for decision in of_prompt or ()}
    return {
        Source(default["source"]): wire.SourceDecision.model_validate(
            decided.get(default["source"], default)
        )
        for default in otherwise
    }
