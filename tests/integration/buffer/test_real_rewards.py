"""Rewards that are any numbers: what has different rewards trains, whatever is correct."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bapo_core.config import RunConfig
from services.buffer.api import wire
from services.buffer.api.client import BufferClient
from services.buffer.api.trajectories import TrajectoryGroup, encode_groups
from services.cli.checkpoints import select_checkpoints
from services.cli.reward_files import pin_reward, store_reward
from services.datasets import DataSources, prepare_run
from services.model.resolve import TINY_MODEL
from services.stack.stack import Endpoints
from tests.integration.support.driver import Driver, small_config

SPREAD, EQUAL = (0.25, 0.5, 0.75, 1.25), (0.5, 0.5, 0.5, 0.5)


def with_rewards(
    group: TrajectoryGroup,
    rewards: Sequence[float],
    *,
    correct: bool = False,
    overlong: Sequence[float] = (0.0, 0.0, 0.0, 0.0),
) -> TrajectoryGroup:
    """Returns the group with these rewards, to which the punishments of length are added."""
    responses = [
        dataclasses.replace(
            response,
            correct=correct,
            reward=reward + punishment,
            reward_parts={"answer": reward} | ({"overlong": punishment} if any(overlong) else {}),
        )
        for response, reward, punishment in zip(group.responses, rewards, overlong, strict=True)
    ]
    return dataclasses.replace(group, responses=responses)


def make_driver(stack: Endpoints, name: str, **sections: Any) -> Driver:
    return Driver(stack, small_config(name, **sections))


def post(driver: Driver, step: int, groups: Sequence[TrajectoryGroup]) -> wire.GroupsAccepted:
    return driver.client.post_groups(step, "fresh", encode_groups(list(groups)))


def reasons(driver: Driver, step: int, uid: str) -> dict[str, str]:
    considered = driver.client.decision(step, uid).considered
    return {decision.source: decision.reason for decision in considered}


@pytest.mark.parametrize("correct", [False, True])
def test_the_default_filter_keeps_groups_whose_rewards_differ(
    stack: Endpoints, correct: bool
) -> None:
    driver = make_driver(stack, f"real-{correct}".lower())
    drawn = driver.groups(1)
    groups = [
        with_rewards(group, SPREAD if number < 3 else EQUAL, correct=correct)
        for number, group in enumerate(drawn)
    ]
    assert post(driver, 1, groups).complete
    batch = driver.client.batch(1)
    assert [member.prompt_uid for member in batch.members] == [g.prompt_uid for g in drawn[:3]]
    k = 4 if correct else 0
    assert reasons(driver, 1, drawn[0].prompt_uid)["fresh"] == (
        f"drawn at this step: {k} of 4 correct at step 1, with rewards from 0.25 to 1.25"
    )
    assert reasons(driver, 1, drawn[3].prompt_uid)["fresh"] == (
        f"{k} of 4 correct at step 1: removed by the online filter (fresh.filter = range), because "
        "a group with equal rewards has no advantage and no gradient"
    )


def test_correct_responses_alone_are_no_signal(stack: Endpoints) -> None:
    driver = make_driver(stack, "equal-rewards")
    group, *others = driver.groups(1)
    equal = with_rewards(group, EQUAL)
    responses = [dataclasses.replace(equal.responses[0], correct=True), *equal.responses[1:]]
    half = dataclasses.replace(equal, responses=responses)
    post(driver, 1, [half, *(with_rewards(other, SPREAD) for other in others)])
    assert group.prompt_uid not in {member.prompt_uid for member in driver.client.batch(1).members}
    assert (
        "1 of 4 correct at step 1, with equal rewards of 0.5: removed"
        in (reasons(driver, 1, group.prompt_uid)["fresh"])
    )


def test_dynamic_sampling_ends_when_groups_with_different_rewards_fill_the_batch(
    stack: Endpoints,
) -> None:
    rollout = {"prompts_per_step": 4, "group_size": 4, "max_generation_rounds": 3}
    driver = make_driver(stack, "real-dapo", algorithm="dapo", rollout=rollout)
    first = [with_rewards(group, EQUAL) for group in driver.groups(1)]
    assert not post(driver, 1, first).complete
    second = [with_rewards(group, SPREAD) for group in driver.groups(1, generation_round=1)]
    assert post(driver, 1, second).complete
    batch = driver.client.batch(1)
    assert {member.prompt_uid for member in batch.members} == {g.prompt_uid for g in second}


def test_the_punishment_of_length_alone_is_no_signal(stack: Endpoints) -> None:
    """DAPO's filter compares answers (arXiv 2503.14476, Eq. 11)."""
    rollout = {"prompts_per_step": 4, "group_size": 4, "max_generation_rounds": 1}
    driver = make_driver(stack, "overlong", algorithm="dapo", rollout=rollout)
    drawn = driver.groups(1)
    punished = (0.0, -0.25, -0.5, -1.0)
    groups = [
        with_rewards(group, SPREAD if number else EQUAL, overlong=punished)
        for number, group in enumerate(drawn)
    ]
    assert post(driver, 1, groups).complete
    batch = driver.client.batch(1)
    assert [member.prompt_uid for member in batch.members] == [g.prompt_uid for g in drawn[1:]]
    assert reasons(driver, 1, drawn[0].prompt_uid)["fresh"].endswith(
        "because its rewards are equal without the punishment of length, which the filter does not "
        "count"
    )


def test_replay_of_mixed_groups_has_those_whose_rewards_differ(stack: Endpoints) -> None:
    driver = make_driver(stack, "real-dots", algorithm="dots", sampler="uniform")
    mixed: set[str] = set()
    for step in (1, 2):
        drawn = driver.groups(step)
        groups = [with_rewards(group, SPREAD if n < 2 else EQUAL) for n, group in enumerate(drawn)]
        post(driver, step, groups)
        replayed = {
            member.prompt_uid
            for member in driver.client.batch(step).members
            if member.source == "replayed"
        }
        assert replayed == mixed, "all fit into the batch, and the prompts of both steps differ"
        mixed |= {group.prompt_uid for group in drawn[:2]}
        driver.client.commit(step, {})
    assert {entry.prompt_uid for entry in driver.client.buffer("high_quality")} == mixed
    assert reasons(driver, 2, min(replayed))["replayed"].endswith(
        "0 of 4 correct at step 1, with rewards from 0.25 to 1.25, with different rewards "
        "(replay.select = mixed)"
    )


def create_with_reward_function(client: BufferClient, config: RunConfig) -> None:
    store_reward(config, client)
    client.create_run(prepare_run(config, TINY_MODEL, DataSources(), client, show=lambda _: None))


def reward_function_config(
    directory: Path, name: str, solved_at: float | None = None, **sections: Any
) -> RunConfig:
    """Writes a reward function and its data to the working directory; returns a configuration."""
    (directory / "rewards.py").write_text("def score(completions, **columns): ...")
    rows = [json.dumps({"prompt": f"{number}+1="}) for number in range(12)]
    (directory / "train.jsonl").write_text("\n".join(rows[:8]))
    (directory / "test.jsonl").write_text("\n".join(rows[8:]))
    task = {
        "reward": "rewards.py:score",
        "solved_at": solved_at,
        "train_path": "train.jsonl",
        "test_path": "test.jsonl",
    }
    return pin_reward(small_config(name, task=task, **sections))


@pytest.mark.parametrize("solved_at", [None, 1.0])
def test_the_best_checkpoints_of_a_reward_function_are_those_with_the_highest_rewards(
    stack: Endpoints,
    solved_at: float | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a threshold, responses are correct or wrong, and the accuracy decides."""
    monkeypatch.chdir(tmp_path)
    name = "best-reward" if solved_at is None else "best-accuracy"
    config = reward_function_config(
        tmp_path,
        name,
        solved_at,
        evaluation={"every": 2},
        checkpoint={"every": 2, "keep": 1, "keep_best": 1},
    )
    driver = Driver(stack, config, create_with_reward_function)
    # Version v holds the weights after v - 1 steps.
    evaluations = {2: (True, 1.0), 4: (False, 2.0)}
    for step in range(1, 6):
        driver.run_step(step)
        if step % 2:
            driver.client.record_checkpoint(step, "a" * 64)
        if step in evaluations:
            correct, reward = evaluations[step]
            groups = [
                with_rewards(group, (reward,) * 4, correct=correct)
                for group in driver.groups(step, "evaluation")
            ]
            driver.client.post_groups(step, "evaluation", encode_groups(groups))
    kept = driver.client.checkpoints()
    best, scores = (3, (0.0, 2.0)) if solved_at is None else (1, (1.0, 1.0))
    assert {view.step: (view.accuracy, view.reward) for view in kept} == {
        5: (None, None),
        best: scores,
    }
    task = driver.client.run_state().config.task
    assert [view.step for view in select_checkpoints(name, kept, best_of=task)] == [best]
