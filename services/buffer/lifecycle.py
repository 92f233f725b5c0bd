"""A run paused, stopped, deleted; and the objects that no row points to any more."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Literal

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from services.buffer.api import wire
from services.buffer.runs import lock_any_attempt
from services.buffer.service import Service
from services.buffer.tables import (
    BatchMemberRow,
    BufferEntry,
    Checkpoint,
    PromptDifficulty,
    RolloutGroup,
    Run,
    WeightVersion,
)
from services.common import layout
from services.common.errors import conflict
from services.common.objectstore import MANIFEST

YOUNGEST_ORPHAN = timedelta(days=1)
"""A younger object may be one whose row is about to be written: a large checkpoint takes hours."""


def pause(session: Session, name: str) -> Run:
    """No new prompts and no new batches until `resume`. What is under way may finish."""
    run = lock_any_attempt(session, name)
    if run.status not in ("running", "paused"):
        raise conflict(f"run {name!r} is {run.status}; only a running one can be paused")
    run.status = "paused"
    return run


def resume(session: Session, name: str) -> Run:
    """Ends a pause."""
    run = lock_any_attempt(session, name)
    if run.status not in ("running", "paused"):
        raise conflict(
            f"run {name!r} is {run.status}, not paused; a new attempt (`bapo run --resume`) "
            "continues a run that was stopped or has failed"
        )
    run.status = "running"
    return run


def stop(session: Session, name: str) -> Run:
    """Turns away every process of the run. A new attempt continues from the last checkpoint."""
    run = lock_any_attempt(session, name)
    if run.status == "deleting":
        raise conflict(f"run {name!r} is being deleted")
    if run.status not in ("finished", "failed", "stopped"):
        run.attempt += 1
        run.status = "stopped"
    return run


def end(run: Run, status: Literal["finished", "failed"]) -> Run:
    """Sets the final status of a run that its own processes have ended."""
    run.status = status
    return run


def delete_run(service: Service, name: str) -> None:
    """Deletes a run with its objects. A deletion that was interrupted is repeated to finish it."""
    with service.write_transaction(name) as session:
        run = lock_any_attempt(session, name)
        if run.status in ("running", "paused"):
            raise conflict(f"run {name!r} is {run.status}; stop it first")
        # From here on nobody can add to it.
        run.attempt += 1
        run.status = "deleting"
        prefix = layout.run_prefix(run.name)
    # Objects first: while the run is there, a deletion that fails half-way can be repeated.
    service.store.delete(service.store.keys(f"{prefix}/"))
    with service.write_transaction(name) as session:
        run = lock_any_attempt(session, name)
        for table in (BatchMemberRow, BufferEntry, PromptDifficulty, RolloutGroup):
            session.execute(delete(table).where(table.run_id == run.id))
        session.delete(run)


# ---- garbage ------------------------------------------------------------------------------------


def collect_garbage(service: Service, *, dry_run: bool) -> wire.Garbage:
    """Finds (and unless `dry_run` deletes) objects that no row points to; also the reverse.

    Objects younger than a day are left alone: their rows may be about to be written.
    """
    stored = {
        item.key: item.modified
        for place in ("runs/", "models/")
        for item in service.store.listing(place)
    }
    with service.sessions() as session:
        exact = set(_pointed_to(session))
        prefixes = set(_prefixes(session))
    orphans = sorted(
        key
        for key, modified in stored.items()
        if key not in exact
        and not _under(key, prefixes)
        and not layout.DIAGNOSTICS.match(key)
        and (dry_run or modified < datetime.now(UTC) - YOUNGEST_ORPHAN)
    )
    wanted = exact | {f"{prefix}/{MANIFEST}" for prefix in prefixes}
    if not dry_run:
        service.store.delete(orphans)
    return wire.Garbage(
        orphans=orphans,
        objects=len(stored),
        missing=sorted(wanted - stored.keys()),
        deleted=0 if dry_run else len(orphans),
    )


def _pointed_to(session: Session) -> Iterable[str]:
    yield from session.scalars(select(RolloutGroup.object_key).distinct())
    proximal = select(RolloutGroup.proximal_key).where(RolloutGroup.proximal_key.is_not(None))
    yield from (key for key in session.scalars(proximal.distinct()) if key is not None)


def _prefixes(session: Session) -> Iterable[str]:
    published = select(WeightVersion.uri).where(WeightVersion.status == "published")
    yield from session.scalars(published)
    yield from session.scalars(select(Checkpoint.uri))
    for path in session.scalars(select(Run.config["model"]["path"].astext)):
        if path.startswith(layout.MODEL_SCHEME):
            yield path.removeprefix(layout.MODEL_SCHEME).partition("#")[0]


def _under(key: str, prefixes: set[str]) -> bool:
    parts = key.split("/")
    return any("/".join(parts[:depth]) in prefixes for depth in range(1, len(parts)))
