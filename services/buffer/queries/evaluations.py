"""Evaluations of policy versions on the held-out prompts of evaluation sets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from sqlalchemy import Row, null, select
from sqlalchemy.dialects.postgresql import insert

from bapo_core.metrics import (
    Score,
    accuracy_bins,
    mean_score,
    migration_matrix,
    sample_counts,
    scores_of_bins,
    unlocked_fraction,
)
from services.buffer.api import wire
from services.buffer.storage.lineage import of_run
from services.buffer.storage.stored_groups import groups_of
from services.buffer.storage.tables import EvaluationRecord, PromptRow, RolloutGroup, Run
from services.common.problems import not_found

_GroupColumns = tuple[str, int, float, int, dict[str, float] | None]
"""The columns uid, correct, mean_reward, token_count and majority of a group."""


def record_evaluation(run: Run, version: int, evaluation_set: str | None = None) -> None:
    """Stores the result of a complete evaluation, so that readers need not count its groups.

    evaluation_set: name of the set; None is the primary one, here and below.
    """
    name, size = resolve_set(run, evaluation_set)
    groups = _read_groups(run, version, name)
    correct = [group.correct for group in groups]
    run.session.execute(
        insert(EvaluationRecord)
        .values(
            run_id=run.id,
            version=version,
            evaluation_set=name,
            mean_accuracy=sum(correct) / (len(correct) * size),
            mean_reward=sum(group.mean_reward for group in groups) / len(groups),
            bins=accuracy_bins(correct, size),
            prompts=len(correct),
            tokens=sum(group.token_count for group in groups),
            # Without null(), None would be stored as the null of JSON.
            majority=null() if (scores := _majority_scores(groups, size)) is None else scores,
        )
        .on_conflict_do_nothing(index_elements=["run_id", "version", "evaluation_set"])
    )


def resolve_set(run: Run, evaluation_set: str | None) -> tuple[str, int]:
    """Returns the name of a set and its samples; raises 404 if the run has no such set."""
    config = run.config
    name = evaluation_set or config.primary_set
    if name not in config.evaluation_sets:
        raise not_found(
            f"evaluation set {name!r} in run {run.name!r}, whose sets are "
            f"{', '.join(config.evaluation_sets)}"
        )
    return name, config.evaluation_sets[name].samples


def _read_groups(run: Run, version: int, name: str) -> Sequence[Row[_GroupColumns]]:
    """Returns `_GroupColumns` of every prompt of the set `name`."""
    return run.session.execute(
        select(
            PromptRow.uid,
            RolloutGroup.correct,
            RolloutGroup.mean_reward,
            RolloutGroup.token_count,
            RolloutGroup.majority,
        )
        .join(PromptRow, PromptRow.id == RolloutGroup.prompt_id)
        .where(groups_of(run, version, "evaluation"), PromptRow.dataset == run.test_datasets[name])
    ).all()


def _majority_scores(
    groups: Sequence[Row[_GroupColumns]], size: int
) -> list[dict[str, object]] | None:
    """Returns the scores maj@k as JSON.

    Returns None if the answers of a group were not recorded, or if no response has an answer, so
    that there is no majority. A group without an answer has no correct majority otherwise.
    """
    majorities = [group.majority for group in groups if group.majority is not None]
    if len(majorities) < len(groups) or not any(majorities):
        return None
    scores = [
        mean_score("maj", k, [majority.get(str(k), 0.0) for majority in majorities])
        for k in sample_counts(size)
    ]
    return [asdict(score) for score in scores]


def list_evaluations(run: Run, evaluation_set: str | None = None) -> list[wire.Evaluation]:
    """Returns every complete evaluation on a set, by policy version; 404 if there is no set."""
    name, _ = resolve_set(run, evaluation_set)
    rows = run.session.scalars(
        select(EvaluationRecord)
        .where(
            of_run(run, EvaluationRecord.run_id, EvaluationRecord.version),
            EvaluationRecord.evaluation_set == name,
        )
        .order_by(EvaluationRecord.version)
    )
    return [
        wire.Evaluation(
            version=row.version,
            evaluation_set=name,
            mean_accuracy=row.mean_accuracy,
            mean_reward=row.mean_reward,
            bins=row.bins,
            prompts=row.prompts,
            tokens=row.tokens,
            scores=[
                *map(_wire_score, scores_of_bins(row.bins)),
                *(wire.Score(**score) for score in row.majority or []),
            ],
        )
        for row in rows
    ]


def _wire_score(score: Score) -> wire.Score:
    return wire.Score(**asdict(score))


def list_sets(run: Run) -> list[wire.EvaluationSetView]:
    """Returns the evaluation sets of a run by name, with every complete evaluation on them."""
    config = run.config
    return [
        wire.EvaluationSetView(
            name=name,
            primary=name == config.primary_set,
            dataset=run.test_datasets[name],
            samples=settings.samples,
            temperature=settings.temperature,
            top_p=settings.top_p,
            every=settings.every,
            evaluations=list_evaluations(run, name),
        )
        for name, settings in config.evaluation_sets.items()
    ]


def evaluation_migration(
    run: Run, before: int, after: int, evaluation_set: str | None = None
) -> wire.Migration:
    """Counts how the prompts of a set moved between bins from one version to another.

    Raises 404 unless both versions have a complete evaluation on the set.
    """
    name, size = resolve_set(run, evaluation_set)
    first, second = (_correct_by_uid(run, version, name) for version in (before, after))
    return wire.Migration(
        before=before,
        after=after,
        matrix=migration_matrix(first, second, size),
        unlocked_fraction=unlocked_fraction(first, second),
    )


def _correct_by_uid(run: Run, version: int, name: str) -> dict[str, int]:
    if run.session.get(EvaluationRecord, (run.of_step(version).id, version, name)) is None:
        raise not_found(
            f"complete evaluation of version {version} in run {run.name!r} on the set {name}"
        )
    return {group.uid: group.correct for group in _read_groups(run, version, name)}
