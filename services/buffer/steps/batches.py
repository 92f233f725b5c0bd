"""Records the batch of a step once, and reads batches as manifests.

The batch is composed by `bapo_core.algorithm`, or the rule of a plug-in, from committed state and
the seed; a repeated request gets the recorded one.
"""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy import literal, select

from bapo_core.algorithm import demonstration_joins
from bapo_core.config import RunConfig
from bapo_core.metrics import accuracy_bins
from bapo_core.types import DEMONSTRATED, Source
from services.buffer.api import wire
from services.buffer.steps.step_groups import check_rollouts, missing_groups
from services.buffer.steps.step_state import (
    DEMONSTRATION_TEXT,
    batch_rule,
    dump_decisions,
    read_state,
    settle_step,
    supervised_ids,
)
from services.buffer.storage.artifacts import is_set_aside
from services.buffer.storage.bulk import insert_columns
from services.buffer.storage.lineage import of_run
from services.buffer.storage.pages import after_cursor, page_of
from services.buffer.storage.stored_groups import (
    LOCATION_COLUMNS,
    count_training_tokens,
    manifest_member,
    mean_rewards,
)
from services.buffer.storage.tables import BatchMemberRow, PromptRow, RolloutGroup, Run, StepRecord
from services.common.problems import conflict


def build_step_batch(run: Run, step: int) -> wire.BatchManifest:
    """Returns the training batch of `step`; composes and records it at the first request.

    It is not ready while groups are missing or the run is paused. Raises 409 unless the step is
    the one after the last committed one, or has its batch already.
    """
    check_rollouts(run.config_at(step), wire.Rollouts(step, "fresh"))
    run = run.of_step(step)
    record = run.session.get(StepRecord, (run.id, step))
    if record is None:
        if run.status == "paused":
            return wire.BatchManifest(
                ready=False, step=step, members=[], missing=f"run {run.name!r} is paused"
            )
        if step != run.current_step + 1:
            raise conflict(
                f"the batch of step {step} cannot be built: step {run.current_step} is the last "
                "committed one"
            )
        missing = _missing(run, step)
        if missing:
            return wire.BatchManifest(ready=False, step=step, members=[], missing=missing)
        record = _record_batch(run, step)
    return _manifest(run, record)


def _missing(run: Run, step: int) -> str:
    """Describes what the batch of a step still waits for; empty when it can be built."""
    if run.has_recorded_rollouts(step):
        return ""
    kinds: list[wire.Kind] = ["fresh"]
    if run.config.reevaluates_at(step):
        kinds.append("reevaluation")
    for kind in kinds:
        version = run.config.rollout_version(step, kind)
        if is_set_aside(run, version):
            return f"version {version} of the weights, which a rewind set aside, published again"
        missing = missing_groups(run, wire.Rollouts(step, kind))
        if missing:
            return missing
    return ""


def recorded_batch(run: Run, step: int) -> wire.BatchManifest | None:
    """Returns the batch of `step`, or None if it has not been built."""
    run = run.of_step(step)
    record = run.session.get(StepRecord, (run.id, step))
    return None if record is None else _manifest(run, record)


def list_batches(
    run: Run, after: int, cursor: str | None, limit: int
) -> wire.Page[wire.BatchSummary]:
    """Returns a page of the composition of every batch after step `after`, by step."""
    statement = select(StepRecord).where(
        of_run(run, StepRecord.run_id, StepRecord.step), StepRecord.step > after
    )
    order = (StepRecord.step.expression,)
    rows = list(run.session.scalars(after_cursor(statement, order, "step", cursor, limit)))
    return page_of(
        rows,
        limit,
        "step",
        lambda row: (row.step,),
        lambda row: wire.BatchSummary(
            step=row.step, counts=row.counts, c2=row.c2, c3=row.c3, r_tot=row.r_tot
        ),
    )


# ---- composition --------------------------------------------------------------------------------


def _record_batch(run: Run, step: int) -> StepRecord:
    state = read_state(run, step)
    with batch_rule(run.config) as rule:
        composition = rule.compose(run.config, state)
    batch = composition.batch
    counts = {
        "rolled_out": len(state.fresh),
        "mixed": sum(group.mixed for group in state.fresh),
        "reevaluated_total": len(state.reevaluated),
        **{source.value: count for source, count in batch.counts.items()},
    }
    if run.config.response_replay.groups != "off":
        counts["replayed_responses"] = batch.replayed_responses
    bins = accuracy_bins([group.correct for group in state.fresh], run.config.rollout.group_size)
    mean_reward, parts = mean_rewards(run, step)
    record = StepRecord(
        run_id=run.id,
        step=step,
        bins=bins,
        mean_reward=mean_reward,
        reward_parts=parts,
        r_tot=composition.r_tot,
        c2=batch.window[0],
        c3=batch.window[1],
        counts=counts,
        supervised=[
            {"group_id": entry.group_id, "prompt_uid": entry.prompt_uid}
            for entry in composition.supervised
        ],
        decisions=dump_decisions(composition.decisions),
        rollouts=sum(group.size for group in (*state.fresh, *state.reevaluated)),
        tokens=count_training_tokens(run, step),
    )
    run.session.add(record)
    run.session.flush()
    insert_columns(
        run.session,
        BatchMemberRow,
        {"run_id": run.id, "step": step},
        {
            "position": range(len(batch.members)),
            "group_id": [member.group.group_id for member in batch.members],
            "source": [member.source.value for member in batch.members],
            "rows": [
                None if member.rows is None else json.dumps(member.rows) for member in batch.members
            ],
            "joins_previous": [member.joins_previous for member in batch.members],
        },
    )
    return record


# ---- manifests ----------------------------------------------------------------------------------


def _manifest(run: Run, record: StepRecord) -> wire.BatchManifest:
    rows = run.session.execute(
        select(
            BatchMemberRow.source,
            BatchMemberRow.rows,
            BatchMemberRow.joins_previous,
            *_member_columns(run.config),
        )
        .join(BatchMemberRow, BatchMemberRow.group_id == RolloutGroup.id)
        .join(PromptRow, PromptRow.id == RolloutGroup.prompt_id)
        .where(BatchMemberRow.run_id == run.id, BatchMemberRow.step == record.step)
        .order_by(BatchMemberRow.position)
    )
    members = [manifest_member(row) for row in rows]
    for member in members:
        if member.source != Source.FRESH or not demonstration_joins(run.config, member.correct):
            member.demonstration = None
    manifest = wire.BatchManifest(
        ready=True,
        step=record.step,
        members=members,
        supervised=_supervised(run, record),
        r_tot=record.r_tot,
        c2=record.c2,
        c3=record.c3,
        counts=record.counts,
    )
    if run.config.loss.correction.kind == "decoupled":
        manifest.record_proximal = _replayable(run, record)
    return manifest


def _member_columns(config: RunConfig) -> tuple[Any, ...]:
    """Returns the columns of a member, with the text of its demonstration if the run has any."""
    if not config.demonstrations.enabled:
        return LOCATION_COLUMNS
    return (*LOCATION_COLUMNS, DEMONSTRATION_TEXT.label("demonstration"))


def _supervised(run: Run, record: StepRecord) -> list[wire.ManifestMember]:
    """Returns the demonstrations of a step's supervised update, as members without responses."""
    group_ids = supervised_ids(run, record)
    if not group_ids:
        return []
    rows = run.session.execute(
        select(literal(DEMONSTRATED).label("source"), *_member_columns(run.config))
        .join(PromptRow, PromptRow.id == RolloutGroup.prompt_id)
        .where(RolloutGroup.id.in_(group_ids))
        .order_by(RolloutGroup.step, RolloutGroup.position)
    )
    return [manifest_member(row).model_copy(update={"rows": []}) for row in rows]


def _replayable(run: Run, record: StepRecord) -> list[wire.ManifestMember]:
    """Returns the groups of this step that its commit will admit to the high-quality buffer."""
    changes = settle_step(run, record)
    admitted = [
        group.group_id
        for change in changes.get("high_quality", ())
        for group in change.admitted
        if group.step == record.step
    ]
    rows = run.session.execute(
        select(RolloutGroup.kind.label("source"), *LOCATION_COLUMNS)
        .join(PromptRow, PromptRow.id == RolloutGroup.prompt_id)
        .where(RolloutGroup.id.in_(admitted))
        .order_by(RolloutGroup.id)
    )
    return [manifest_member(row) for row in rows]
