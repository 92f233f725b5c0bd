"""Reads recorded groups: summaries for the rules, locations for manifests, one group for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Row, and_, func, select, update
from sqlalchemy.dialects.postgresql import JSONB

from bapo_core.types import GroupSummary
from services.buffer.api import wire
from services.buffer.api.trajectories import TrajectoryGroup
from services.buffer.storage.images import IMAGE_DIGESTS
from services.buffer.storage.lineage import of_run
from services.buffer.storage.tables import PromptRow, RolloutGroup, Run
from services.buffer.storage.vocabularies import texts_of
from services.common.problems import not_found

# Selecting columns takes half the time of loading whole rows.
SUMMARY_COLUMNS = (
    RolloutGroup.id,
    PromptRow.uid,
    RolloutGroup.step,
    RolloutGroup.correct,
    RolloutGroup.size,
    RolloutGroup.policy_version,
    RolloutGroup.lowest_reward,
    RolloutGroup.highest_reward,
)
"""The fields of a `GroupSummary`, in their order."""

LOCATION_COLUMNS = (
    RolloutGroup.id.label("group_id"),
    PromptRow.uid.label("prompt_uid"),
    RolloutGroup.step,
    RolloutGroup.policy_version,
    RolloutGroup.correct,
    RolloutGroup.size,
    RolloutGroup.object_key,
    RolloutGroup.object_digest,
    RolloutGroup.row_start,
    RolloutGroup.row_count,
    RolloutGroup.token_count.label("tokens"),
    RolloutGroup.proximal_key,
    RolloutGroup.proximal_digest,
    func.jsonb_path_query_array(PromptRow.payload, IMAGE_DIGESTS, type_=JSONB).label("images"),
)
"""The fields of a `ManifestMember`, all but its `source`."""


def groups_of(run: Run, step: int, kind: wire.Kind) -> ColumnElement[bool]:
    """Matches the groups of a step and kind; those of an evaluation are of all sets."""
    owner = run.of_step(step)
    return and_(
        RolloutGroup.run_id == owner.id, RolloutGroup.step == step, RolloutGroup.kind == kind
    )


def read_summaries(run: Run, step: int, kind: wire.Kind) -> list[GroupSummary]:
    """Returns the groups of a step in the order their prompts were drawn, not of arrival."""
    rows = run.session.execute(
        select(*SUMMARY_COLUMNS)
        .join(PromptRow, PromptRow.id == RolloutGroup.prompt_id)
        .where(groups_of(run, step, kind))
        .order_by(RolloutGroup.position)
    )
    return [GroupSummary(*row) for row in rows]


def mean_rewards(run: Run, step: int) -> tuple[float, dict[str, float]]:
    """Returns the mean reward of the fresh groups of a step, and the mean of each of its parts."""
    groups = run.session.execute(
        select(RolloutGroup.mean_reward, RolloutGroup.reward_parts)
        .where(groups_of(run, step, "fresh"))
        .order_by(RolloutGroup.position)
    ).all()
    sums: Counter[str] = Counter()
    for _, parts in groups:
        sums.update(parts)
    count = max(1, len(groups))
    mean = sum(reward for reward, _ in groups) / count
    return mean, {name: value / count for name, value in sums.items()}


def count_training_tokens(run: Run, step: int) -> int:
    """Returns the response tokens generated for training at a step, over all its groups."""
    total = select(func.coalesce(func.sum(RolloutGroup.token_count), 0)).where(
        RolloutGroup.run_id == run.of_step(step).id,
        RolloutGroup.step == step,
        RolloutGroup.kind != "evaluation",
    )
    return int(run.session.scalar(total) or 0)


def manifest_member(row: Row[*tuple[Any, ...]]) -> wire.ManifestMember:
    """Builds a manifest member from a row of `LOCATION_COLUMNS` and `source`."""
    return wire.ManifestMember(**row._mapping)


def locate_group(run: Run, group_id: int) -> wire.ManifestMember | None:
    """Returns one group in the form of a batch member; its kind stands for the source."""
    row = run.session.execute(
        select(RolloutGroup.kind.label("source"), *LOCATION_COLUMNS)
        .join(PromptRow, PromptRow.id == RolloutGroup.prompt_id)
        .where(of_run(run, RolloutGroup.run_id, RolloutGroup.step), RolloutGroup.id == group_id)
    ).first()
    return None if row is None else manifest_member(row)


def record_proximal(run: Run, step: int, group_ids: Sequence[int], key: str, digest: str) -> None:
    """Records the object that holds the storage-step log-probs of these groups.

    Raises 404 unless all groups are of `step`.
    """
    updated = run.session.scalars(
        update(RolloutGroup)
        .where(
            RolloutGroup.run_id == run.id,
            RolloutGroup.step == step,
            RolloutGroup.id.in_(group_ids),
        )
        .values(proximal_key=key, proximal_digest=digest)
        .returning(RolloutGroup.id)
    )
    unknown = sorted(set(group_ids) - set(updated))
    if unknown:
        raise not_found(f"group {unknown[0]} among those of step {step} ({len(unknown)} unknown)")


def find_group(run: Run, group_id: int) -> tuple[RolloutGroup, PromptRow]:
    """Returns a group and its prompt; raises 404 unless the run has a group of this id."""
    row = run.session.execute(
        select(RolloutGroup, PromptRow)
        .join(PromptRow, PromptRow.id == RolloutGroup.prompt_id)
        .where(of_run(run, RolloutGroup.run_id, RolloutGroup.step), RolloutGroup.id == group_id)
    ).first()
    if row is None:
        raise not_found(f"group {group_id} in run {run.name!r}")
    return row[0], row[1]


def group_view(
    group: RolloutGroup,
    prompt: PromptRow,
    trajectory: TrajectoryGroup,
    texts: Mapping[int, str] | None,
) -> wire.GroupView:
    """Returns a group for people. texts: of tokens by id, if the tokens' texts are asked for."""
    return wire.GroupView(
        group_id=group.id,
        prompt_uid=prompt.uid,
        payload=prompt.payload,
        step=group.step,
        kind=group.kind,
        policy_version=group.policy_version,
        accuracy=group.accuracy,
        mean_reward=group.mean_reward,
        reward_parts=group.reward_parts,
        prompt_token_ids=trajectory.prompt_token_ids,
        responses=[
            wire.ResponseView(
                text=response.text,
                reward=response.reward,
                correct=response.correct,
                reward_parts=response.reward_parts,
                finish_reason=response.finish_reason,
                token_ids=response.token_ids,
                tokens=None if texts is None else texts_of(response.token_ids, texts),
                logprobs=response.logprobs,
                interruptions=response.interruptions,
                outcome=response.outcome,
                repeated=response.repeated,
                status=response.status,
                extracted=response.extracted,
                failure=response.failure,
            )
            for response in trajectory.responses
        ],
    )
