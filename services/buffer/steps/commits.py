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

from services.buffer.api import digest_chain, wire
from services.buffer.queries import difficulty
from services.buffer.steps import samplers
from services.buffer.steps.buffers import apply_change
from services.buffer.steps.step_state import settle_step
from services.buffer.storage import artifacts
from services.buffer.storage.tables import (
    BatchMemberRow,
    BufferEntry,
    Checkpoint,
    EvaluationRecord,
    RolloutGroup,
    Run,
    StepRecord,
)
from services.common.problems import conflict


def commit_step(run: Run, step: int, commit: wire.Commit) -> None:
    """Closes a step: updates difficulty and buffers, and advances `current_step`.

    Does nothing if the step is committed already. Raises 409 unless it is the next step and has a
    batch.
    """
    if step <= run.current_step:
        return
    record = run.session.get(StepRecord, (run.id, step))
    if record is None or step != run.current_step + 1:
        raise conflict(
            f"step {step} has no batch to commit (last committed step: {run.current_step})"
        )
    record.metrics = commit.metrics | samplers.update(run, step) | _count_responses(run, step)
    if commit.digests is not None:
        before = run.session.get(StepRecord, (run.of_step(step - 1).id, step - 1))
        previous = None if before is None or before.digests is None else before.digests["chain"]
        link = digest_chain.link(previous, run.config_json, step, commit.digests, run.changes)
        record.digests = link.model_dump()
    record.committed_at = datetime.now(UTC)
    for buffer, changes in settle_step(run, record).items():
        for change in changes:
            apply_change(run, buffer, step, change)
    record.difficulty_bins = difficulty.update(run, step)
    run.current_step = step


def _count_responses(run: Run, step: int) -> dict[str, float]:
    """Returns metrics of the responses of a step's groups, evaluations aside.

    `responses/cut_off` is the share that reached the largest number of tokens, and
    `rollouts/repeated` how often responses were sampled or scored again, in all and by cause.
    """
    groups = run.session.execute(
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


def _refuse_shared_steps(run: Run, step: int) -> None:
    if run.fork_step is not None and step < run.fork_step:
        raise conflict(
            f"cannot rewind to step {step}: the steps up to {run.fork_step} are those of the run "
            f"that {run.name!r} is a fork of"
        )
    fork = run.session.scalar(
        select(Run).where(Run.parent_id == run.id, Run.fork_step > step).limit(1)
    )
    if fork is not None:
        raise conflict(
            f"cannot rewind to step {step}: the steps up to {fork.fork_step} are the past of the "
            f"fork {fork.name!r}; delete it first"
        )


def rewind_run(run: Run, step: int) -> None:
    """Undoes everything after the commit of `step` but the groups that are made for later steps.

    Those of policy version step + 1, which the checkpoint holds, or earlier stay valid. Later
    versions and their groups are set aside until the trainer publishes these versions again
    (`artifacts.publish_weights`). Raises 409 if `step` is not committed, and if a later step is in
    the past of a fork, or is in that of this run.
    """
    if step > run.current_step:
        raise conflict(
            f"cannot rewind to step {step}: the last committed step is {run.current_step}"
        )
    _refuse_shared_steps(run, step)
    prompt_ids = difficulty.forget(run, step)
    samplers.forget(run, step)
    for table in (BatchMemberRow, StepRecord, Checkpoint):
        run.session.execute(delete(table).where(table.run_id == run.id, table.step > step))
    run.session.execute(
        delete(BufferEntry).where(BufferEntry.run_id == run.id, BufferEntry.inserted_step > step)
    )
    run.session.execute(
        update(BufferEntry)
        .where(BufferEntry.run_id == run.id, BufferEntry.evicted_step > step)
        .values(evicted_step=None, eviction_reason=None)
    )
    run.session.execute(
        update(RolloutGroup)
        .where(RolloutGroup.run_id == run.id, RolloutGroup.step > step)
        .values(proximal_key=None, proximal_digest=None)
    )
    run.session.execute(
        delete(EvaluationRecord).where(
            EvaluationRecord.run_id == run.id, EvaluationRecord.version > step + 1
        )
    )
    artifacts.set_weights_aside(run, step + 1)
    run.current_step = step
    difficulty.restore(run, step, prompt_ids)
