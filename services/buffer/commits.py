"""Commits, which advance the state of a run by a step, and rewinds, which undo commits.

Both run in one transaction that has locked the run. A repeated commit changes nothing; a rewind
restores the rows as they were after the commit of an earlier step. It keeps groups of later steps,
as if they had been generated ahead of the trainer: prompts are a function of the seed and of state
that the repeated steps restore, so a group is valid if the weights that made it are.
"""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime

from sqlalchemy import delete, select, update
from sqlalchemy.orm import Session

from bapo_core.buffers import (
    BufferChange,
    EvictionReason,
    admit_hard,
    admit_high,
    evict_solved,
)
from bapo_core.config import RunConfig
from services.buffer import artifacts, difficulty, samplers
from services.buffer.api import digest_chain, wire
from services.buffer.buffers import apply_change, buffer_as_of
from services.buffer.demonstrations import supervised_entries
from services.buffer.runs import run_config
from services.buffer.stored_groups import read_summaries
from services.buffer.tables import (
    BatchMemberRow,
    BufferEntry,
    Checkpoint,
    EvaluationRecord,
    RolloutGroup,
    Run,
    StepRecord,
)
from services.common.problems import conflict


def commit_step(session: Session, run: Run, step: int, commit: wire.Commit) -> None:
    """Closes a step: updates difficulty and buffers, and advances `current_step`.

    Does nothing if the step is committed already. Raises 409 unless it is the next step and has a
    batch.
    """
    if step <= run.current_step:
        return
    record = session.get(StepRecord, (run.id, step))
    if record is None or step != run.current_step + 1:
        raise conflict(
            f"step {step} has no batch to commit (last committed step: {run.current_step})"
        )
    config = run_config(run)
    record.metrics = (
        commit.metrics
        | samplers.update(session, run, config, step)
        | _count_responses(session, run, step)
    )
    if commit.digests is not None:
        before = session.get(StepRecord, (run.id, step - 1))
        previous = None if before is None or before.digests is None else before.digests["chain"]
        link = digest_chain.link(previous, run.config, step, commit.digests)
        record.digests = link.model_dump()
    record.committed_at = datetime.now(UTC)
    _update_buffers(session, run, config, record)
    record.difficulty_bins = difficulty.update(session, run, step)
    run.current_step = step


def _count_responses(session: Session, run: Run, step: int) -> dict[str, float]:
    """Returns metrics of the responses of a step's groups, evaluations aside.

    `responses/cut_off` is the share that reached the largest number of tokens, and
    `rollouts/repeated` how often responses were sampled or scored again, in all and by cause.
    """
    groups = session.execute(
        select(RolloutGroup.size, RolloutGroup.cut_off, RolloutGroup.repeated).where(
            RolloutGroup.run_id == run.id,
            RolloutGroup.step == step,
            RolloutGroup.kind != "evaluation",
        )
    ).all()
    repeated: Counter[str] = Counter()
    for group in groups:
        repeated.update(group.repeated)
    responses = sum(group.size for group in groups)
    cut_off = sum(group.cut_off or 0 for group in groups)
    return {
        "responses/cut_off": cut_off / max(1, responses),
        "rollouts/repeated": float(repeated.total()),
        **{f"rollouts/repeated/{cause}": float(count) for cause, count in repeated.items()},
    }


def _update_buffers(session: Session, run: Run, config: RunConfig, record: StepRecord) -> None:
    """Evicts solved prompts, then admits the step's unfiltered fresh groups."""
    step = record.step
    fresh = read_summaries(session, run, step, "fresh")
    reevaluated = read_summaries(session, run, step, "reevaluation")
    if config.keeps_hard_buffer:
        hard = buffer_as_of(session, run, "hard", step - 1)
        solved = evict_solved(
            hard,
            {group.prompt_uid: group for group in reevaluated},
            after=config.hard_buffer.after,
            c1=config.reevaluate.c1,
        )
        supervised = supervised_entries(session, run, config, step)
        left = [*solved, *((entry, EvictionReason.SUPERVISED) for entry in supervised)]
        change = BufferChange(admitted=[], evicted=left)
        apply_change(session, run, "hard", step, change)
        change = admit_hard(
            change.apply(hard),
            fresh,
            c1=config.reevaluate.c1,
            capacity=config.hard_capacity,
            dedup=config.batch.dedup,
        )
        apply_change(session, run, "hard", step, change)
    if config.replays_at(step + 1):
        change = admit_high(
            buffer_as_of(session, run, "high_quality", step - 1),
            [*fresh, *(reevaluated if config.hard_buffer.store_new_in_high else [])],
            window=(record.c2, record.c3),
            capacity=config.high_quality_buffer.capacity,
            max_age=config.high_quality_buffer.max_age,
            step=step,
            dedup=config.batch.dedup,
        )
        apply_change(session, run, "high_quality", step, change)


def rewind_run(session: Session, run: Run, step: int) -> None:
    """Undoes everything after the commit of `step` but the groups that are made for later steps.

    Those of policy version step + 1, which the checkpoint holds, or earlier stay valid. Later
    versions and their groups are set aside until the trainer publishes these versions again
    (`artifacts.publish_weights`). Raises 409 if `step` is not committed.
    """
    if step > run.current_step:
        raise conflict(
            f"cannot rewind to step {step}: the last committed step is {run.current_step}"
        )
    prompt_ids = difficulty.forget(session, run, step)
    samplers.forget(session, run, step)
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
        update(RolloutGroup)
        .where(RolloutGroup.run_id == run.id, RolloutGroup.step > step)
        .values(proximal_key=None, proximal_digest=None)
    )
    session.execute(
        delete(EvaluationRecord).where(
            EvaluationRecord.run_id == run.id, EvaluationRecord.version > step + 1
        )
    )
    artifacts.set_weights_aside(session, run, step + 1)
    run.current_step = step
    difficulty.restore(session, run, step, prompt_ids)
