"""Demonstrations through the real service, on real Postgres and S3: LUFFY and ReLIFT."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from bapo_core.config import RunConfig
from bapo_core.errors import BapoError
from bapo_core.tasks.countdown import CountdownTask
from services.buffer.api import wire
from services.buffer.api.trajectories import TrajectoryGroup, encode_groups
from services.common.objectstore import ObjectStore
from services.datasets import load_datasets
from services.model.resolve import TINY_MODEL
from services.stack.stack import Endpoints
from services.trainer.data import TrajectoryReader
from services.trainer.demonstrations import DemonstrationEncoder
from tests.integration.support.driver import Driver, small_config, snapshot

B, G, EVERY = 8, 4, 5
TASK = {"options": {"template": "short"}, "train_prompts": 24, "test_prompts": 4}
ROLLOUT = {"prompts_per_step": B, "group_size": G}
STEPS = range(1, 11)


class Recorder(Driver):
    """Drives a run, and records the groups that it posted."""

    def __init__(self, stack: Endpoints, config: RunConfig) -> None:
        super().__init__(stack, config)
        self.posted: dict[int, list[TrajectoryGroup]] = {}
        self.payloads: Mapping[str, Any] = {
            prompt.uid: prompt.payload for prompt in load_datasets(config).train.prompts
        }

    def roll_out(self, step: int) -> None:
        self.posted[step] = self.groups(step)
        self.client.post_groups(step, "fresh", encode_groups(self.posted[step]))


@pytest.fixture
def make(stack: Endpoints, request: pytest.FixtureRequest) -> Callable[..., Recorder]:
    def build(algorithm: str, suffix: str = "", **sections: Any) -> Recorder:
        name = request.node.name.split("[")[0].replace("_", "-")[:50] + suffix
        settings = {"task": TASK, "rollout": ROLLOUT, "sync": {"every": 1}, **sections}
        return Recorder(stack, small_config(name, algorithm=algorithm, **settings))

    return build


@pytest.mark.parametrize("join", ["all", "unsolved"])
def test_a_demonstration_takes_the_place_of_a_response(
    make: Callable[..., Recorder], join: str
) -> None:
    driver = make("luffy", f"-{join}", demonstrations={"join": join})
    task, joined = CountdownTask(template="short"), 0
    for step in range(1, 4):
        manifest = driver.run_step(step)
        for group, member in zip(driver.posted[step], manifest.members, strict=True):
            assert member.prompt_uid == group.prompt_uid
            if join == "unsolved" and group.correct:
                assert (member.demonstration, member.rows) == (None, None)
                continue
            joined += 1
            assert member.rows == [1, 2, 3]
            assert member.response_count == G
            payload = driver.payloads[member.prompt_uid]
            assert member.demonstration is not None
            assert task.verify(payload, member.demonstration).reward == 1.0
        assert driver.client.recorded_batch(step) == manifest
    assert joined > 3


def test_an_unsolved_group_with_a_demonstration_passes_the_filter(
    make: Callable[..., Recorder],
) -> None:
    driver = make("luffy", demonstrations={"join": "unsolved"}, fresh={"filter": "range"})
    for step in range(1, 4):
        manifest = driver.run_step(step)
        expected = [group.prompt_uid for group in driver.posted[step] if group.correct < G]
        assert [member.prompt_uid for member in manifest.members] == expected


def test_the_trainer_reads_a_demonstration_in_the_tokens_of_the_model(
    make: Callable[..., Recorder], stack: Endpoints
) -> None:
    from transformers import AutoTokenizer

    driver = make("luffy")
    members = driver.run_step(1).members
    store = ObjectStore(stack.object_store)
    encoder = DemonstrationEncoder(driver.config, TINY_MODEL)
    batch = TrajectoryReader(store, encoder=encoder).batch(members)
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    assert batch.sources == (["fresh"] * (G - 1) + ["demonstrated"]) * B
    assert batch.demonstrated[:, 0].tolist() == ([False] * (G - 1) + [True]) * B
    assert batch.sizes.tolist() == [G] * B
    for index, (group, member) in enumerate(zip(driver.posted[1], members, strict=True)):
        row = index * G + G - 1
        start, end = int(batch.prompt_lengths[row]), int(batch.lengths[row])
        assert batch.tokens[row, :start].tolist() == group.prompt_token_ids
        *text, last = batch.tokens[row, start:end].tolist()
        assert tokenizer.decode(text) == member.demonstration
        assert last == tokenizer.eos_token_id
        assert not batch.behavior_logprobs[row].any()
        rewards = [response.reward for response in group.responses[1:]]
        assert batch.rewards[index].tolist() == [*rewards, 1.0]


def supervised_by_the_paper(unsolved: list[str], queue: list[str]) -> tuple[list[str], list[str]]:
    """Returns the prompts of a supervised update, and the queue after it: the newest `EVERY`."""
    due = queue[-EVERY:] if len(queue) >= EVERY else []
    left = [uid for uid in queue if uid not in due and uid not in unsolved]
    return due, left + unsolved


def test_relift_supervises_the_newest_unsolved_prompts(make: Callable[..., Recorder]) -> None:
    driver = make("relift", demonstrations={"supervise_every": EVERY})
    queue: list[str] = []
    updates = 0
    for step in STEPS:
        manifest = driver.run_step(step)
        unsolved = [group.prompt_uid for group in driver.posted[step] if group.correct == 0]
        due, queue = supervised_by_the_paper(unsolved, queue)
        assert sorted(member.prompt_uid for member in manifest.supervised) == sorted(due)
        for member in manifest.supervised:
            assert (member.source, member.rows, member.response_count) == ("demonstrated", [], 1)
            assert member.demonstration == driver.payloads[member.prompt_uid]["demonstration"]
        assert all(member.demonstration is None for member in manifest.members)
        updates += bool(due)
    assert updates >= 3
    events = driver.client.buffer_events("hard")
    assert sum(event.reason == "supervised" for event in events) == updates * EVERY


@pytest.mark.parametrize(
    ("algorithm", "section"), [("luffy", {"join": "all"}), ("relift", {"supervise_every": EVERY})]
)
def test_after_a_rewind_the_same_steps_give_the_same_demonstrations(
    make: Callable[..., Recorder], algorithm: str, section: dict[str, Any]
) -> None:
    driver = make(algorithm, f"-{algorithm}", demonstrations=section)

    def demonstrations(manifest: wire.BatchManifest) -> list[tuple[str, str | None]]:
        members = [*manifest.members, *manifest.supervised]
        return [(member.prompt_uid, member.demonstration) for member in members]

    before = {step: demonstrations(driver.run_step(step)) for step in STEPS}
    rows = snapshot(driver)
    driver.client.rewind(4)
    for step in range(5, STEPS[-1] + 1):
        assert demonstrations(driver.run_step(step)) == before[step]
    assert snapshot(driver) == rows


def test_a_demonstration_that_is_too_long_is_refused_by_name(
    make: Callable[..., Recorder], stack: Endpoints, tmp_path: Path
) -> None:
    driver = make("luffy", rollout={**ROLLOUT, "max_response_tokens": 3})
    reader = TrajectoryReader(
        ObjectStore(stack.object_store),
        encoder=DemonstrationEncoder(driver.config, TINY_MODEL),
    )
    with pytest.raises(BapoError, match=r"more than rollout.max_response_tokens \(3\); raise it"):
        reader.batch(driver.run_step(1).members)
