"""Records the groups of a step, and tells which are new and which are still missing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from sqlalchemy import func, select

from bapo_core.config import RunConfig
from bapo_core.config.rollouts import RewardConfig
from bapo_core.metrics import majority_at_k, sample_counts
from bapo_core.rewards import reward_without_length
from services.buffer.api import wire
from services.buffer.api.trajectories import GroupRows
from services.buffer.steps.step_state import reevaluated_entries
from services.buffer.storage.bulk import insert_columns
from services.buffer.storage.datasets import dataset_size
from services.buffer.storage.stored_groups import groups_of
from services.buffer.storage.tables import PromptRow, RolloutGroup, Run
from services.common.problems import bad_request, conflict

IS_MIXED = func.coalesce(
    RolloutGroup.lowest_reward < RolloutGroup.highest_reward,
    RolloutGroup.correct.between(1, RolloutGroup.size - 1),
)
"""Whether the rewards of a group differ (`GroupSummary.mixed`)."""


class ExpectedPrompt(NamedTuple):
    """A prompt that may be rolled out at a step."""

    prompt_id: int
    position: int
    """Rank in the order in which the prompts of the step and kind were drawn."""


def check_rollouts(config: RunConfig, rollouts: wire.Rollouts) -> None:
    """Raises 400 unless the schedule has such rollouts.

    config: the configuration of their step.
    """
    step, kind, evaluation_set = rollouts
    last = config.steps + 1 if kind == "evaluation" else config.steps
    if not 1 <= step <= last:
        counter = "version" if kind == "evaluation" else "step"
        raise bad_request(f"{counter} {step} is not in 1..{last}, the {counter}s of this run")
    if kind == "reevaluation" and not config.reevaluates_at(step):
        if not config.reevaluate.enabled:
            raise bad_request(f"step {step} has no re-evaluation: reevaluate.enabled is false")
        raise bad_request(
            f"step {step} has no re-evaluation: sync.reevaluate_every (m) is "
            f"{config.sync.reevaluate_every}"
        )
    if kind == "evaluation":
        _check_evaluation(config, step, evaluation_set)
    elif evaluation_set is not None:
        raise bad_request(
            f"{kind} groups are of no evaluation set; leave evaluation_set={evaluation_set} out"
        )


def _check_evaluation(config: RunConfig, version: int, evaluation_set: str | None) -> None:
    name = evaluation_set or config.primary_set
    sets = config.evaluation_sets
    if name not in sets:
        raise bad_request(
            f"run {config.name!r} has no evaluation set {name!r}; its sets are {', '.join(sets)}"
        )
    if name not in config.evaluation_sets_at(version):
        raise bad_request(
            f"version {version} is not evaluated on {name}: its evaluation.every is "
            f"{sets[name].every}"
        )


def dataset_of_set(run: Run, evaluation_set: str | None) -> str:
    """Returns the dataset of an evaluation set, which is the primary one if None."""
    dataset: str = run.test_datasets[evaluation_set or run.config.primary_set]
    return dataset


def select_new(run: Run, rollouts: wire.Rollouts, groups: Sequence[GroupRows]) -> list[GroupRows]:
    """Returns the groups that are not recorded yet.

    Raises 400 if a group has another size or policy version than the step needs, and 409 if a new
    one arrives after the commit of its step.
    """
    config, (step, kind, evaluation_set) = run.config, rollouts
    check_rollouts(run.config_at(step), rollouts)
    recorded = recorded_uids(run, rollouts)
    new = [group for group in groups if group.prompt_uid not in recorded]
    if new and kind != "evaluation" and step <= run.current_step:
        raise conflict(f"step {step} is committed; no group can be added to it")
    if new and kind != "evaluation" and run.has_recorded_rollouts(step):
        raise conflict(
            f"step {step} is trained on the recorded groups of the run that {run.name!r} is a fork "
            "of; no group can be added to it"
        )
    size = config.rollout.group_size
    if kind == "evaluation":
        size = config.evaluation_sets[evaluation_set or config.primary_set].samples
    version = config.rollout_version(step, kind)
    for group in groups:
        if group.row_count != size:
            raise bad_request(
                f"the group of {group.prompt_uid!r} has {group.row_count} responses, not "
                f"{size}: groups are whole or absent"
            )
        if group.policy_version != version:
            raise bad_request(
                f"the group of {group.prompt_uid!r} was made by policy version "
                f"{group.policy_version}; {kind} groups of step {step} need version {version}"
            )
    return new


def recorded_uids(run: Run, rollouts: wire.Rollouts) -> set[str]:
    """Returns the prompts that have a group of these rollouts."""
    step, kind, evaluation_set = rollouts
    statement = (
        select(PromptRow.uid)
        .join(RolloutGroup, RolloutGroup.prompt_id == PromptRow.id)
        .where(groups_of(run, step, kind))
    )
    if kind == "evaluation":
        statement = statement.where(PromptRow.dataset == dataset_of_set(run, evaluation_set))
    return set(run.session.scalars(statement))


def record_groups(
    run: Run,
    rollouts: wire.Rollouts,
    groups: Sequence[GroupRows],
    expected: Mapping[str, ExpectedPrompt],
    object_key: str,
    digest: str,
) -> None:
    """Inserts rows for `groups`, all of which are in one object.

    `expected` maps uids to the prompts of the step; raises 400 if a group is of another prompt.
    """
    step, kind, _ = rollouts
    for group in groups:
        if group.prompt_uid not in expected:
            raise bad_request(f"prompt {group.prompt_uid!r} is not a {kind} prompt of step {step}")
    compared = [_compared_rewards(group, run.config.reward) for group in groups]
    keeps_responses = kind != "evaluation" and run.config.response_replay.groups != "off"
    insert_columns(
        run.session,
        RolloutGroup,
        {
            "run_id": run.id,
            "step": step,
            "kind": kind,
            "object_key": object_key,
            "object_digest": digest,
        },
        {
            "prompt_id": [expected[group.prompt_uid].prompt_id for group in groups],
            "position": [expected[group.prompt_uid].position for group in groups],
            "policy_version": [group.policy_version for group in groups],
            "correct": [group.correct for group in groups],
            "size": [group.row_count for group in groups],
            "accuracy": [group.correct / group.row_count for group in groups],
            "mean_reward": [group.mean_reward for group in groups],
            "lowest_reward": [min(rewards) for rewards in compared],
            "highest_reward": [max(rewards) for rewards in compared],
            "reward_parts": [json.dumps(group.reward_parts) for group in groups],
            "row_start": [group.row_start for group in groups],
            "row_count": [group.row_count for group in groups],
            "token_count": [group.token_count for group in groups],
            "outcomes": [json.dumps(group.outcomes) for group in groups],
            "repeated": [json.dumps(group.repeated) for group in groups],
            "cut_off": [group.cut_off for group in groups],
            "majority": [_majority(group) if kind == "evaluation" else None for group in groups],
            "responses": [_responses(group) if keeps_responses else None for group in groups],
        },
    )


def _compared_rewards(group: GroupRows, settings: RewardConfig) -> list[float]:
    """Returns the reward of each response without the punishment of length.

    Rewards are float32, as the trainer compares them.
    """
    if not settings.overlong_share:
        return group.rewards
    return [float(np.float32(reward_without_length(parts, settings))) for parts in group.parts]


def _responses(group: GroupRows) -> str:
    """Returns, as JSON, the values by which response replay chooses responses."""
    return json.dumps(
        {
            "rewards": group.rewards,
            "correct": group.verdicts,
            "logprobs": group.mean_logprobs,
        }
    )


def _majority(group: GroupRows) -> str | None:
    """Returns maj@k of a group by k as JSON, empty if no response has an answer.

    Returns None if the answer of a response was not recorded.
    """
    answers = [answer for answer in group.answers if answer is not None]
    if len(answers) < group.row_count:
        return None
    counts = sample_counts(group.row_count) if any(answers) else []
    return json.dumps({k: majority_at_k(answers, group.verdicts, k) for k in counts})


def missing_groups(run: Run, rollouts: wire.Rollouts) -> str:
    """Describes the groups of rollouts that are not recorded yet; empty when all of them are."""
    step, kind, evaluation_set = rollouts
    if kind == "evaluation":
        return _missing_of_set(run, step, dataset_of_set(run, evaluation_set))
    if run.has_recorded_rollouts(step):
        return ""
    recorded, mixed = count_groups(run, step, kind)
    if kind == "fresh":
        return missing_fresh(run.config, step, recorded, mixed)
    needed = len(reevaluated_entries(run, step))
    return "" if recorded == needed else f"{recorded} of {needed} {kind} groups of step {step}"


def count_groups(run: Run, step: int, kind: wire.Kind) -> tuple[int, int]:
    """Returns how many groups of a step are recorded, and how many of these are mixed."""
    recorded, mixed = run.session.execute(
        select(func.count(), func.count().filter(IS_MIXED)).where(groups_of(run, step, kind))
    ).one()
    return recorded, mixed


def count_evaluated(run: Run, version: int, dataset: str) -> int:
    """Returns how many prompts of a dataset have a group of a policy version's evaluation."""
    recorded = run.session.scalar(
        select(func.count())
        .select_from(RolloutGroup)
        .join(PromptRow, PromptRow.id == RolloutGroup.prompt_id)
        .where(groups_of(run, version, "evaluation"), PromptRow.dataset == dataset)
    )
    return recorded or 0


def _missing_of_set(run: Run, version: int, dataset: str) -> str:
    recorded = count_evaluated(run, version, dataset)
    needed = dataset_size(run.session, dataset)
    return (
        "" if recorded == needed else f"{recorded} of {needed} evaluation groups of step {version}"
    )


def missing_fresh(config: RunConfig, step: int, recorded: int, mixed: int) -> str:
    """Describes the fresh groups that a step still lacks; empty when it has all of them.

    Dynamic sampling (DAPO) ends with the round by which enough groups have mixed rewards.
    """
    per_round, max_rounds = config.rollout.prompts_per_step, config.rollout.max_generation_rounds
    rounds, partial = divmod(recorded, per_round)
    if partial == 0 and rounds >= 1 and (rounds == max_rounds or mixed >= config.batch_capacity):
        return ""
    return f"{recorded} of up to {per_round * max_rounds} fresh groups of step {step}"
