"""Forks: new runs whose past, up to a step, is that of another run.

Nothing of the past is copied. The rows of its steps stay rows of the parent, and queries find them
by the fork's lineage (`storage.lineage`); objects are shared. A fork gets rows of its own for what
its commits change or its retention rules delete: the entries of the buffers, the checkpoint and the
weights that it begins with.

The past does not change: a fork is at a step that no attempt of the parent trains again, and a run
with forks cannot be deleted.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import ColumnElement, func, insert, literal, select
from sqlalchemy.orm import Session

from bapo_core.config import ConfigError, ConfigHistory
from bapo_core.selection import check_data_rules
from services.buffer.api import digest_chain, wire
from services.buffer.queries import difficulty
from services.buffer.queries.evaluations import record_evaluation
from services.buffer.runs.lifecycle import step_to_continue_from
from services.buffer.runs.runs import lock_any_attempt
from services.buffer.steps.buffers import share_entries
from services.buffer.steps.samplers import continue_results
from services.buffer.storage.artifacts import share_artifacts
from services.buffer.storage.datasets import dataset_size
from services.buffer.storage.tables import (
    BufferEntry,
    Checkpoint,
    EvaluationRecord,
    PromptRow,
    RolloutGroup,
    Run,
    StepRecord,
    WeightVersion,
)
from services.common.problems import Problem, bad_request, conflict

DERIVED_AT_ONCE = 200_000
"""Most groups of a past whose prompts' difficulty a fork derives when it is made; deriving more
takes seconds, and happens when its first attempt begins."""


def fork_run(session: Session, name: str, request: wire.ForkRequest, *, by: str) -> Run:
    """Makes a fork of run `name`; returns the existing one if it was made by the same request.

    by: who makes it.

    Raises 404 if there is no run `name`; 409 for a step that an attempt of it may train again, for
    weights that are not stored any more, and if a run of the fork's name exists; and 422 for keys
    that the past depends on, and for values that are not valid.
    """
    named = lock_any_attempt(session, name)
    if named.status == "deleting":
        raise conflict(f"run {name!r} is being deleted; its past cannot be shared any more")
    parent = named.of_step(request.step)
    if parent is not named:
        parent = lock_any_attempt(session, parent.name)
    _check_step(named, parent, request.step)
    _check_rollouts(named, request)
    values = _plan_values(named, request, by)
    existing = session.scalar(select(Run).where(Run.name == request.name))
    if existing is not None:
        return _same_fork(existing, parent, request, values)
    checkpoint = _checkpoint_before(parent, request.step)
    fork = Run(
        name=request.name,
        config_json=named.config_json,
        changes_json=values,
        train_dataset=named.train_dataset,
        test_datasets=named.test_datasets,
        current_step=request.step,
        parent_id=parent.id,
        fork_step=request.step,
        fork_checkpoint=checkpoint,
        rollouts_until=request.rollouts_until,
        workflow=request.workflow,
    )
    session.add(fork)
    session.flush()
    _check_rules(fork)
    share_artifacts(fork, parent, checkpoint, request.step + 1)
    _copy_rollouts(fork, named)
    share_entries(fork, parent, request.step)
    _share_evaluations(fork, parent, request.step + 1)
    _check_storage_logprobs(fork, request.step)
    continue_results(fork, request.step)
    if _count_groups(fork) <= DERIVED_AT_ONCE:
        difficulty.derive_past(fork)
    return fork


def _check_step(named: Run, parent: Run, step: int) -> None:
    """Raises 409 unless the step is committed, and before the parent's last checkpoint."""
    if step > named.current_step:
        raise conflict(
            f"step {step} of run {named.name!r} is not committed; the last committed step is "
            f"{named.current_step}"
        )
    if parent is not named:
        return  # Its rows up to the fork of `named` do not change.
    kept = step_to_continue_from(parent)
    if step > kept:
        found = f"is of step {kept}" if kept else "is not written yet"
        remedy = f"fork at step {kept}, or wait" if kept else "wait"
        raise conflict(
            f"the last checkpoint of run {parent.name!r} {found}, so that an attempt that resumes "
            f"the run would train step {step} again; {remedy} for the next checkpoint"
        )


def _check_rollouts(named: Run, request: wire.ForkRequest) -> None:
    """Raises 409 unless the groups that the fork is to be trained on are recorded."""
    last = request.rollouts_until
    if last is None:
        return
    if last > named.current_step:
        raise conflict(
            f"run {named.name!r} has rollouts of all its steps to {named.current_step} only, not "
            f"to {last}; end at {named.current_step}"
        )
    if last <= request.step:
        raise conflict(
            f"steps {request.step + 1} to {last} are none; end at step {request.step + 1} or later"
        )


def _copy_rollouts(fork: Run, named: Run) -> None:
    """Gives a fork the training groups of its parent's next steps, as rows of its own.

    Their objects are shared. Log-probs of the parent's trainer are not, because the fork's trainer
    records its own.
    """
    if fork.rollouts_until is None:
        return
    assert fork.fork_step is not None
    for ancestor in named.lineage:
        first = max(ancestor.first_step, fork.fork_step + 1)
        last = fork.rollouts_until
        if ancestor.last_step is not None:
            last = min(last, ancestor.last_step)
        _copy_groups(
            fork,
            RolloutGroup.run_id == ancestor.run_id,
            RolloutGroup.step.between(first, last),
            RolloutGroup.kind != "evaluation",
        )


def _copy_groups(fork: Run, *conditions: ColumnElement[bool]) -> None:
    """Copies the rows of groups, without the log-probs that a trainer recorded for them."""
    columns = [
        column
        for column in RolloutGroup.__table__.columns
        if column.key not in ("id", "run_id", "created_at", "proximal_key", "proximal_digest")
    ]
    groups = (
        select(literal(fork.id), *columns)
        .join(PromptRow, PromptRow.id == RolloutGroup.prompt_id)
        .where(*conditions)
        .order_by(RolloutGroup.id)
    )
    keys = ["run_id", *(column.key for column in columns)]
    fork.session.execute(insert(RolloutGroup).from_select(keys, groups))


def _plan_values(named: Run, request: wire.ForkRequest, by: str) -> list[dict[str, Any]]:
    """Returns the changes of the fork's configuration: the run's, and that of the fork."""
    history = ConfigHistory(named.config, named.changes)
    try:
        change = history.plan_fork(request.values, request.step, request.name)
    except ConfigError as error:
        raise Problem(422, "Invalid fork", str(error)) from error
    recorded = wire.RecordedChange(
        **change.model_dump(), attempt=0, by=by, at=datetime.now(UTC), digest="0" * 64
    )
    return [
        change.model_dump(mode="json")
        for change in digest_chain.add_change(named.config_json, named.changes, recorded)
    ]


def _same_fork(
    existing: Run, parent: Run, request: wire.ForkRequest, values: list[dict[str, Any]]
) -> Run:
    """Returns a run that is the requested fork already; raises 409 for any other run."""
    is_fork = (
        existing.parent_id == parent.id
        and existing.fork_step == request.step
        and existing.rollouts_until == request.rollouts_until
    )
    # The existing fork may have been changed since.
    made = existing.changes_json[: len(values)]
    if is_fork and [*map(_changed_keys, made)] == [*map(_changed_keys, values)]:
        return existing
    raise conflict(
        f"run {request.name!r} exists, and is not this fork of run {parent.name!r} at step "
        f"{request.step}; choose another name"
    )


def _changed_keys(change: Mapping[str, Any]) -> dict[str, Any]:
    return {key: change[key] for key in ("first_step", "old", "new")}


def _checkpoint_before(parent: Run, step: int) -> int:
    """Returns the step of the last checkpoint up to a step; 0 is the initial model."""
    first = parent.fork_step or 0
    found = parent.session.scalar(
        select(func.max(Checkpoint.step)).where(
            Checkpoint.run_id == parent.id, Checkpoint.step.between(first, step)
        )
    )
    if found is None and first:
        assert parent.parent is not None
        raise conflict(
            f"run {parent.name!r} keeps no checkpoint between its own beginning, as a fork at step "
            f"{first}, and step {step}, to train on from; fork run {parent.parent.name!r} at step "
            f"{first}, or run {parent.name!r} at a step from its oldest kept checkpoint on "
            f"(`bapo checkpoints {parent.name}`)"
        )
    return found or 0


def _check_rules(fork: Run) -> None:
    """Raises 422 if data rules cannot be used, and 400 for fewer prompts than a step may draw."""
    try:
        check_data_rules(fork.config)
    except ConfigError as error:
        raise Problem(422, "Invalid fork", str(error)) from error
    prompts = dataset_size(fork.session, fork.train_dataset)
    if prompts < fork.config.prompts_needed:
        raise bad_request(
            f"dataset {fork.train_dataset!r} has {prompts} prompts, but "
            f"{fork.config.explain_prompts_needed()}; lower one of these keys"
        )


def _check_storage_logprobs(fork: Run, step: int) -> None:
    """Raises 422 if replayed groups of the past lack the log-probs that the loss compares with."""
    if fork.config.loss.correction.kind != "decoupled" or fork.config.replay.select == "off":
        return
    stored = fork.session.scalar(
        select(RolloutGroup.step)
        .join(BufferEntry, BufferEntry.group_id == RolloutGroup.id)
        .where(
            BufferEntry.run_id == fork.id,
            BufferEntry.buffer == "high_quality",
            RolloutGroup.proximal_key.is_(None),
        )
        .order_by(RolloutGroup.step)
        .limit(1)
    )
    if stored is not None:
        raise Problem(
            422,
            "Invalid fork",
            f"loss.correction.kind=decoupled cannot begin with this fork: the group of step "
            f"{stored}, which is in the high-quality buffer after step {step}, was stored without "
            "the trainer's log-probs; leave loss.correction as it is, or fork at a step after "
            "which the buffer is empty",
        )


def _share_evaluations(fork: Run, parent: Run, version: int) -> None:
    """Gives a fork the evaluations of the weights that it begins with, as far as they are complete.

    They are rows of its own, because the version is the first one of the fork.
    """
    if fork.session.get(WeightVersion, (fork.id, version)) is None:
        return
    names = fork.session.scalars(
        select(EvaluationRecord.evaluation_set).where(
            EvaluationRecord.run_id == parent.id, EvaluationRecord.version == version
        )
    )
    for name in names.all():
        if name not in fork.config.evaluation_sets_at(version):
            continue
        _copy_groups(
            fork,
            RolloutGroup.run_id == parent.id,
            RolloutGroup.step == version,
            RolloutGroup.kind == "evaluation",
            PromptRow.dataset == parent.test_datasets[name],
        )
        record_evaluation(fork, version, name)


def _count_groups(fork: Run) -> int:
    """Returns the number of training groups of the past, without a scan of them."""
    generated = (
        StepRecord.counts["rolled_out"].as_integer()
        + StepRecord.counts["reevaluated_total"].as_integer()
    )
    return sum(
        fork.session.scalar(
            select(func.coalesce(func.sum(generated), 0)).where(
                StepRecord.run_id == ancestor.run_id, StepRecord.step <= ancestor.last_step
            )
        )
        or 0
        for ancestor in fork.lineage[1:]
    )
