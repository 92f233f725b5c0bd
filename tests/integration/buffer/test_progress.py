"""What a run works at is read from the groups, batches and weights that are recorded."""

from __future__ import annotations

import random

from services.buffer.api import wire
from services.buffer.api.trajectories import encode_groups
from services.stack.stack import Endpoints
from tests.integration.support.driver import Driver, small_config, synthetic_group


def test_progress_counts_the_groups_that_a_step_and_its_evaluation_still_lack(
    stack: Endpoints,
) -> None:
    driver = Driver(stack, small_config("progress", steps=2))
    client = driver.client

    def fresh(step: int, groups: int) -> wire.RolloutProgress:
        return wire.RolloutProgress(kind="fresh", step=step, groups=groups, expected=8)

    def base(groups: int) -> wire.RolloutProgress:
        return wire.RolloutProgress(
            kind="evaluation", step=1, evaluation_set="test", groups=groups, expected=4
        )

    assert client.progress() == wire.RunProgress(
        step=1, has_batch=False, newest_version=0, rollouts=[fresh(1, 0), base(0)]
    )
    client.post_groups(1, "fresh", encode_groups(driver.groups(1)[:5]))
    prompts = client.step_prompts(1, "evaluation").prompts
    samples = driver.config.evaluation_sets["test"].samples
    groups = [synthetic_group(item.uid, 1, size=samples, rng=random.Random(1)) for item in prompts]
    client.post_groups(1, "evaluation", encode_groups(groups[:3]))
    assert client.progress().rollouts == [fresh(1, 5), base(3)]

    client.post_groups(1, "fresh", encode_groups(driver.groups(1)[5:]))
    assert client.progress().rollouts[0] == fresh(1, 8)
    client.batch(1)
    client.post_groups(1, "evaluation", encode_groups(groups[3:]))
    training = client.progress()
    assert (training.has_batch, training.rollouts) == (True, [])

    client.commit(1, {"loss": 0.5})
    next_step = client.progress()
    assert (next_step.step, next_step.has_batch) == (2, False)
    assert next_step.rollouts[0] == fresh(2, 0)

    driver.run_step(2)
    after = client.progress()
    assert (after.step, after.has_batch) == (3, False)
    assert [job.step for job in after.open_evaluations] == [3]


def test_progress_of_dynamic_sampling_expects_the_rounds_that_have_begun(stack: Endpoints) -> None:
    task = {"options": {"template": "short"}, "train_prompts": 48, "test_prompts": 4}
    config = small_config("progress-rounds", algorithm="dapo", task=task)
    driver = Driver(stack, config)
    per_round = config.rollout.prompts_per_step
    assert config.rollout.max_generation_rounds > 1
    expected = [driver.client.progress().rollouts[0].expected]
    for generation_round in range(config.rollout.max_generation_rounds):
        groups = driver.groups(1, generation_round=generation_round)
        complete = driver.client.post_groups(1, "fresh", encode_groups(groups)).complete
        expected.append(driver.client.progress().rollouts[0].expected)
        if complete:
            break
    rounds = len(expected) - 1
    assert expected == [per_round * number for number in [*range(1, rounds + 1), rounds]]
