"""Published weights, checkpoints and replicas of a run, and what its parts did when."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from sqlalchemy import delete, func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from bapo_core.config import RunConfig
from services.buffer.api import wire
from services.buffer.runs import lock_any_attempt, run_config
from services.buffer.steps import groups_complete, rewind
from services.buffer.tables import (
    Checkpoint,
    EvaluationRecord,
    Replica,
    Run,
    SpanRow,
    WeightVersion,
)
from services.common import layout
from services.common.errors import bad_request, conflict, not_found


def publish_weights(session: Session, run: Run, version: int, digest: str) -> wire.StoredVersion:
    """The version exists from here on. Publishing it again must publish the same bytes."""
    if version > run.current_step + 1:
        raise bad_request(
            f"version {version} cannot exist: step {run.current_step} is the last committed one"
        )
    session.execute(
        insert(WeightVersion)
        .values(
            run_id=run.id,
            version=version,
            uri=layout.weights(run.name, version),
            manifest_digest=digest,
            status="published",
        )
        .on_conflict_do_nothing(index_elements=["run_id", "version"])
    )
    stored = get_weights(session, run, version)
    if stored is None or stored.manifest_digest != digest:
        raise conflict(f"version {version} of run {run.name!r} was published with other weights")
    return stored


def get_weights(session: Session, run: Run, version: int) -> wire.StoredVersion | None:
    row = session.get(WeightVersion, (run.id, version))
    if row is not None and row.status == "pruned":
        raise not_found(f"version {version} of run {run.name!r} any more: it was pruned")
    return _stored(row)


def _stored(row: WeightVersion | None) -> wire.StoredVersion | None:
    if row is None or row.status != "published":
        return None
    return wire.StoredVersion(number=row.version, uri=row.uri, manifest_digest=row.manifest_digest)


def record_checkpoint(session: Session, run: Run, step: int, digest: str) -> list[str]:
    """The checkpoint exists from here on; returns prefixes of objects nobody needs any more."""
    if step > run.current_step:
        raise bad_request(f"step {step} is not committed; there is nothing to checkpoint")
    session.execute(
        insert(Checkpoint)
        .values(
            run_id=run.id, step=step, uri=layout.checkpoint(run.name, step), manifest_digest=digest
        )
        .on_conflict_do_nothing(index_elements=["run_id", "step"])
    )
    return _prune(session, run)


def _prune(session: Session, run: Run) -> list[str]:
    """Keeps the last checkpoints, what a resume from one of them would load, and the best."""
    config = run_config(run)
    newest_first = select(Checkpoint.step).where(Checkpoint.run_id == run.id)
    steps = list(session.scalars(newest_first.order_by(Checkpoint.step.desc())))
    latest = steps[: config.checkpoint.keep]
    kept = {*latest, *_worth_keeping(session, run, config, steps)}
    dropped = [step for step in steps if step not in kept]
    session.execute(
        delete(Checkpoint).where(Checkpoint.run_id == run.id, Checkpoint.step.in_(dropped))
    )
    oldest_needed = config.schedule.policy_version(min(latest) + 1)
    stale = list(
        session.scalars(
            select(WeightVersion).where(
                WeightVersion.run_id == run.id,
                WeightVersion.status == "published",
                WeightVersion.version > 1,
                WeightVersion.version < oldest_needed,
            )
        )
    )
    # An evaluation that is still owed needs its version, however old.
    stale = [
        row
        for row in stale
        if not (
            config.evaluates_at(row.version)
            and groups_complete(session, run, row.version, "evaluation")
        )
    ]
    for row in stale:
        row.status = "pruned"
    return [layout.checkpoint(run.name, step) for step in dropped] + [row.uri for row in stale]


def _worth_keeping(
    session: Session, run: Run, config: RunConfig, steps: Sequence[int]
) -> list[int]:
    """Of `steps`, those with the best evaluations, and those whose evaluation is still owed."""
    if not config.checkpoint.keep_best:
        return []
    rows = session.execute(
        select(EvaluationRecord.version, EvaluationRecord.mean_accuracy).where(
            EvaluationRecord.run_id == run.id
        )
    )
    accuracy = {version - 1: found for version, found in rows.tuples()}
    judged = sorted(accuracy.keys() & steps, key=lambda step: (accuracy[step], step), reverse=True)
    owed = [step for step in steps if config.evaluates_at(step + 1) and step not in accuracy]
    return [*judged[: config.checkpoint.keep_best], *owed]


def latest_checkpoint(session: Session, run: Run) -> wire.StoredVersion | None:
    row = session.scalar(
        select(Checkpoint)
        .where(Checkpoint.run_id == run.id)
        .order_by(Checkpoint.step.desc())
        .limit(1)
    )
    if row is None:
        return None
    return wire.StoredVersion(number=row.step, uri=row.uri, manifest_digest=row.manifest_digest)


def begin_attempt(session: Session, name: str) -> Run:
    """A new attempt supersedes whoever worked on the run, and starts from the last checkpoint."""
    run = lock_any_attempt(session, name)
    if run.status == "deleting":
        raise conflict(f"run {name!r} is being deleted")
    run.attempt += 1
    run.status = "running"
    checkpoint = latest_checkpoint(session, run)
    rewind(session, run, 0 if checkpoint is None else checkpoint.number)
    return run


def wanted_weights(session: Session, run: Run) -> wire.TargetWeights:
    wanted = run.target_version
    newest = session.scalar(
        select(WeightVersion)
        .where(WeightVersion.run_id == run.id, WeightVersion.status == "published")
        .order_by(WeightVersion.version.desc())
        .limit(1)
    )
    versions = [_stored(session.get(WeightVersion, (run.id, wanted))), _stored(newest)]
    digests = ["" if each is None else each.manifest_digest[:16] for each in versions]
    return wire.TargetWeights(
        version=wanted,
        stored=versions[0],
        newest=versions[1],
        tag="-".join([str(wanted), *digests]),
    )


def report_replica(session: Session, run: Run, name: str, report: wire.ReplicaReport) -> None:
    values = report.model_dump() | {"last_seen": func.now()}
    session.execute(
        insert(Replica)
        .values(run_id=run.id, name=name, **values)
        .on_conflict_do_update(index_elements=["run_id", "name"], set_=values)
    )


def record_spans(session: Session, run: Run, told: wire.SpanBatch) -> None:
    """By the database's clock: those of other machines may differ. Each is recorded once."""
    now = session.scalar(select(func.now()))
    assert now is not None
    rows = []
    for each in told.spans:
        ended = now - timedelta(seconds=each.ended_ago_s)
        started = ended - timedelta(seconds=each.seconds)
        rows.append(
            {
                "run_id": run.id,
                "key": each.key,
                "component": told.component,
                "name": each.name,
                "step": each.step,
                "started_at": started,
                "ended_at": ended,
            }
        )
    if rows:
        session.execute(insert(SpanRow).on_conflict_do_nothing(), rows)
