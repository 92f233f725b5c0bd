"""The step protocol (design section 6): prompts, groups, batch, commit, rewind.

Every function runs in one transaction that has locked the run, and repeating a call returns the
first answer. The rules are `bapo_core`'s; here they are only given rows and their results kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Row,
    and_,
    cast,
    delete,
    func,
    select,
    update,
)
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import InstrumentedAttribute, Session

from bapo_core.batch import build_batch
from bapo_core.buffers import (
    BufferChange,
    admit_hard,
    admit_high,
    choose_reevaluated,
    eligible_high,
    evict_solved,
    promoted,
)
from bapo_core.config import RunConfig
from bapo_core.filters import gaussian_filter, range_filter, uniform_filter
from bapo_core.metrics import accuracy_bins
from bapo_core.sampling import prompt_positions
from bapo_core.seeding import derive_rng
from bapo_core.thresholds import replay_window, running_reward, within
from bapo_core.types import GroupSummary, Source, TrainingBatch
from services.buffer import difficulty
from services.buffer.api import wire
from services.buffer.api.trajectories import GroupRows
from services.buffer.bulk import insert_columns
from services.buffer.runs import dataset_size, run_config
from services.buffer.tables import (
    BatchMemberRow,
    BufferEntry,
    Checkpoint,
    EvaluationRecord,
    PromptRow,
    RolloutGroup,
    Run,
    StepRecord,
    WeightVersion,
)
from services.common.errors import bad_request, conflict, not_found


def check_step(config: RunConfig, step: int, kind: wire.Kind) -> None:
    """400 unless the schedule has such rollouts at this step."""
    last = config.steps + 1 if kind == "evaluation" else config.steps
    if not 1 <= step <= last:
        raise bad_request(f"step {step} is not in 1..{last}")
    if kind == "reevaluation" and not reevaluates_at(config, step):
        raise bad_request(f"step {step} has no re-evaluation (m = {config.sync.reevaluate_every})")
    if kind == "evaluation" and not config.evaluates_at(step):
        raise bad_request(f"step {step} has no evaluation (every {config.evaluation.every})")


def reevaluates_at(config: RunConfig, step: int) -> bool:
    return config.reevaluate.enabled and config.schedule.reevaluates_at(step)


# ---- prompts ------------------------------------------------------------------------------------


Columns = tuple[InstrumentedAttribute[Any], ...]
_PLACE = (PromptRow.id, PromptRow.uid, PromptRow.position)
_PROMPT = (*_PLACE, PromptRow.task, PromptRow.payload)


def step_prompts(
    session: Session, run: Run, step: int, kind: wire.Kind, generation_round: int
) -> wire.StepPrompts:
    """The prompts to roll out. Re-evaluations depend on the commit of the step before."""
    config = run_config(run)
    check_step(config, step, kind)
    version = config.rollout_version(step, kind)
    undecided = kind == "reevaluation" and run.current_step < step - 1
    if undecided or run.status == "paused":
        return wire.StepPrompts(ready=False, policy_version=version, prompts=[])
    rows = _prompt_rows(session, run, config, step, kind, generation_round, _PROMPT)
    items = [wire.PromptItem(uid=row.uid, task=row.task, payload=row.payload) for row in rows]
    complete = not groups_complete(session, run, step, kind)
    return wire.StepPrompts(ready=True, policy_version=version, prompts=items, complete=complete)


def _prompt_rows(
    session: Session,
    run: Run,
    config: RunConfig,
    step: int,
    kind: wire.Kind,
    generation_round: int,
    columns: Columns,
) -> list[Row[*tuple[Any, ...]]]:
    """`columns` of the prompts of a step and kind, in the order in which they are rolled out."""
    if kind == "reevaluation":
        chosen = [entry.prompt_uid for entry in reevaluated_entries(session, run, config, step)]
        return _rows_by_uid(session, run.train_dataset, chosen, columns)
    if kind == "evaluation":
        statement = select(*columns).where(PromptRow.dataset == run.test_dataset)
        return list(session.execute(statement.order_by(PromptRow.position)))
    positions = prompt_positions(
        config.seed,
        step,
        generation_round,
        dataset_size=dataset_size(session, run.train_dataset),
        prompts_per_step=config.rollout.prompts_per_step,
        max_rounds=config.rollout.max_generation_rounds,
    )
    found = session.execute(
        select(*columns).where(
            PromptRow.dataset == run.train_dataset, PromptRow.position.in_(positions)
        )
    )
    by_position = {row.position: row for row in found}
    return [by_position[position] for position in positions]


def _rows_by_uid(
    session: Session, dataset: str, uids: Sequence[str], columns: Columns
) -> list[Row[*tuple[Any, ...]]]:
    found = session.execute(
        select(*columns).where(PromptRow.dataset == dataset, PromptRow.uid.in_(uids))
    )
    by_uid = {row.uid: row for row in found}
    return [by_uid[uid] for uid in uids]


def reevaluated_entries(
    session: Session, run: Run, config: RunConfig, step: int
) -> list[GroupSummary]:
    """The hard entries re-evaluated at `step`: a function of committed state and the seed."""
    entries = buffer_as_of(session, run, "hard", step - 1)
    rng = derive_rng(config.seed, "reevaluate", step)
    return choose_reevaluated(entries, limit=config.reevaluate.max_prompts, rng=rng)


# ---- groups -------------------------------------------------------------------------------------


def new_groups(
    session: Session, run: Run, step: int, kind: wire.Kind, groups: Sequence[GroupRows]
) -> list[GroupRows]:
    """The groups that have not landed yet; 400 or 409 if any group does not belong here."""
    config = run_config(run)
    check_step(config, step, kind)
    landed = set(
        session.scalars(
            select(PromptRow.uid)
            .join(RolloutGroup, RolloutGroup.prompt_id == PromptRow.id)
            .where(
                RolloutGroup.run_id == run.id,
                RolloutGroup.step == step,
                RolloutGroup.kind == kind,
            )
        )
    )
    new = [group for group in groups if group.prompt_uid not in landed]
    if new and kind != "evaluation" and step <= run.current_step:
        raise conflict(f"step {step} is committed; no group can be added to it")
    size = config.evaluation_samples if kind == "evaluation" else config.rollout.group_size
    version = config.rollout_version(step, kind)
    for group in groups:
        if group.row_count != size:
            raise bad_request(
                f"the group of {group.prompt_uid!r} has {group.row_count} responses, not "
                f"{size}: groups are whole or absent"
            )
        if group.policy_version != version:
            raise bad_request(
                f"the group of {group.prompt_uid!r} was made by policy version "
                f"{group.policy_version}; {kind} groups of step {step} need version {version}"
            )
    return new


Places = dict[str, tuple[int, int]]
"""uid -> (prompt id, position) of every prompt that may be rolled out at a step."""


def places(session: Session, run: Run, step: int, kind: wire.Kind) -> Places:
    """Where groups may land. Those of re-evaluations depend on committed state."""
    config = run_config(run)
    if kind == "reevaluation" and run.current_step < step - 1:
        raise conflict(f"step {step - 1} is not committed; its re-evaluations cannot be known yet")
    rounds = config.rollout.max_generation_rounds if kind == "fresh" else 1
    rows = [
        row
        for generation_round in range(rounds)
        for row in _prompt_rows(session, run, config, step, kind, generation_round, _PLACE)
    ]
    return {row.uid: (row.id, position) for position, row in enumerate(rows)}


def record_groups(
    session: Session,
    run: Run,
    step: int,
    kind: wire.Kind,
    groups: Sequence[GroupRows],
    known: Places,
    object_key: str,
    digest: str,
) -> None:
    """Rows for `groups`, which lie in one object."""
    for group in groups:
        if group.prompt_uid not in known:
            raise bad_request(f"prompt {group.prompt_uid!r} is not a {kind} prompt of step {step}")
    insert_columns(
        session,
        RolloutGroup,
        {
            "run_id": run.id,
            "step": step,
            "kind": kind,
            "object_key": object_key,
            "object_digest": digest,
        },
        {
            "prompt_id": [known[group.prompt_uid][0] for group in groups],
            "position": [known[group.prompt_uid][1] for group in groups],
            "policy_version": [group.policy_version for group in groups],
            "correct": [group.correct for group in groups],
            "size": [group.row_count for group in groups],
            "mean_reward": [group.correct / group.row_count for group in groups],
            "row_start": [group.row_start for group in groups],
            "row_count": [group.row_count for group in groups],
            "token_count": [group.token_count for group in groups],
        },
    )


def groups_complete(session: Session, run: Run, step: int, kind: wire.Kind) -> str:
    """Empty when the step has all its groups of this kind; otherwise what is missing."""
    config = run_config(run)
    mixed_only = RolloutGroup.correct.between(1, RolloutGroup.size - 1)
    landed, mixed = session.execute(
        select(func.count(), func.count().filter(mixed_only)).where(
            RolloutGroup.run_id == run.id, RolloutGroup.step == step, RolloutGroup.kind == kind
        )
    ).one()
    if kind == "fresh":
        return _missing_fresh(config, step, landed, mixed)
    if kind == "evaluation":
        wanted = dataset_size(session, run.test_dataset)
    else:
        wanted = len(reevaluated_entries(session, run, config, step))
    return "" if landed == wanted else f"{landed} of {wanted} {kind} groups of step {step}"


def _missing_fresh(config: RunConfig, step: int, landed: int, mixed: int) -> str:
    """DAPO's dynamic sampling stops early once B groups carry a gradient; whole rounds only."""
    per_round, rounds = config.rollout.prompts_per_step, config.rollout.max_generation_rounds
    done, partial = divmod(landed, per_round)
    if partial == 0 and done >= 1 and (done == rounds or mixed >= config.batch_capacity):
        return ""
    return f"{landed} of up to {per_round * rounds} fresh groups of step {step}"


def record_evaluation(session: Session, run: Run, version: int) -> None:
    """Writes down the complete evaluation of a policy version, so that nobody counts it again."""
    size = run_config(run).evaluation_samples
    found = session.execute(
        select(RolloutGroup.correct, RolloutGroup.token_count).where(
            RolloutGroup.run_id == run.id,
            RolloutGroup.step == version,
            RolloutGroup.kind == "evaluation",
        )
    ).all()
    correct = [row.correct for row in found]
    session.execute(
        insert(EvaluationRecord)
        .values(
            run_id=run.id,
            version=version,
            mean_accuracy=sum(correct) / (len(correct) * size),
            bins=accuracy_bins(correct, size),
            prompts=len(correct),
            tokens=sum(row.token_count for row in found),
        )
        .on_conflict_do_nothing(index_elements=["run_id", "version"])
    )


# ---- batch --------------------------------------------------------------------------------------


def build(session: Session, run: Run, step: int) -> wire.BatchManifest:
    """The training batch of `step`: X1, X2 and X3, built once and recorded."""
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
        missing = groups_complete(session, run, step, "fresh")
        if not missing and reevaluates_at(config, step):
            missing = groups_complete(session, run, step, "reevaluation")
        if missing:
            return wire.BatchManifest(ready=False, step=step, members=[], missing=missing)
        record = _record_batch(session, run, config, step)
    return _manifest(session, run, config, record)


def recorded_batch(session: Session, run: Run, step: int) -> wire.BatchManifest | None:
    """The batch of `step` if it has been built."""
    record = session.get(StepRecord, (run.id, step))
    return None if record is None else _manifest(session, run, run_config(run), record)


def _record_batch(session: Session, run: Run, config: RunConfig, step: int) -> StepRecord:
    fresh = summaries(session, run, step, "fresh")
    reevaluated = summaries(session, run, step, "reevaluation")
    r_tot = _r_tot(session, run, config, step, fresh)
    window = _window(config, r_tot)
    batch = _compose(session, run, config, step, fresh, reevaluated, window)
    counts = {
        "rolled_out": len(fresh),
        "reevaluated_total": len(reevaluated),
        **{source.value: batch.counts[source] for source in Source},
    }
    bins = accuracy_bins([group.correct for group in fresh], config.rollout.group_size)
    record = StepRecord(
        run_id=run.id,
        step=step,
        bins=bins,
        r_tot=r_tot,
        c2=window[0],
        c3=window[1],
        counts=counts,
        rollouts=sum(group.size for group in (*fresh, *reevaluated)),
        tokens=_token_count(session, run, step),
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
    stored = {
        entry.prompt_uid: entry
        for entry in reevaluated_entries(session, run, config, step)
        if reevaluated
    }
    x2 = [group for group in reevaluated if promotes(config, stored[group.prompt_uid], group)]
    candidates: list[GroupSummary] = []
    if config.replay.enabled:
        candidates = eligible_high(
            buffer_as_of(session, run, "high_quality", step - 1),
            step=step,
            window=window,
            max_age=config.high_quality_buffer.max_age,
        )
    return build_batch(
        filtered(config, step, fresh),
        x2,
        candidates,
        capacity=config.batch_capacity,
        window=window,
        c1=config.reevaluate.c1 if config.reevaluate.rule == "paper" else None,
        rng=derive_rng(config.seed, "batch", step),
        dedup=config.batch.dedup,
    )


def promotes(config: RunConfig, stored: GroupSummary, new: GroupSummary) -> bool:
    """Whether a re-evaluated hard prompt enters X2."""
    return promoted(stored, new, rule=config.reevaluate.rule, c1=config.reevaluate.c1)


def filtered(config: RunConfig, step: int, fresh: Sequence[GroupSummary]) -> list[GroupSummary]:
    """The online filter of A.3."""
    rng = derive_rng(config.seed, "filter", step)
    match config.fresh.filter:
        case "range":
            return range_filter(fresh)
        case "gaussian":
            return gaussian_filter(
                fresh, mean=config.fresh.gaussian_mean, sigma=config.fresh.gaussian_sigma, rng=rng
            )
        case "uniform":
            return uniform_filter(fresh, fraction=config.fresh.uniform_fraction, rng=rng)
        case "none":
            return list(fresh)


def _window(config: RunConfig, r_tot: float) -> tuple[float, float]:
    settings = config.replay_window
    return replay_window(r_tot, settings.c2_range, settings.c3_range, settings.direction)


def _r_tot(
    session: Session, run: Run, config: RunConfig, step: int, fresh: Sequence[GroupSummary]
) -> float:
    before = session.get(StepRecord, (run.id, step - 1))
    stored: list[GroupSummary] = []
    if config.replay_window.r_tot == "buffer":
        for buffer in ("hard", "high_quality"):
            stored += buffer_as_of(session, run, buffer, step - 1)
    return running_reward(
        config.replay_window.r_tot,
        fresh,
        previous=None if before is None else before.r_tot,
        buffer=stored,
        ema_decay=config.replay_window.ema_decay,
    )


def _manifest(
    session: Session, run: Run, config: RunConfig, record: StepRecord
) -> wire.BatchManifest:
    members = session.execute(
        select(BatchMemberRow.source, *_LOCATION)
        .join(BatchMemberRow, BatchMemberRow.group_id == RolloutGroup.id)
        .join(PromptRow, PromptRow.id == RolloutGroup.prompt_id)
        .where(BatchMemberRow.run_id == run.id, BatchMemberRow.step == record.step)
        .order_by(BatchMemberRow.position)
    )
    manifest = wire.BatchManifest(
        ready=True,
        step=record.step,
        members=[_member(row) for row in members],
        r_tot=record.r_tot,
        c2=record.c2,
        c3=record.c3,
        counts=record.counts,
    )
    if config.loss.ratio == "decoupled":
        manifest.record_proximal = _replayable(session, run, config, record)
    return manifest


def _replayable(
    session: Session, run: Run, config: RunConfig, record: StepRecord
) -> list[wire.ManifestMember]:
    """This step's groups that its commit will admit to B_high."""
    if not config.replay.enabled:
        return []
    kinds = ["fresh", "reevaluation"] if config.hard_buffer.store_new_in_high else ["fresh"]
    rows = session.execute(
        select(RolloutGroup.kind.label("source"), *_LOCATION)
        .join(PromptRow, PromptRow.id == RolloutGroup.prompt_id)
        .where(
            RolloutGroup.run_id == run.id,
            RolloutGroup.step == record.step,
            RolloutGroup.kind.in_(kinds),
        )
        .order_by(RolloutGroup.id)
    )
    members = [_member(row) for row in rows]
    return [
        member for member in members if within(member.correct / member.size, record.c2, record.c3)
    ]


def group_location(session: Session, run: Run, group_id: int) -> wire.ManifestMember | None:
    """One group as a batch would have it; its kind stands for the source."""
    row = session.execute(
        select(RolloutGroup.kind.label("source"), *_LOCATION)
        .join(PromptRow, PromptRow.id == RolloutGroup.prompt_id)
        .where(RolloutGroup.run_id == run.id, RolloutGroup.id == group_id)
    ).first()
    return None if row is None else _member(row)


_LOCATION = (
    RolloutGroup.id.label("group_id"),
    PromptRow.uid.label("prompt_uid"),
    RolloutGroup.step,
    RolloutGroup.policy_version,
    RolloutGroup.correct,
    RolloutGroup.size,
    RolloutGroup.object_key,
    RolloutGroup.object_digest,
    RolloutGroup.row_start,
    RolloutGroup.row_count,
    RolloutGroup.token_count.label("tokens"),
    RolloutGroup.proximal_key,
    RolloutGroup.proximal_digest,
)
"""With a `source`, the fields of a ManifestMember."""


def _member(row: Row[*tuple[Any, ...]]) -> wire.ManifestMember:
    return wire.ManifestMember(**row._mapping)


def record_proximal(
    session: Session, run: Run, step: int, group_ids: Sequence[int], key: str, digest: str
) -> None:
    """Notes where the storage-step log-probs of these groups are; 404 unless all are of `step`."""
    found = session.scalars(
        update(RolloutGroup)
        .where(
            RolloutGroup.run_id == run.id,
            RolloutGroup.step == step,
            RolloutGroup.id.in_(group_ids),
        )
        .values(proximal_key=key, proximal_digest=digest)
        .returning(RolloutGroup.id)
    )
    unknown = sorted(set(group_ids) - set(found))
    if unknown:
        raise not_found(f"group {unknown[0]} among those of step {step} ({len(unknown)} unknown)")


# ---- commit -------------------------------------------------------------------------------------


def commit(session: Session, run: Run, step: int, metrics: dict[str, float]) -> None:
    """Closes the step: difficulty, admissions, evictions, `current_step`. Once."""
    if step <= run.current_step:
        return
    record = session.get(StepRecord, (run.id, step))
    if record is None or step != run.current_step + 1:
        raise conflict(f"step {step} has no batch to commit (last committed: {run.current_step})")
    config = run_config(run)
    record.metrics = metrics
    record.committed_at = datetime.now(UTC)
    _settle_buffers(session, run, config, record)
    record.difficulty_bins = difficulty.update(session, run, step)
    run.current_step = step


def _settle_buffers(session: Session, run: Run, config: RunConfig, record: StepRecord) -> None:
    """After the update: solved prompts leave, this step's unfiltered fresh groups come in."""
    step = record.step
    fresh = summaries(session, run, step, "fresh")
    reevaluated = summaries(session, run, step, "reevaluation")
    if config.reevaluate.enabled:
        hard = buffer_as_of(session, run, "hard", step - 1)
        solved = evict_solved(
            hard,
            {group.prompt_uid: group for group in reevaluated},
            after=config.hard_buffer.after,
            c1=config.reevaluate.c1,
        )
        _apply(session, run, "hard", step, BufferChange(admitted=[], evicted=solved))
        gone = {group.group_id for group, _ in solved}
        change = admit_hard(
            [entry for entry in hard if entry.group_id not in gone],
            fresh,
            c1=config.reevaluate.c1,
            capacity=config.hard_capacity,
            dedup=config.batch.dedup,
        )
        _apply(session, run, "hard", step, change)
    if config.replay.enabled:
        change = admit_high(
            buffer_as_of(session, run, "high_quality", step - 1),
            [*fresh, *(reevaluated if config.hard_buffer.store_new_in_high else [])],
            window=(record.c2, record.c3),
            capacity=config.high_quality_buffer.capacity,
            max_age=config.high_quality_buffer.max_age,
            step=step,
            dedup=config.batch.dedup,
        )
        _apply(session, run, "high_quality", step, change)


def _apply(
    session: Session, run: Run, buffer: wire.BufferName, step: int, change: BufferChange
) -> None:
    insert_columns(
        session,
        BufferEntry,
        {"run_id": run.id, "buffer": buffer, "inserted_step": step},
        {
            "group_id": [group.group_id for group in change.admitted],
            "mean_reward": [group.mean_reward for group in change.admitted],
        },
    )
    reasons: dict[str, list[int]] = {}
    for group, reason in change.evicted:
        reasons.setdefault(reason.value, []).append(group.group_id)
    for name, group_ids in reasons.items():
        session.execute(
            update(BufferEntry)
            .where(
                BufferEntry.run_id == run.id,
                BufferEntry.buffer == buffer,
                BufferEntry.group_id.in_(group_ids),
                BufferEntry.evicted_step.is_(None),
            )
            .values(evicted_step=step, eviction_reason=name)
        )


# ---- rewind -------------------------------------------------------------------------------------


def rewind(session: Session, run: Run, step: int) -> None:
    """Undoes everything after the commit of `step`, exactly."""
    if step > run.current_step:
        raise conflict(f"cannot rewind to step {step}: step {run.current_step} is the last one")
    touched = difficulty.forget(session, run, step)
    for table in (BatchMemberRow, StepRecord, Checkpoint):
        session.execute(delete(table).where(table.run_id == run.id, table.step > step))
    session.execute(
        delete(BufferEntry).where(BufferEntry.run_id == run.id, BufferEntry.inserted_step > step)
    )
    session.execute(
        update(BufferEntry)
        .where(BufferEntry.run_id == run.id, BufferEntry.evicted_step > step)
        .values(evicted_step=None, eviction_reason=None)
    )
    session.execute(
        delete(RolloutGroup).where(RolloutGroup.run_id == run.id, RolloutGroup.step > step)
    )
    session.execute(
        delete(EvaluationRecord).where(
            EvaluationRecord.run_id == run.id, EvaluationRecord.version > step
        )
    )
    session.execute(
        delete(WeightVersion).where(
            WeightVersion.run_id == run.id, WeightVersion.version > step + 1
        )
    )
    run.current_step = step
    difficulty.restore(session, run, step, touched)


# ---- reading ------------------------------------------------------------------------------------


def buffer_as_of(
    session: Session, run: Run, buffer: wire.BufferName, step: int
) -> list[GroupSummary]:
    """The buffer after the commit of `step`, oldest first."""
    rows = session.execute(
        select(*_SUMMARY)
        .join(BufferEntry, BufferEntry.group_id == RolloutGroup.id)
        .join(PromptRow, PromptRow.id == RolloutGroup.prompt_id)
        .where(in_buffer(run, buffer, step))
        .order_by(RolloutGroup.step, RolloutGroup.position, RolloutGroup.kind)
    )
    return [GroupSummary(*row) for row in rows]


def in_buffer(run: Run, buffer: wire.BufferName, step: int) -> ColumnElement[bool]:
    """The entries whose stay contains `step`. The present has an index of its own."""
    if step >= run.current_step:
        stays = BufferEntry.evicted_step.is_(None)
    else:
        stay = func.int8range(BufferEntry.inserted_step, BufferEntry.evicted_step)
        stays = stay.op("@>")(cast(step, BigInteger))
    return and_(BufferEntry.run_id == run.id, BufferEntry.buffer == buffer, stays)


def summaries(session: Session, run: Run, step: int, kind: wire.Kind) -> list[GroupSummary]:
    """The groups of a step in the order their prompts were drawn, however they arrived."""
    rows = session.execute(
        select(*_SUMMARY)
        .join(PromptRow, PromptRow.id == RolloutGroup.prompt_id)
        .where(RolloutGroup.run_id == run.id, RolloutGroup.step == step, RolloutGroup.kind == kind)
        .order_by(RolloutGroup.position)
    )
    return [GroupSummary(*row) for row in rows]


# The fields of a GroupSummary, in their order. Whole rows would take twice as long.
_SUMMARY = (
    RolloutGroup.id,
    PromptRow.uid,
    RolloutGroup.step,
    RolloutGroup.correct,
    RolloutGroup.size,
    RolloutGroup.policy_version,
)


def _token_count(session: Session, run: Run, step: int) -> int:
    counted = select(func.coalesce(func.sum(RolloutGroup.token_count), 0)).where(
        RolloutGroup.run_id == run.id,
        RolloutGroup.step == step,
        RolloutGroup.kind != "evaluation",
    )
    return int(session.scalar(counted) or 0)
