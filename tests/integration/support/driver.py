"""Acts as collector and trainer of a run, with synthetic rewards, against the real service."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import psycopg

from bapo_core.config import RunConfig, config_from
from bapo_core.seeding import derive_rng
from services.buffer.api import wire
from services.buffer.api.client import BufferClient
from services.buffer.api.trajectories import TrajectoryGroup, TrajectoryResponse, encode_groups
from services.datasets import load_datasets
from services.stack.stack import Endpoints

WINDOW = {"c2_range": [0.25, 0.5], "c3_range": [0.5, 0.75]}
"""`replay.window` of a small run."""


def small_config(name: str, **sections: Any) -> RunConfig:
    """Returns the configuration of a run of 12 steps with 8 prompts of 4 responses each."""
    return config_from(
        {
            "name": name,
            "steps": 12,
            "task": {"options": {"template": "short"}, "train_prompts": 24, "test_prompts": 4},
            "rollout": {"prompts_per_step": 8, "group_size": 4},
            "sync": {"every": 2, "reevaluate_every": 2},
            "reevaluate": {"c1": 0.25},
            "optimizer": {"minibatch_prompts": 4},
            "evaluation": {"every": 4},
            "checkpoint": {"every": 2},
            **({} if "algorithm" in sections else {"replay": {"window": WINDOW}}),
            **sections,
        }
    )


def create_run(client: BufferClient, config: RunConfig) -> None:
    """Uploads the prompts of a run and creates it; its first attempt has not begun."""
    datasets = load_datasets(config)
    for dataset in datasets.all:
        client.upload_dataset(dataset.name, dataset.prompts)
    client.create_run(datasets.run_request(config))


def stop_open_runs(url: str, token: str) -> None:
    """Stops the runs of other tests on the same services, which would be in front in the queue."""
    client = BufferClient(url, token)
    for run in client.runs():
        if run.status in wire.OPEN_STATUSES:
            client.run = run.name
            client.stop()


class Driver:
    """Creates a run and drives it step by step; rewards depend on (seed, step, prompt) alone."""

    def __init__(
        self,
        stack: Endpoints,
        config: RunConfig,
        create: Callable[[BufferClient, RunConfig], None] = create_run,
    ) -> None:
        self.config, self.stack = config, stack
        self.client = BufferClient(stack.buffer_url, stack.token, run=config.name)
        create(self.client, config)
        self.client.begin_attempt()

    def groups(
        self, step: int, kind: wire.Kind = "fresh", generation_round: int = 0
    ) -> list[TrajectoryGroup]:
        """Returns the groups that a collector would post for this step and round."""
        prompts = self.client.step_prompts(step, kind, generation_round)
        return [
            synthetic_group(
                prompt.uid,
                prompts.policy_version,
                size=self.config.rollout.group_size,
                rng=derive_rng(self.config.seed, "rewards", kind, step, prompt.uid),
            )
            for prompt in prompts.prompts
        ]

    def roll_out(self, step: int) -> None:
        """Posts the fresh groups and, when due, the re-evaluations."""
        for generation_round in range(self.config.rollout.max_generation_rounds):
            body = encode_groups(self.groups(step, generation_round=generation_round))
            if self.client.post_groups(step, "fresh", body).complete:
                break
        if self.config.reevaluate.enabled and self.config.schedule.reevaluates_at(step):
            groups = self.groups(step, "reevaluation")
            if groups:
                self.client.post_groups(step, "reevaluation", encode_groups(groups))

    def run_step(self, step: int) -> wire.BatchManifest:
        """Runs a whole step, from prompts to commit, and returns its batch."""
        self.roll_out(step)
        manifest = self.client.batch(step)
        self.client.commit(step, self.metrics_of(step))
        return manifest

    def metrics_of(self, step: int) -> dict[str, float]:  # noqa: ARG002
        """Returns the metrics with which a step is committed."""
        return {"loss": 0.5}


def synthetic_group(
    uid: str, policy_version: int, *, size: int, rng: random.Random
) -> TrajectoryGroup:
    """Builds a group of random responses, of which a random share is correct."""
    ability = rng.random()
    responses = []
    for _ in range(size):
        tokens = [rng.randrange(2, 20) for _ in range(rng.randrange(1, 6))]
        logprobs = [-rng.random() for _ in tokens]
        correct = rng.random() < ability
        responses.append(
            TrajectoryResponse(
                token_ids=tokens,
                logprobs=logprobs,
                reward=float(correct),
                finish_reason="stop",
                text="1+2",
                correct=correct,
                reward_parts={"answer": float(correct)},
                answer="1+2",
                status="ok" if correct else "wrong_value",
                extracted="1 + 2",
            )
        )
    return TrajectoryGroup(uid, [2, 3, 4], policy_version, responses)


ORDER_BY = {
    "prompt_difficulty": "run_id, prompt_id",
    "rollout_group": "step, kind, position",
    "buffer_entry": "buffer, inserted_step, group_id",
    "batch_member": "step, position",
    "step_record": "step",
    "weight_version": "version",
    "checkpoint": "step",
    "difficulty_snapshot": "step",
    "evaluation": "version, evaluation_set",
}


_GROUP_ID = re.compile(r"'group_id': \d+,? ?")
"""A group's id in a column of JSON values."""


def snapshot(driver: Driver) -> dict[str, list[tuple[Any, ...]]]:
    """Returns every row of the run by table, without ids, times and the name of the run.

    Groups of steps that are not committed are left out. Two runs with the same history then have
    equal snapshots.
    """
    unstable = {"id", "run_id", "group_id", "created_at", "committed_at"}
    prefix = f"runs/{driver.config.name}/"
    rows = {}
    url = driver.stack.database_url.replace("postgresql+psycopg", "postgresql")
    with psycopg.connect(url) as connection:
        for table, order in ORDER_BY.items():
            committed = "and t.step <= run.current_step" if table == "rollout_group" else ""
            cursor = connection.execute(
                f"select t.* from {table} t join run on run.id = t.run_id "  # type: ignore[arg-type]
                f"where run.name = '{driver.config.name}' {committed} order by {order}"
            )
            assert cursor.description is not None
            names = [column.name for column in cursor.description]
            kept = [i for i, name in enumerate(names) if name not in unstable]
            rows[table] = [
                tuple(_GROUP_ID.sub("", str(row[i]).removeprefix(prefix)) for i in kept)
                for row in cursor
            ]
    return rows
