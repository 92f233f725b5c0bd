"""The life of a run after its creation: attempts, pause, resume, stop, end, deletion."""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy import and_, case, delete, func, or_, select, tuple_
from sqlalchemy.orm import Session

from services.buffer.api.wire import ACTIVE_STATUSES, OPEN_STATUSES
from services.buffer.artifacts import latest_checkpoint
from services.buffer.commits import rewind_run
from services.buffer.runs import how_to_continue, lock_any_attempt, lock_run
from services.buffer.service import Service
from services.buffer.tables import (
    BatchMemberRow,
    BufferEntry,
    PromptDifficulty,
    RolloutGroup,
    Run,
)
from services.common import layout
from services.common.problems import conflict

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
    run.attempt += 1
    if reopen or run.status != "paused":
        run.status = "running"
    checkpoint = latest_checkpoint(session, run)
    rewind_run(session, run, 0 if checkpoint is None else checkpoint.number)
    return run


def take_turn(session: Session, name: str, *, reopen: bool, workflow: str | None) -> Run | None:
    """Starts the run unless another one is in front, in which case it is queued.

    In front are the runs that are running or paused, and the older ones that are queued as well. A
    run that is running, paused or finished stays as it is. Returns the run in front, or None when
    the turn is granted.

    Raises 409 while the run is being deleted, and for a run that was stopped or has failed, unless
    `reopen` is true.
    """
    # Without the lock, two queued runs could take their turn at the same time.
    session.execute(select(func.pg_advisory_xact_lock(TURN_LOCK)))
    run = lock_any_attempt(session, name)
    _refuse_deleting(run)
    if not reopen:
        _refuse_ended(run)
    if workflow is not None:
        run.workflow = workflow
    if run.status in ("running", "paused", "finished"):
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
    run.status = "running" if in_front is None else "queued"
    return in_front


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


def stop(session: Session, name: str) -> Run:
    """Refuses every process of the run from now on; a new attempt continues it.

    Raises 409 while the run is being deleted.
    """
    run = lock_any_attempt(session, name)
    _refuse_deleting(run)
    if run.status not in ("finished", "failed", "stopped"):
        run.attempt += 1
        run.status = "stopped"
    return run


def end_run(session: Session, name: str, attempt: int, status: str) -> Run:
    """Records how a run ended. Raises 409 for a superseded attempt."""
    run = lock_run(session, name, attempt)
    run.status = status
    return run


def delete_run(service: Service, name: str) -> None:
    """Deletes a run and its objects; repeating the call completes an interrupted deletion.

    Raises 409 while the run is queued, running or paused.
    """
    with service.write_transaction(name) as session:
        run = lock_any_attempt(session, name)
        if run.status in OPEN_STATUSES:
            raise conflict(f"run {name!r} is {run.status}; stop it before deleting it")
        # The status refuses every process of the run, so no object with a row is added to it from
        # here on. A last write of a collector's journal becomes garbage.
        run.attempt += 1
        run.status = "deleting"
        prefix = layout.run_prefix(run.name)
    # Objects are deleted first: while the row exists, the deletion can be repeated.
    service.store.delete(service.store.keys(f"{prefix}/"))
    with service.write_transaction(name) as session:
        run = lock_any_attempt(session, name)
        for table in (BatchMemberRow, BufferEntry, PromptDifficulty, RolloutGroup):
            session.execute(delete(table).where(table.run_id == run.id))
        session.delete(run)


def _refuse_ended(run: Run) -> None:
    if run.status in ("stopped", "failed"):
        raise conflict(f"run {run.name!r} is {run.status}; {how_to_continue(run)}")


def _refuse_deleting(run: Run) -> None:
    if run.status == "deleting":
        raise conflict(f"run {run.name!r} is being deleted")
