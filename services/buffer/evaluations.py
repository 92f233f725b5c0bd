"""Evaluations of policy versions on the held-out prompts."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from bapo_core.metrics import accuracy_bins, migration_matrix, unlocked_fraction
from services.buffer.api import wire
from services.buffer.runs import run_config
from services.buffer.tables import EvaluationRecord, PromptRow, RolloutGroup, Run
from services.common.errors import not_found


def record_evaluation(session: Session, run: Run, version: int) -> None:
    """Stores the result of a complete evaluation, so that readers need not count its groups."""
    size = run_config(run).evaluation_samples
    groups = session.execute(
        select(RolloutGroup.correct, RolloutGroup.token_count).where(
            RolloutGroup.run_id == run.id,
            RolloutGroup.step == version,
            RolloutGroup.kind == "evaluation",
        )
    ).all()
    correct = [group.correct for group in groups]
    session.execute(
        insert(EvaluationRecord)
        .values(
            run_id=run.id,
            version=version,
            mean_accuracy=sum(correct) / (len(correct) * size),
            bins=accuracy_bins(correct, size),
            prompts=len(correct),
            tokens=sum(group.token_count for group in groups),
        )
        .on_conflict_do_nothing(index_elements=["run_id", "version"])
    )


def list_evaluations(session: Session, run: Run) -> list[wire.Evaluation]:
    """Returns every complete evaluation, by policy version."""
    rows = session.scalars(
        select(EvaluationRecord)
        .where(EvaluationRecord.run_id == run.id)
        .order_by(EvaluationRecord.version)
    )
    return [
        wire.Evaluation(
            version=row.version,
            mean_accuracy=row.mean_accuracy,
            bins=row.bins,
            prompts=row.prompts,
            tokens=row.tokens,
        )
        for row in rows
    ]


def evaluation_migration(session: Session, run: Run, before: int, after: int) -> wire.Migration:
    """Counts how the held-out prompts moved between bins from one version to another.

    Raises 404 unless both versions have a complete evaluation.
    """
    size = run_config(run).evaluation_samples
    first, second = (_correct_by_uid(session, run, version) for version in (before, after))
    return wire.Migration(
        before=before,
        after=after,
        matrix=migration_matrix(first, second, size),
        unlocked_fraction=unlocked_fraction(first, second),
    )


def _correct_by_uid(session: Session, run: Run, version: int) -> dict[str, int]:
    if session.get(EvaluationRecord, (run.id, version)) is None:
        raise not_found(f"complete evaluation of version {version} in run {run.name!r}")
    rows = session.execute(
        select(PromptRow.uid, RolloutGroup.correct)
        .join(PromptRow, PromptRow.id == RolloutGroup.prompt_id)
        .where(
            RolloutGroup.run_id == run.id,
            RolloutGroup.kind == "evaluation",
            RolloutGroup.step == version,
        )
    )
    return {uid: correct for uid, correct in rows}
