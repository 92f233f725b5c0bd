"""Rollout replicas: their heartbeats, and which weights each has loaded."""

from __future__ import annotations

from sqlalchemy import func, select, update
from sqlalchemy.dialects.postgresql import insert

from services.buffer.api import wire
from services.buffer.storage.tables import Replica, Run


def record_heartbeat(run: Run, name: str, report: wire.ReplicaHeartbeat) -> bool:
    """Stores the latest report of a replica and the time of its arrival.

    Returns whether it differs from the report before.
    """
    reported = report.model_dump()
    unchanged = run.session.execute(
        update(Replica)
        .where(Replica.run_id == run.id, Replica.name == name)
        .where(*(getattr(Replica, key) == value for key, value in reported.items()))
        .values(last_seen=func.now())
        .returning(Replica.name)
    )
    if unchanged.first() is not None:
        return False
    values = reported | {"last_seen": func.now()}
    run.session.execute(
        insert(Replica)
        .values(run_id=run.id, name=name, **values)
        .on_conflict_do_update(index_elements=["run_id", "name"], set_=values)
    )
    return True


def list_replicas(run: Run) -> list[wire.CallableReplica]:
    """Returns the replicas of a run by name, each with the seconds since its last heartbeat."""
    # Both times come from the database's clock, because the clocks of machines differ.
    now = run.session.scalar(select(func.now()))
    assert now is not None
    rows = run.session.scalars(
        select(Replica).where(Replica.run_id == run.id).order_by(Replica.name)
    )
    return [
        wire.CallableReplica(
            name=row.name,
            url=row.url,
            state=row.state,
            detail=row.detail,
            loaded_version=row.loaded_version,
            manifest_digest=row.manifest_digest,
            prompts_per_request=row.prompts_per_request,
            credential=row.credential,
            last_seen=row.last_seen,
            silent_s=max(0.0, (now - row.last_seen).total_seconds()),
        )
        for row in rows
    ]
