"""The life of a run after its creation: attempts, pause, resume, stop, end, deletion."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import and_, case, delete, func, or_, select, tuple_
from sqlalchemy.orm import Session

from bapo_core.config import ConfigChange, ConfigError, ConfigHistory
from services.buffer.api import digest_chain, wire
from services.buffer.api.wire import ACTIVE_STATUSES, OPEN_STATUSES, UNFINISHED_STATUSES
from services.buffer.queries import difficulty
from services.buffer.runs import tokens
from services.buffer.runs.runs import describe_stop, how_to_continue, lock_any_attempt, lock_run
from services.buffer.service import Service
from services.buffer.steps.commits import rewind_run
from services.buffer.storage.artifacts import latest_checkpoint
from services.buffer.storage.tables import (
    BatchMemberRow,
    BufferEntry,
    PromptDifficulty,
    RolloutGroup,
    Run,
)
from services.common import layout
from services.common.objectstore import ObjectStoreError, ObjectStoreUnavailable
from services.common.problems import Problem, conflict

QUEUE_TIMEOUT = timedelta(minutes=1)
"""A queued run whose last request is older than this has lost its place in the queue."""
TURN_LOCK = 0x6261706F
"""Key of the advisory lock that lets one run at a time take its turn."""


def begin_attempt(session: Session, name: str, *, reopen: bool) -> Run:
    """Supersedes all processes of the run and rewinds it to its last checkpoint.

    Both happen in one transaction, so no process sees the new attempt with the old state. A paused
    run stays paused, unless `reopen` is true.

    Raises 409 while the run is being deleted, and for a run that was stopped or has failed, unless
    `reopen` is true.
    """
    run = lock_any_attempt(session, name)
    _refuse_deleting(run)
    if not reopen:
        _refuse_ended(run)
    if reopen or run.status != "paused":
        run.status = "running"
    _begin_attempt(run)
    _forget_stop(run)
    return run


def _begin_attempt(run: Run) -> None:
    run.attempt += 1
    run.attempt_began_at = datetime.now(UTC)
    difficulty.derive_past(run)
    rewind_run(run, step_to_continue_from(run))


def step_to_continue_from(run: Run) -> int:
    """Returns the step of the last checkpoint; 0 without one, and not below that of a fork."""
    checkpoint = latest_checkpoint(run)
    return max(0 if checkpoint is None else checkpoint.number, run.fork_step or 0)


def change_config(
    session: Session,
    name: str,
    values: Mapping[str, Any],
    *,
    by: str,
    claim: wire.WorkflowClaim | None = None,
) -> Run:
    """Gives keys of the configuration new values, from the step after the last checkpoint on.

    It begins an attempt, as steps after the checkpoint have been trained with the old values. A run
    that is finished and gets more steps is stopped, for a new attempt to continue it. Keys that
    have these values already change nothing.

    values: by dotted key. by: who changes them. claim: the workflow that does.

    Raises 409 while the run is being deleted, and for a run that another workflow trains; and 422
    for keys that may not change and for values that are not valid.
    """
    run = lock_any_attempt(session, name)
    _refuse_deleting(run)
    if claim is not None:
        _refuse_another_workflow(run, claim)
    try:
        history = ConfigHistory(run.config, run.changes)
        change = history.plan_change(values, step_to_continue_from(run))
    except ConfigError as error:
        raise Problem(422, "Invalid change", str(error)) from error
    if change is None:
        return run
    if run.attempt > 0:
        _begin_attempt(run)
    record_change(run, change, by)
    if run.status == "finished":
        run.status = "stopped"
        run.stopped_by, run.stopped_at = by, datetime.now(UTC)
        run.stop_reason = f"its configuration was changed: {change.describe()}"
    return run


def record_change(run: Run, change: ConfigChange, by: str) -> None:
    """Adds a change to the changes of the run's configuration, and to their digest chain."""
    recorded = wire.RecordedChange(
        **change.model_dump(),
        attempt=run.attempt,
        by=by,
        at=datetime.now(UTC),
        digest="0" * 64,  # not hashed
    )
    changes = digest_chain.add_change(run.config_json, run.changes, recorded)
    # A list that is changed in place would not be written.
    run.changes_json = [change.model_dump(mode="json") for change in changes]
    run.__dict__.pop("config", None)  # it was computed before the change


def take_turn(session: Session, name: str, request: wire.TurnRequest) -> Run | None:
    """Starts the run unless another one is in front, in which case it is queued.

    In front are the runs that are running or paused, and the older ones that are queued as well. A
    run that is running, paused or finished stays as it is. Returns the run in front, or None when
    the turn is granted.

    A run that has begun and was stopped begins an attempt with its turn, because replicas and
    collectors have left the attempt that was stopped and wait for another one.

    Raises 409 while the run is being deleted, for a run that was stopped or has failed, unless
    `reopen` is true, and for a run that another workflow than `instead_of` trains.
    """
    # Without the lock, two queued runs could take their turn at the same time.
    session.execute(select(func.pg_advisory_xact_lock(TURN_LOCK)))
    run = lock_any_attempt(session, name)
    _refuse_deleting(run)
    if not request.reopen:
        _refuse_ended(run)
    if run.status == "finished":
        return None
    _take_over(run, request)
    if run.status in ACTIVE_STATUSES:
        return None
    waiting_before = and_(
        Run.status == "queued",
        Run.queued_at > func.now() - QUEUE_TIMEOUT,
        tuple_(Run.created_at, Run.name) < tuple_(run.created_at, run.name),
    )
    in_front = session.scalar(
        select(Run)
        .where(Run.id != run.id, or_(Run.status.in_(ACTIVE_STATUSES), waiting_before))
        .order_by(case((Run.status == "queued", 1), else_=0), Run.created_at, Run.name)
        .limit(1)
    )
    run.queued_at = func.now()
    if in_front is not None:
        run.status = "queued"
    elif run.attempt > 0:
        _begin_attempt(run)
        run.status = "running"
    else:
        run.status = "running"
    _forget_stop(run)
    return in_front


def _take_over(run: Run, request: wire.TurnRequest) -> None:
    """Makes the asking workflow the one that trains the run.

    Raises 409 if another workflow does: a pipeline with the name of somebody's run would otherwise
    replace its job.
    """
    _refuse_another_workflow(run, request)
    if request.workflow is not None:
        run.workflow = request.workflow


def _refuse_another_workflow(run: Run, claim: wire.WorkflowClaim) -> None:
    """Raises 409 if another workflow than the asking one trains the run, or is about to."""
    if claim.workflow is None:
        return
    allowed = (None, claim.workflow, claim.instead_of)
    if run.status in UNFINISHED_STATUSES and run.workflow not in allowed:
        raise conflict(
            f"run {run.name!r} is {run.status}, and workflow {run.workflow} trains it; give "
            "bapo_run another name, or none for a new run, or wait until that workflow has ended"
        )


def pause(session: Session, name: str) -> Run:
    """Withholds prompts and batches until `resume`; requests that are being served finish.

    Raises 409 unless the run is running or paused.
    """
    run = lock_any_attempt(session, name)
    if run.status not in ACTIVE_STATUSES:
        raise conflict(f"run {name!r} is {run.status}; only a running run can be paused")
    run.status = "paused"
    return run


def resume(session: Session, name: str) -> Run:
    """Ends a pause. Raises 409 unless the run is running or paused."""
    run = lock_any_attempt(session, name)
    if run.status not in ACTIVE_STATUSES:
        raise conflict(
            f"run {name!r} is {run.status}, not paused; if it was stopped or has failed, "
            f"{how_to_continue(run)}"
        )
    run.status = "running"
    return run


def stop(
    session: Session, name: str, *, by: str, reason: str | None = None, workflow: str | None = None
) -> Run:
    """Refuses every process of the run from now on; a new attempt continues it.

    by, reason: who stops it and why, as the run's processes and people are told. A run that has
    ended keeps what ended it.

    Raises 409 while the run is being deleted, and if `workflow` is given and another one trains
    the run.
    """
    run = lock_any_attempt(session, name)
    _refuse_deleting(run)
    if workflow is not None and run.workflow != workflow:
        raise conflict(
            f"workflow {run.workflow or 'none'} trains run {run.name!r}, not {workflow}, so that "
            "it is not stopped"
        )
    if run.status not in ("finished", "failed", "stopped"):
        run.attempt += 1
        run.status = "stopped"
        run.stopped_by, run.stop_reason, run.stopped_at = by, reason, datetime.now(UTC)
    return run


def end_run(session: Session, name: str, attempt: int, change: wire.RunPatch) -> Run:
    """Records how a run ended. Raises 409 for a superseded attempt."""
    run = lock_run(session, name, attempt)
    run.status = change.status
    if change.by is not None:
        run.stopped_by, run.stop_reason = change.by, change.reason
        run.stopped_at = datetime.now(UTC)
    return run


def delete_run(service: Service, name: str) -> None:
    """Deletes a run and its objects; repeating the call completes an interrupted deletion.

    Raises 409 while the run is queued, running or paused, and `ObjectStoreError` if the object
    store refuses: a run of the same name would find journals among the objects.
    """
    with service.write_transaction(name) as session:
        run = lock_any_attempt(session, name)
        if run.status in OPEN_STATUSES:
            raise conflict(f"run {name!r} is {run.status}; stop it before deleting it")
        _refuse_with_forks(run)
        # The status refuses every process of the run, so no object with a row is added to it from
        # here on. A last write of a collector's journal becomes garbage.
        run.attempt += 1
        run.status = "deleting"
        prefix = layout.run_prefix(run.name)
    # Objects are deleted first: while the row exists, the deletion can be repeated.
    try:
        service.store.delete(service.store.keys(f"{prefix}/"))
    except ObjectStoreUnavailable:
        raise
    except ObjectStoreError as error:
        raise ObjectStoreError(
            f"run {name!r} stays in status deleting: {error}; then delete it again"
        ) from error
    with service.write_transaction(name) as session:
        run = lock_any_attempt(session, name)
        for table in (BatchMemberRow, BufferEntry, PromptDifficulty, RolloutGroup):
            session.execute(delete(table).where(table.run_id == run.id))
        tokens.delete_bound(session, run.name)
        session.delete(run)


def _refuse_with_forks(run: Run) -> None:
    """Raises 409 if there are forks of the run, whose past is the run's."""
    forks = select(Run.name).where(Run.parent_id == run.id).order_by(Run.id)
    names = list(run.session.scalars(forks.limit(4)))
    if names:
        more = " and more" if len(names) > 3 else ""
        raise conflict(
            f"run {run.name!r} cannot be deleted, because its groups, batches and weights are the "
            f"past of its forks {', '.join(names[:3])}{more}; delete these first"
        )


def _forget_stop(run: Run) -> None:
    run.stopped_by = run.stop_reason = run.stopped_at = None


def _refuse_ended(run: Run) -> None:
    if run.status in ("stopped", "failed"):
        raise conflict(
            f"run {run.name!r} is {run.status}{describe_stop(run)}; {how_to_continue(run)}"
        )


def _refuse_deleting(run: Run) -> None:
    if run.status == "deleting":
        raise conflict(f"run {run.name!r} is being deleted")
