"""Composes training batches from X1, X2 and X3, records them once, and reads them as manifests.

The rules are `bapo_core`'s (`batch`, `buffers`, `filters`, `thresholds`). A batch is a function
of committed state and the seed, so a repeated request gets the recorded one.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import literal, select
from sqlalchemy.orm import Session

from bapo_core.batch import build_batch
from bapo_core.buffers import eligible_high, promoted
from bapo_core.config import RunConfig
from bapo_core.filters import gaussian_filter, range_filter, uniform_filter
from bapo_core.metrics import accuracy_bins
from bapo_core.response_replay import (
    StoredResponse,
    add_responses,
    is_mixed,
    without_first,
)
from bapo_core.seeding import derive_rng
from bapo_core.thresholds import replay_window, running_reward, within
from bapo_core.types import DEMONSTRATED, GroupSummary, Source, TrainingBatch
from services.buffer.api import wire
from services.buffer.artifacts import is_set_aside
from services.buffer.buffers import buffer_as_of, reevaluated_entries
from services.buffer.bulk import insert_columns
from services.buffer.demonstrations import (
    DEMONSTRATION_TEXT,
    demonstrated_groups,
    demonstration_joins,
    supervised_entries,
)
from services.buffer.pages import after_cursor, page_of
from services.buffer.response_replay import choose_replayed
from services.buffer.runs import run_config
from services.buffer.step_groups import check_step, missing_groups, reevaluates_at
from services.buffer.stored_groups import (
    LOCATION_COLUMNS,
    count_training_tokens,
    manifest_member,
    mean_rewards,
    read_summaries,
)
from services.buffer.tables import BatchMemberRow, PromptRow, RolloutGroup, Run, StepRecord
from services.common.problems import conflict


def build_step_batch(session: Session, run: Run, step: int) -> wire.BatchManifest:
    """Returns the training batch of `step`; composes and records it at the first request.

    It is not ready while groups are missing or the run is paused. Raises 409 unless the step is
    the one after the last committed one, or has its batch already.
    """
    config = run_config(run)
    check_step(config, step, "fresh")
    record = session.get(StepRecord, (run.id, step))
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
        missing = _missing(session, run, config, step)
        if missing:
            return wire.BatchManifest(ready=False, step=step, members=[], missing=missing)
        record = _record_batch(session, run, config, step)
    return _manifest(session, run, config, record)


def _missing(session: Session, run: Run, config: RunConfig, step: int) -> str:
    """Describes what the batch of a step still waits for; empty when it can be built."""
    kinds: list[wire.Kind] = ["fresh"]
    if reevaluates_at(config, step):
        kinds.append("reevaluation")
    for kind in kinds:
        version = config.rollout_version(step, kind)
        if is_set_aside(session, run, version):
            return f"version {version} of the weights, which a rewind set aside, published again"
        missing = missing_groups(session, run, step, kind)
        if missing:
            return missing
    return ""


def recorded_batch(session: Session, run: Run, step: int) -> wire.BatchManifest | None:
    """Returns the batch of `step`, or None if it has not been built."""
    record = session.get(StepRecord, (run.id, step))
    return None if record is None else _manifest(session, run, run_config(run), record)


def list_batches(
    session: Session, run: Run, after: int, cursor: str | None, limit: int
) -> wire.Page[wire.BatchSummary]:
    """Returns a page of the composition of every batch after step `after`, by step."""
    statement = select(StepRecord).where(StepRecord.run_id == run.id, StepRecord.step > after)
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


# ---- composition --------------------------------------------------------------------------------


def _record_batch(session: Session, run: Run, config: RunConfig, step: int) -> StepRecord:
    fresh = read_summaries(session, run, step, "fresh")
    reevaluated = read_summaries(session, run, step, "reevaluation")
    r_tot = _r_tot(session, run, config, step, fresh)
    window = _replay_window(config, r_tot)
    batch = _compose(session, run, config, step, fresh, reevaluated, window)
    counts = {
        "rolled_out": len(fresh),
        "reevaluated_total": len(reevaluated),
        **{source.value: count for source, count in batch.counts.items()},
    }
    if config.response_replay.enabled:
        counts["replayed_responses"] = batch.replayed_responses
    bins = accuracy_bins([group.correct for group in fresh], config.rollout.group_size)
    mean_reward, parts = mean_rewards(session, run, step)
    record = StepRecord(
        run_id=run.id,
        step=step,
        bins=bins,
        mean_reward=mean_reward,
        reward_parts=parts,
        r_tot=r_tot,
        c2=window[0],
        c3=window[1],
        counts=counts,
        rollouts=sum(group.size for group in (*fresh, *reevaluated)),
        tokens=count_training_tokens(session, run, step),
    )
    session.add(record)
    session.flush()
    insert_columns(
        session,
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


def _compose(
    session: Session,
    run: Run,
    config: RunConfig,
    step: int,
    fresh: Sequence[GroupSummary],
    reevaluated: Sequence[GroupSummary],
    window: tuple[float, float],
) -> TrainingBatch:
    """Composes the batch of X1 (filtered fresh), X2 (promoted) and X3 (replayed)."""
    entries = reevaluated_entries(session, run, config, step) if reevaluated else []
    stored = {entry.prompt_uid: entry for entry in entries}
    x2 = [group for group in reevaluated if is_promoted(config, stored[group.prompt_uid], group)]
    candidates: list[GroupSummary] = []
    if config.replays_at(step):
        candidates = eligible_high(
            buffer_as_of(session, run, "high_quality", step - 1),
            step=step,
            window=window,
            max_age=config.high_quality_buffer.max_age,
        )
    chosen = choose_replayed(session, run, config, step, fresh)
    demonstrated = demonstrated_groups(session, run, config, fresh)
    batch = build_batch(
        filter_fresh(config, step, fresh, find_mixed(config, fresh, chosen, demonstrated)),
        x2,
        candidates,
        capacity=config.batch_capacity,
        window=window,
        c1=config.reevaluate.c1 if config.reevaluate.rule == "paper" else None,
        rng=derive_rng(config.seed, "batch", step),
        dedup=config.batch.dedup,
    )
    members = [
        without_first(member, 1)
        if member.source is Source.FRESH and member.group.group_id in demonstrated
        else member
        for member in batch.members
    ]
    return add_responses(replace(batch, members=members), chosen, config.response_replay)


def is_promoted(config: RunConfig, stored: GroupSummary, new: GroupSummary) -> bool:
    """Returns whether a re-evaluated hard prompt enters X2 (Eq. 6)."""
    return promoted(stored, new, rule=config.reevaluate.rule, c1=config.reevaluate.c1)


def find_mixed(
    config: RunConfig,
    fresh: Sequence[GroupSummary],
    chosen: Mapping[int, Sequence[StoredResponse]],
    demonstrated: Collection[int],
) -> set[int]:
    """Returns the ids of the fresh groups that are mixed, counting the responses that join them.

    chosen: the replayed responses by the id of the fresh group. demonstrated: ids of the groups
    that a demonstration joins.
    """
    compared = chosen if config.response_replay.advantages == "mixed" else {}
    return {
        group.group_id
        for group in fresh
        if is_mixed(
            group,
            compared.get(group.group_id, ()),
            demonstrated=group.group_id in demonstrated,
        )
    }


def filter_fresh(
    config: RunConfig, step: int, fresh: Sequence[GroupSummary], mixed_with_joined: Collection[int]
) -> list[GroupSummary]:
    """Applies the online filter (A.3) to the fresh groups of a step; what it keeps is X1.

    mixed_with_joined: ids of the groups that are mixed, counting the responses that join them.
    """
    rng = derive_rng(config.seed, "filter", step)
    match config.fresh.filter:
        case "range":
            mixed = {*mixed_with_joined, *(group.group_id for group in range_filter(fresh))}
            return [group for group in fresh if group.group_id in mixed]
        case "gaussian":
            return gaussian_filter(
                fresh, mean=config.fresh.gaussian_mean, sigma=config.fresh.gaussian_sigma, rng=rng
            )
        case "uniform":
            return uniform_filter(fresh, fraction=config.fresh.uniform_fraction, rng=rng)
        case "none":
            return list(fresh)


def _replay_window(config: RunConfig, r_tot: float) -> tuple[float, float]:
    """Returns the accuracies of groups that are stored and replayed: [c2, c3], or all mixed."""
    if config.replay.select == "mixed":
        size = config.rollout.group_size
        return 1 / size, (size - 1) / size
    settings = config.replay_window
    return replay_window(r_tot, settings.c2_range, settings.c3_range, settings.direction)


def _r_tot(
    session: Session, run: Run, config: RunConfig, step: int, fresh: Sequence[GroupSummary]
) -> float:
    """Returns r_tot of Eq. 8, the running accuracy that moves the replay window."""
    previous = session.get(StepRecord, (run.id, step - 1))
    stored: list[GroupSummary] = []
    if config.replay_window.r_tot == "buffer":
        for buffer in ("hard", "high_quality"):
            stored += buffer_as_of(session, run, buffer, step - 1)
    return running_reward(
        config.replay_window.r_tot,
        fresh,
        previous=None if previous is None else previous.r_tot,
        buffer=stored,
        ema_decay=config.replay_window.ema_decay,
    )


# ---- manifests ----------------------------------------------------------------------------------


def _manifest(
    session: Session, run: Run, config: RunConfig, record: StepRecord
) -> wire.BatchManifest:
    rows = session.execute(
        select(
            BatchMemberRow.source,
            BatchMemberRow.rows,
            BatchMemberRow.joins_previous,
            *_member_columns(config),
        )
        .join(BatchMemberRow, BatchMemberRow.group_id == RolloutGroup.id)
        .join(PromptRow, PromptRow.id == RolloutGroup.prompt_id)
        .where(BatchMemberRow.run_id == run.id, BatchMemberRow.step == record.step)
        .order_by(BatchMemberRow.position)
    )
    members = [manifest_member(row) for row in rows]
    for member in members:
        if member.source != Source.FRESH or not demonstration_joins(config, member.correct):
            member.demonstration = None
    manifest = wire.BatchManifest(
        ready=True,
        step=record.step,
        members=members,
        supervised=_supervised(session, run, config, record.step),
        r_tot=record.r_tot,
        c2=record.c2,
        c3=record.c3,
        counts=record.counts,
    )
    if config.loss.correction.kind == "decoupled":
        manifest.record_proximal = _replayable(session, run, config, record)
    return manifest


def _member_columns(config: RunConfig) -> tuple[Any, ...]:
    """Returns the columns of a member, with the text of its demonstration if the run has any."""
    if not config.demonstrations.enabled:
        return LOCATION_COLUMNS
    return (*LOCATION_COLUMNS, DEMONSTRATION_TEXT.label("demonstration"))


def _supervised(
    session: Session, run: Run, config: RunConfig, step: int
) -> list[wire.ManifestMember]:
    """Returns the demonstrations of a step's supervised update, as members without responses."""
    group_ids = [entry.group_id for entry in supervised_entries(session, run, config, step)]
    if not group_ids:
        return []
    rows = session.execute(
        select(literal(DEMONSTRATED).label("source"), *_member_columns(config))
        .join(PromptRow, PromptRow.id == RolloutGroup.prompt_id)
        .where(RolloutGroup.run_id == run.id, RolloutGroup.id.in_(group_ids))
        .order_by(RolloutGroup.step, RolloutGroup.position)
    )
    return [manifest_member(row).model_copy(update={"rows": []}) for row in rows]


def _replayable(
    session: Session, run: Run, config: RunConfig, record: StepRecord
) -> list[wire.ManifestMember]:
    """Returns the groups of this step that its commit will admit to the high-quality buffer."""
    if not config.replays_at(record.step + 1):
        return []
    kinds = ["fresh", "reevaluation"] if config.hard_buffer.store_new_in_high else ["fresh"]
    rows = session.execute(
        select(RolloutGroup.kind.label("source"), *LOCATION_COLUMNS)
        .join(PromptRow, PromptRow.id == RolloutGroup.prompt_id)
        .where(
            RolloutGroup.run_id == run.id,
            RolloutGroup.step == record.step,
            RolloutGroup.kind.in_(kinds),
        )
        .order_by(RolloutGroup.id)
    )
    members = [manifest_member(row) for row in rows]
    return [
        member for member in members if within(member.correct / member.size, record.c2, record.c3)
    ]
