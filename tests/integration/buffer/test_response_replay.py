"""Response replay through the real service, on real Postgres and S3.

Batches are compared with transcriptions of RePO, ARPO and ExGRPO in plain Python, from the rewards
that the test posted itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from bapo_core.sampling import prompt_positions
from bapo_core.seeding import derive_rng
from services.buffer.api import wire
from services.buffer.api.trajectories import TrajectoryGroup, encode_groups
from services.common.objectstore import ObjectStore
from services.datasets import load_datasets
from services.stack.stack import Endpoints
from services.trainer.data import TrajectoryReader
from tests.integration.support.driver import Driver, small_config, snapshot

B, G, PROMPTS = 8, 4, 16
TASK = {"options": {"template": "short"}, "train_prompts": PROMPTS, "test_prompts": 4}
ROLLOUT = {"prompts_per_step": B, "group_size": G}
STEPS = range(1, 11)
REPO = {"candidates": 8, "min_candidates": 8, "count": 6}
Rows = list[tuple[int, tuple[int, ...] | None, bool]]


class Recorder(Driver):
    """Drives a run, and records the responses that it posted."""

    def __init__(self, stack: Endpoints, algorithm: str, name: str, **sections: Any) -> None:
        settings = {"task": TASK, "rollout": ROLLOUT, "sync": {"every": 1}, **sections}
        super().__init__(stack, small_config(name, algorithm=algorithm, **settings))
        self.posted: dict[int, list[TrajectoryGroup]] = {}

    def roll_out(self, step: int) -> None:
        self.posted[step] = self.groups(step)
        self.client.post_groups(step, "fresh", encode_groups(self.posted[step]))

    def earlier(self, uid: str, step: int) -> list[tuple[int, int, float]]:
        """Returns (step, row, reward) of the responses to a prompt before `step`, oldest first."""
        return [
            (before, row, response.reward)
            for before in range(1, step)
            for group in self.posted[before]
            if group.prompt_uid == uid
            for row, response in enumerate(group.responses)
        ]


def rows_by_prompt(manifest: wire.BatchManifest) -> dict[str, Rows]:
    """Returns (step, rows, joins previous) of the members of each prompt, in order."""
    prompts: dict[str, Rows] = {}
    for member in manifest.members:
        rows = None if member.rows is None else tuple(member.rows)
        prompts.setdefault(member.prompt_uid, []).append((member.step, rows, member.joins_previous))
    return prompts


@pytest.fixture
def make(stack: Endpoints, request: pytest.FixtureRequest) -> Callable[..., Recorder]:
    def build(algorithm: str, suffix: str = "", **sections: Any) -> Recorder:
        name = request.node.name.split("[")[0].replace("_", "-")[:50] + suffix
        return Recorder(stack, algorithm, name, **sections)

    return build


@pytest.mark.parametrize("advantages", ["split", "mixed"])
def test_repo_replays_the_recent_responses_of_each_prompt(
    make: Callable[..., Recorder], advantages: str
) -> None:
    driver = make("repo", f"-{advantages}", response_replay={**REPO, "advantages": advantages})
    replayed = 0
    for step in STEPS:
        manifest = driver.run_step(step)
        batch = rows_by_prompt(manifest)
        assert list(batch) == [group.prompt_uid for group in driver.posted[step]]
        for uid, members in batch.items():
            expected: Rows = [(step, None, False)]
            cached = driver.earlier(uid, step)[-8:]
            if len(cached) == 8:
                recent = cached[-6:]
                steps = sorted({before for before, _, _ in recent})
                for number, before in enumerate(steps):
                    rows = tuple(row for of_step, row, _ in recent if of_step == before)
                    expected.append((before, rows, number > 0 or advantages == "mixed"))
                replayed += 6
            assert members == expected
        assert manifest.counts["replayed_responses"] == sum(
            len(member.rows or []) for member in manifest.members
        )
    assert replayed > 100


def test_the_trainer_reads_the_responses_that_the_manifest_names(
    make: Callable[..., Recorder], stack: Endpoints
) -> None:
    driver = make("repo", response_replay={**REPO, "advantages": "mixed"})
    for step in STEPS:
        manifest = driver.run_step(step)
    batch = TrajectoryReader(ObjectStore(stack.object_store)).batch(manifest.members)
    by_step = {
        (step, group.prompt_uid): group.responses
        for step, groups in driver.posted.items()
        for group in groups
    }
    expected = [
        by_step[member.step, member.prompt_uid][row]
        for member in manifest.members
        for row in (member.rows if member.rows is not None else range(G))
    ]
    assert batch.row_rewards.tolist() == [response.reward for response in expected]
    for row, response in enumerate(expected):
        prompt, length = int(batch.prompt_lengths[row]), int(batch.lengths[row])
        assert batch.tokens[row, prompt:length].tolist() == response.token_ids
    assert set(batch.sizes.tolist()) == {G + 6}
    assert batch.sources == (["fresh"] * G + ["replayed"] * 6) * B


def test_arpo_puts_a_success_into_a_group_without_any(make: Callable[..., Recorder]) -> None:
    driver = make("arpo")
    completed = 0
    for step in STEPS:
        manifest = driver.run_step(step)
        for group, members in zip(
            driver.posted[step], rows_by_prompt(manifest).values(), strict=True
        ):
            successes = [
                (before, row)
                for before, row, reward in driver.earlier(group.prompt_uid, step)
                if reward == 1.0
            ][-8:]
            if group.correct or not successes:
                assert members == [(step, None, False)]
                continue
            completed += 1
            kept, (before, rows, joined) = members
            assert kept == (step, (1, 2, 3), False)
            assert joined
            assert rows is not None
            (row,) = rows
            assert (before, row) in successes
    assert completed > 3


def test_exgrpo_revisits_prompts_solved_in_part_and_retires_solved_ones(
    make: Callable[..., Recorder],
) -> None:
    """With v = 1, the prompts of a step depend on the results of all earlier steps."""
    driver = make("exgrpo", task={**TASK, "train_prompts": 24})
    uids = [prompt.uid for prompt in load_datasets(driver.config)[0].prompts]
    seed, revisited_in_all, retired_in_all = driver.config.seed, 0, 0
    for step in STEPS:
        last = {
            group.prompt_uid: group.correct
            for before in range(1, step)
            for group in driver.posted[before]
        }
        accuracies = [
            sum(group.correct for group in driver.posted[before]) / (B * G)
            for before in range(1, step)
        ]
        in_epoch = [
            uids[position]
            for position in prompt_positions(seed, step, dataset_size=24, prompts_per_step=B)
        ]
        if any(accuracy > 0.35 for accuracy in accuracies):
            rng = derive_rng(seed, "revisit", step)
            buckets = {
                k: sorted(uids.index(uid) for uid, correct in last.items() if correct == k)
                for k in range(1, G)
            }
            revisited: list[str] = []
            while len(revisited) < B // 2 and any(buckets.values()):
                keys = [k for k in buckets if buckets[k]]
                (k,) = rng.choices(keys, [math.exp(-((k - G / 2) ** 2) / 2) for k in keys])
                at = rng.randrange(len(buckets[k]))
                buckets[k][at], buckets[k][-1] = buckets[k][-1], buckets[k][at]
                revisited.append(uids[buckets[k].pop()])
            others = [uid for uid in in_epoch if uid not in revisited]
            new = [uid for uid in others if last.get(uid) != G]
            retired_in_all += len(others) - len(new)
            old = [uid for uid in others if last.get(uid) == G]
            expected = [*revisited, *[*new, *old][: B - len(revisited)]]
        else:
            revisited, expected = [], in_epoch
        revisited_in_all += len(revisited)
        manifest = driver.run_step(step)
        assert [group.prompt_uid for group in driver.posted[step]] == expected
        for rank, (uid, members) in enumerate(rows_by_prompt(manifest).items()):
            if rank >= len(revisited):
                assert members == [(step, None, False)], uid
                continue
            kept, (before, rows, joined) = members
            assert kept == (step, (1, 2, 3), False)
            assert joined
            best = max(
                (sum(response.logprobs) / len(response.logprobs), earlier, row)
                for earlier in range(1, step)
                for group in driver.posted[earlier]
                if group.prompt_uid == uid
                for row, response in enumerate(group.responses)
                if response.correct
            )
            assert (before, rows) == (best[1], (best[2],))
    assert revisited_in_all > 10
    assert retired_in_all > 3


@pytest.mark.parametrize("algorithm", ["repo", "arpo", "exgrpo"])
def test_after_a_rewind_the_same_steps_give_the_same_rows(
    make: Callable[..., Recorder], algorithm: str
) -> None:
    driver = make(algorithm, f"-{algorithm}", task={**TASK, "train_prompts": 24})
    for step in STEPS:
        driver.run_step(step)
    before = snapshot(driver)
    assert any(row for row in before["batch_member"])
    driver.client.rewind(5)
    for step in range(6, STEPS[-1] + 1):
        driver.run_step(step)
    assert snapshot(driver) == before


def test_the_explanation_of_a_decision_names_the_replayed_responses(
    make: Callable[..., Recorder],
) -> None:
    driver = make("repo", response_replay=REPO)
    for step in STEPS:
        manifest = driver.run_step(step)
    uid = next(member.prompt_uid for member in manifest.members if member.rows is not None)
    decision = driver.client.decision(STEPS[-1], uid)
    assert decision.source == "fresh"
    replayed = decision.considered[2]
    assert (replayed.source, replayed.outcome) == ("replayed", "used")
    assert "responses of earlier steps joined its fresh group: " in replayed.reason
    early = driver.client.decision(1, driver.posted[1][0].prompt_uid).considered[2]
    assert early.outcome == "not_used"
    assert "response_replay.min_candidates = 8" in early.reason
