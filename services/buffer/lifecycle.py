"""The life of a run after its creation: attempts, pause, resume, stop, end, deletion."""

from __future__ import annotations

from sqlalchemy import delete
from sqlalchemy.orm import Session

from services.buffer.artifacts import latest_checkpoint
from services.buffer.commits import rewind_run
from services.buffer.runs import lock_any_attempt, lock_run
from services.buffer.service import Service
from services.buffer.tables import (
    BatchMemberRow,
    BufferEntry,
    PromptDifficulty,
    RolloutGroup,
    Run,
)
from services.common import layout
from services.common.errors import conflict


def begin_attempt(session: Session, name: str) -> Run:
    """Supersedes all processes of the run and rewinds it to its last checkpoint.

    Both happen in one transaction, so no process sees the new attempt with the old state. Raises
    409 while the run is being deleted.
    """
    run = lock_any_attempt(session, name)
    _refuse_deleting(run)
    run.attempt += 1
    run.status = "running"
    checkpoint = latest_checkpoint(session, run)
    rewind_run(session, run, 0 if checkpoint is None else checkpoint.number)
    return run


def pause(session: Session, name: str) -> Run:
    """Withholds prompts and batches until `resume`; requests that are being served finish.

    Raises 409 unless the run is running or paused.
    """
    run = lock_any_attempt(session, name)
    if run.status not in ("running", "paused"):
        raise conflict(f"run {name!r} is {run.status}; only a running run can be paused")
    run.status = "paused"
    return run


def resume(session: Session, name: str) -> Run:
    """Ends a pause. Raises 409 unless the run is running or paused."""
    run = lock_any_attempt(session, name)
    if run.status not in ("running", "paused"):
        raise conflict(
            f"run {name!r} is {run.status}, not paused; a new attempt (`bapo run --resume`) "
            "continues a run that was stopped or has failed"
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
    """Records how a run ended: `finished` or `failed`. Raises 409 for a superseded attempt."""
    run = lock_run(session, name, attempt)
    run.status = status
    return run


def delete_run(service: Service, name: str) -> None:
    """Deletes a run and its objects; repeating the call completes an interrupted deletion.

    Raises 409 while the run is running or paused.
    """
    with service.write_transaction(name) as session:
        run = lock_any_attempt(session, name)
        if run.status in ("running", "paused"):
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


def _refuse_deleting(run: Run) -> None:
    if run.status == "deleting":
        raise conflict(f"run {run.name!r} is being deleted")
