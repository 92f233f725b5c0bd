"""Records and prunes the weights and checkpoints of a run, and names the version to serve."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from sqlalchemy import ColumnElement, and_, delete, func, literal, or_, select, update
from sqlalchemy.dialects.postgresql import insert

from bapo_core.config import RunConfig
from services.buffer.api import wire
from services.buffer.queries.evaluations import record_evaluation
from services.buffer.steps.step_groups import missing_groups
from services.buffer.storage.tables import (
    Checkpoint,
    EvaluationRecord,
    RolloutGroup,
    Run,
    WeightVersion,
)
from services.common import layout
from services.common.problems import bad_request, conflict, not_found

log = logging.getLogger(__name__)

MAX_VERSIONS = 1000
"""Most versions of the weights in one listing."""


# ---- weights ------------------------------------------------------------------------------------


def publish_weights(run: Run, version: int, digest: str) -> tuple[wire.StoredVersion, list[str]]:
    """Records a version of the weights, whose objects this attempt has written already.

    A version that a rewind set aside is the same again if its digest is, and its groups are valid.
    If its digest differs, the groups of this and of all later versions are deleted.

    Returns the version, and the prefixes of objects that may be deleted. Raises 400 for a version
    above the current step + 1, and 409 if the version was published with another digest.
    """
    if version > run.current_step + 1:
        raise bad_request(
            f"version {version} does not exist yet: step {run.current_step} is the last committed "
            f"one; publish version {run.current_step + 1} at most"
        )
    unneeded = _settle_set_aside(run, version, digest)
    written = layout.weights(run.name, version, run.attempt)
    run.session.execute(
        insert(WeightVersion)
        .values(
            run_id=run.id,
            version=version,
            uri=written,
            manifest_digest=digest,
            status="published",
        )
        .on_conflict_do_nothing(index_elements=["run_id", "version"])
    )
    stored = get_weights(run, version)
    if stored is None or stored.manifest_digest != digest:
        raise conflict(f"version {version} of run {run.name!r} was published with other weights")
    # Replicas may be fetching the equal objects of an earlier attempt, so those stay. A rewind
    # without a new attempt leads to the same prefix again.
    unneeded = [prefix for prefix in {*unneeded, written} if prefix != stored.uri]
    return stored, without_shared(run, unneeded)


def without_shared(run: Run, prefixes: Sequence[str]) -> list[str]:
    """Returns those of the prefixes to which no row points: forks share weights and checkpoints."""
    run.session.flush()
    shared = {
        *run.session.scalars(
            select(WeightVersion.uri).where(
                WeightVersion.uri.in_(prefixes), WeightVersion.status != "pruned"
            )
        ),
        *run.session.scalars(select(Checkpoint.uri).where(Checkpoint.uri.in_(prefixes))),
    }
    return [prefix for prefix in prefixes if prefix not in shared]


def set_weights_aside(run: Run, last_valid: int) -> None:
    """Sets versions after `last_valid` aside, which a rewind undid, and keeps their groups.

    Groups of a version without weights can never be confirmed, so they are deleted. Where prompts
    of later steps follow from the deleted groups (those of a stream, of an adaptive sampler and of
    re-evaluations), the later versions are deleted as well: with these groups generated anew, other
    prompts may be due.
    """
    later = (WeightVersion.run_id == run.id, WeightVersion.version > last_valid)
    run.session.execute(delete(WeightVersion).where(*later, WeightVersion.status == "pruned"))
    run.session.execute(update(WeightVersion).where(*later).values(status="set_aside"))
    without_weights = (
        RolloutGroup.run_id == run.id,
        RolloutGroup.step > last_valid,  # No group is older than its policy; there is an index.
        RolloutGroup.policy_version > last_valid,
        _made_for(run),
        RolloutGroup.policy_version.not_in(select(WeightVersion.version).where(*later)),
    )
    config = run.config
    if config.draws_from_stream or config.sampler.is_adaptive or config.reevaluate.enabled:
        first_deleted = run.session.scalar(
            select(func.min(RolloutGroup.policy_version)).where(
                *without_weights, RolloutGroup.kind != "evaluation"
            )
        )
        if first_deleted is not None:
            run.session.execute(
                delete(WeightVersion).where(*later, WeightVersion.version > first_deleted)
            )
    run.session.execute(delete(RolloutGroup).where(*without_weights))


def _made_for(run: Run) -> ColumnElement[bool]:
    """Matches groups that this run's own weights made, not those that it has of its parent."""
    return or_(
        RolloutGroup.kind == "evaluation", RolloutGroup.step > literal(run.rollouts_until or 0)
    )


def weights_digest(run: Run, version: int) -> str | None:
    """Returns the manifest digest of a version, whatever its status; None if it has no weights."""
    row = run.session.get(WeightVersion, (run.id, version))
    return None if row is None else row.manifest_digest


def is_set_aside(run: Run, version: int) -> bool:
    """Returns whether a rewind set a version aside that has not been published again since."""
    row = run.session.get(WeightVersion, (run.id, version))
    return row is not None and row.status == "set_aside"


def _settle_set_aside(run: Run, version: int, digest: str) -> list[str]:
    """Confirms a version that was set aside, or deletes it and all that were trained after it.

    Returns the prefixes of the objects of those that are deleted.
    """
    row = run.session.get(WeightVersion, (run.id, version))
    if row is None or row.status != "set_aside":
        return []
    if row.manifest_digest == digest:
        row.status = "published"
        run.session.flush()
        for name in run.config_at(version).evaluation_sets_at(version):
            if not missing_groups(run, wire.Rollouts(version, "evaluation", name)):
                record_evaluation(run, version, name)
        return []
    log.warning(
        "version %d of run %s was trained again and differs: its groups, and those of later "
        "versions, are generated anew",
        version,
        run.name,
    )
    invalid = (
        WeightVersion.run_id == run.id,
        WeightVersion.version >= version,
        WeightVersion.status == "set_aside",
    )
    run.session.execute(
        delete(RolloutGroup).where(
            RolloutGroup.run_id == run.id,
            RolloutGroup.step >= version,
            _made_for(run),
            RolloutGroup.policy_version.in_(select(WeightVersion.version).where(*invalid)),
        )
    )
    deleted = delete(WeightVersion).where(*invalid).returning(WeightVersion.uri)
    return list(run.session.scalars(deleted))


def get_weights(run: Run, version: int) -> wire.StoredVersion | None:
    """Returns a published version; raises 404 if it was pruned.

    None before its publication, and while it is set aside.
    """
    row = run.session.get(WeightVersion, (run.id, version))
    if row is not None and row.status == "pruned":
        raise not_found(f"version {version} of run {run.name!r} any more: it was pruned")
    return _stored(row)


def _stored(row: WeightVersion | None) -> wire.StoredVersion | None:
    if row is None or row.status != "published":
        return None
    return wire.StoredVersion(number=row.version, uri=row.uri, manifest_digest=row.manifest_digest)


def list_weights(run: Run) -> list[wire.WeightView]:
    """Returns the last `MAX_VERSIONS` versions, newest first, pruned ones included."""
    rows = run.session.scalars(
        select(WeightVersion)
        .where(WeightVersion.run_id == run.id)
        .order_by(WeightVersion.version.desc())
        .limit(MAX_VERSIONS)
    )
    return [
        wire.WeightView(
            version=row.version,
            uri=row.uri,
            manifest_digest=row.manifest_digest,
            status=row.status,
            created_at=row.created_at,
        )
        for row in rows
    ]


def target_weights(run: Run) -> wire.TargetWeights:
    """Returns the version that rollout replicas should serve, and the newest published one."""
    target = run.target_version
    newest = run.session.scalar(
        select(WeightVersion)
        .where(WeightVersion.run_id == run.id, WeightVersion.status == "published")
        .order_by(WeightVersion.version.desc())
        .limit(1)
    )
    versions = [_stored(run.session.get(WeightVersion, (run.id, target))), _stored(newest)]
    digests = ["" if version is None else version.manifest_digest[:16] for version in versions]
    return wire.TargetWeights(
        version=target,
        stored=versions[0],
        newest=versions[1],
        tag="-".join([str(target), *digests]),
    )


# ---- checkpoints --------------------------------------------------------------------------------


def record_checkpoint(run: Run, step: int, digest: str) -> list[str]:
    """Records a checkpoint, whose objects are written already, and prunes older artifacts.

    Returns the prefixes of objects that may be deleted. Raises 400 if the step is not committed,
    and 409 if it has a checkpoint with another digest. No trainer records a step twice: it goes on
    from the run's last checkpoint, so that an attempt records later steps alone.
    """
    if step > run.current_step:
        raise bad_request(f"step {step} is not committed; only committed steps have checkpoints")
    run.session.execute(
        insert(Checkpoint)
        .values(
            run_id=run.id,
            step=step,
            uri=layout.checkpoint(run.name, step, run.attempt),
            manifest_digest=digest,
        )
        .on_conflict_do_nothing(index_elements=["run_id", "step"])
    )
    recorded = run.session.get_one(Checkpoint, (run.id, step)).manifest_digest
    if recorded != digest:
        raise conflict(
            f"step {step} of run {run.name!r} has a checkpoint with another digest "
            f"({recorded[:12]}..., not {digest[:12]}...), which this trainer has not recorded; "
            "find out who has a token of scope trainer or admin, and revoke it "
            "(`bapo token revoke`)"
        )
    return _prune(run)


def latest_checkpoint(run: Run) -> wire.StoredVersion | None:
    """Returns the checkpoint that a new attempt starts from, or None before the first."""
    row = run.session.scalar(
        select(Checkpoint)
        .where(Checkpoint.run_id == run.id)
        .order_by(Checkpoint.step.desc())
        .limit(1)
    )
    if row is None:
        return None
    return wire.StoredVersion(number=row.step, uri=row.uri, manifest_digest=row.manifest_digest)


def list_checkpoints(run: Run) -> list[wire.CheckpointView]:
    """Returns the kept checkpoints, newest first, with the accuracy and the reward of their weights
    on the primary evaluation set."""
    evaluation_of_weights = and_(
        EvaluationRecord.run_id == Checkpoint.run_id,
        EvaluationRecord.version == Checkpoint.step + 1,
        EvaluationRecord.evaluation_set == run.config.primary_set,
    )
    rows = run.session.execute(
        select(Checkpoint, EvaluationRecord.mean_accuracy, EvaluationRecord.mean_reward)
        .outerjoin(EvaluationRecord, evaluation_of_weights)
        .where(Checkpoint.run_id == run.id)
        .order_by(Checkpoint.step.desc())
    )
    return [
        wire.CheckpointView(
            step=row.step,
            uri=row.uri,
            manifest_digest=row.manifest_digest,
            created_at=row.created_at,
            accuracy=accuracy,
            reward=reward,
        )
        for row, accuracy, reward in rows.tuples()
    ]


def share_artifacts(run: Run, parent: Run, checkpoint: int, first_step: int) -> None:
    """Records the weights and the checkpoint that a fork begins with, whose objects it shares.

    checkpoint: step of the parent's checkpoint; 0 is the initial model, which is none. first_step:
    first step of the fork.

    Raises 409 if weights that its first steps roll out with are not stored any more.
    """
    needed = {version for version in _versions_before(run.config, first_step)}
    found = {
        row.version: row
        for version in needed
        if (row := _published(parent.of_step(version), version)) is not None
    }
    missing = sorted(needed - found.keys())
    if missing:
        raise conflict(
            f"step {first_step} of the fork would roll out with version {missing[0]} of the "
            f"weights, which run {parent.name!r} does not store any more: "
            f"{_advise_on_versions(run.config, first_step)}"
        )
    if checkpoint == first_step - 1 and (row := _published(parent, first_step)) is not None:
        found[first_step] = row  # they are the weights of the checkpoint
    for version, row in found.items():
        run.session.add(
            WeightVersion(
                run_id=run.id,
                version=version,
                uri=row.uri,
                manifest_digest=row.manifest_digest,
                status="published",
            )
        )
    stored = run.session.get(Checkpoint, (parent.id, checkpoint))
    if stored is not None:
        run.session.add(
            Checkpoint(
                run_id=run.id,
                step=checkpoint,
                uri=stored.uri,
                manifest_digest=stored.manifest_digest,
            )
        )


def _versions_before(config: RunConfig, first_step: int) -> Iterator[int]:
    """Yields the versions before `first_step` that rollouts from this step on are made with."""
    step = first_step
    while (version := config.rollout_version(step, "fresh")) < first_step and step <= config.steps:
        yield version
        step += 1


def _published(run: Run, version: int) -> WeightVersion | None:
    row = run.session.get(WeightVersion, (run.id, version))
    return row if row is not None and row.status == "published" else None


def _advise_on_versions(config: RunConfig, first_step: int) -> str:
    before = range(first_step - 1, 0, -1)
    fitting = next((step for step in before if not [*_versions_before(config, step + 1)]), None)
    advice = "set sync.every=1 and sync.lag=0, so that the fork rolls out with its own weights"
    if fitting is None:
        return advice
    return f"fork at step {fitting}, after which the schedule has a sync, or {advice}"


def _prune(run: Run) -> list[str]:
    """Drops checkpoints beyond `checkpoint.keep` and `checkpoint.keep_best`, and old weights.

    Keeps the weights that a resume from one of the latest checkpoints would load.
    """
    config = run.config
    newest_first = select(Checkpoint.step).where(Checkpoint.run_id == run.id)
    steps = list(run.session.scalars(newest_first.order_by(Checkpoint.step.desc())))
    latest = steps[: config.checkpoint.keep]
    kept = {*latest, *_best_or_pending(run, steps)}
    dropped = [step for step in steps if step not in kept]
    deleted = delete(Checkpoint).where(Checkpoint.run_id == run.id, Checkpoint.step.in_(dropped))
    unneeded = list(run.session.scalars(deleted.returning(Checkpoint.uri)))
    oldest_needed = config.schedule.policy_version(min(latest) + 1)
    stale = list(
        run.session.scalars(
            select(WeightVersion).where(
                WeightVersion.run_id == run.id,
                WeightVersion.status == "published",
                WeightVersion.version > 1,
                WeightVersion.version < oldest_needed,
            )
        )
    )
    # A version whose evaluation is not complete is still needed, however old it is.
    stale = [
        row
        for row in stale
        if not any(
            missing_groups(run, wire.Rollouts(row.version, "evaluation", name))
            for name in run.config_at(row.version).evaluation_sets_at(row.version)
        )
    ]
    for row in stale:
        row.status = "pruned"
    return without_shared(run, [*unneeded, *(row.uri for row in stale)])


def _best_or_pending(run: Run, steps: Sequence[int]) -> list[int]:
    """Returns the steps with the best evaluations, and those whose evaluation is not complete."""
    if not run.config.checkpoint.keep_best:
        return []
    rows = run.session.execute(
        select(
            EvaluationRecord.version, EvaluationRecord.mean_accuracy, EvaluationRecord.mean_reward
        ).where(
            EvaluationRecord.run_id == run.id,
            EvaluationRecord.evaluation_set == run.config.primary_set,
        )
    )
    ranks = {
        version - 1: run.config.task.rank(accuracy=accuracy, reward=reward)
        for version, accuracy, reward in rows.tuples()
    }
    best_first = sorted(ranks.keys() & steps, key=lambda step: (ranks[step], step), reverse=True)
    pending = [
        step
        for step in steps
        if run.config.primary_set in run.config_at(step + 1).evaluation_sets_at(step + 1)
        and step not in ranks
    ]
    return [*best_first[: run.config.checkpoint.keep_best], *pending]
