"""Several evaluation sets of a run, against the real service."""

from __future__ import annotations

import random
from typing import Any

import pytest

from bapo_core.config import ConfigHistory, RunConfig
from bapo_core.metrics import pass_at_k
from services.buffer.api import wire
from services.buffer.api.trajectories import TrajectoryGroup, TrajectoryResponse, encode_groups
from services.common.errors import ServiceError
from services.datasets import load_datasets
from services.rollout.jobs import plan_jobs
from services.stack.stack import Endpoints
from tests.integration.support.driver import Driver, small_config, synthetic_group

SETS: dict[str, Any] = {
    "cd-34": {"prompts": 5, "samples": 4, "every": 4},
    "cd-4": {"options": {"template": "short", "numbers": [4]}, "prompts": 3, "samples": 2},
}
"""CD-4 has the interval of `evaluation.every`."""


def sets_config(name: str, **sections: Any) -> RunConfig:
    return small_config(name, evaluation={"every": 6, "sets": SETS}, **sections)


def evaluate(driver: Driver, version: int, name: str) -> list[TrajectoryGroup]:
    """Posts a complete evaluation of a version on a set."""
    prompts = driver.client.step_prompts(version, "evaluation", evaluation_set=name)
    size = driver.config.evaluation_sets[name].samples
    rng = random.Random(f"{version} {name}")
    groups = [synthetic_group(item.uid, version, size=size, rng=rng) for item in prompts.prompts]
    driver.client.post_groups(version, "evaluation", encode_groups(groups), evaluation_set=name)
    return groups


def test_each_set_has_its_own_interval() -> None:
    """Version 13 holds the final weights of 12 steps."""
    config = sets_config("intervals")
    evaluations = [
        (job.step, job.evaluation_set)
        for job in plan_jobs(ConfigHistory(config), 1)
        if job.kind == "evaluation"
    ]
    assert evaluations == [
        *[(1, "cd-34"), (1, "cd-4")],
        (4, "cd-34"),
        (6, "cd-4"),
        (8, "cd-34"),
        *[(12, "cd-34"), (12, "cd-4")],
        *[(13, "cd-34"), (13, "cd-4")],
    ]


def test_a_run_that_goes_on_asks_only_for_the_evaluations_that_it_lacks() -> None:
    config = sets_config("lacking")
    every = [job for job in plan_jobs(ConfigHistory(config), 10) if job.kind == "evaluation"]
    evaluated = {(1, "cd-34"), (1, "cd-4"), (4, "cd-34"), (6, "cd-4")}
    lacking = [
        job for job in plan_jobs(ConfigHistory(config), 10, evaluated) if job.kind == "evaluation"
    ]
    assert (lacking[0].step, lacking[0].evaluation_set) == (8, "cd-34")
    assert lacking == every[4:]


@pytest.mark.parametrize("v", [1, 2, 5])
@pytest.mark.parametrize("lag", [0, 1, 4, 20])
@pytest.mark.parametrize("first", [1, 6])
def test_rollouts_that_run_ahead_do_not_wait_for_evaluations(v: int, lag: int, first: int) -> None:
    """A job may need a version that the trainer publishes after the rollouts before the job."""
    sync = {"every": v, "lag": lag}
    config = small_config("ahead", sync=sync, reevaluate={"enabled": False})
    jobs = list(plan_jobs(ConfigHistory(config), first))
    assert [job.step for job in jobs if job.kind == "fresh"] == list(range(first, 13))
    evaluations = [job.step for job in jobs if job.kind == "evaluation"]
    assert evaluations == [1, 4, 8, 12, 13]
    rolled_out = first - 1
    for job in jobs:
        version = config.rollout_version(job.step, job.kind)
        assert version <= rolled_out + 1, "the trainer waits for rollouts that come later"
        if job.kind == "fresh":
            rolled_out = job.step
    if lag:
        (last,) = [n for n, job in enumerate(jobs) if (job.step, job.kind) == (12, "fresh")]
        needed = {config.rollout_version(job.step, job.kind) for job in jobs[:last]}
        # It can begin before the trainer has made the steps of the lag.
        assert max(needed) <= max(first - 1, 12 - lag, 1)


def test_results_are_kept_by_version_and_set(stack: Endpoints) -> None:
    driver = Driver(stack, sets_config("sets-results"))
    assert driver.client.run_state().test_datasets.keys() == SETS.keys()
    groups = evaluate(driver, 1, "cd-34")
    assert driver.client.evaluations("cd-4") == []
    others = evaluate(driver, 1, "cd-4")
    primary, second = driver.client.evaluation_sets()
    assert (primary.name, primary.primary, primary.every) == ("cd-34", True, 4)
    assert (second.name, second.primary, second.every) == ("cd-4", False, 6)
    (evaluation,) = primary.evaluations
    assert (evaluation.prompts, evaluation.samples) == (5, 4)
    assert sum(k * count for k, count in enumerate(evaluation.bins)) == sum(
        group.correct for group in groups
    )
    (evaluation,) = second.evaluations
    assert (evaluation.prompts, evaluation.samples) == (3, 2)
    assert evaluation.tokens == sum(group.token_count for group in others)
    assert driver.client.evaluations() == primary.evaluations
    migration = driver.client.evaluation_migration(1, 1, "cd-4")
    assert sum(map(sum, migration.matrix)) == 3


def test_the_sets_are_disjoint_from_the_training_prompts() -> None:
    datasets = load_datasets(sets_config("sets-disjoint"))
    train = {prompt.uid for prompt in datasets.train.prompts}
    assert len(train) == 24
    assert not train & {item.uid for test in datasets.test.values() for item in test.prompts}
    assert all(len(item.payload["nums"]) == 4 for item in datasets.test["cd-4"].prompts)


def test_scores_come_with_intervals_and_majority_votes(stack: Endpoints) -> None:
    """Prompt i has i correct responses of 4, whose answers agree; the others differ."""
    driver = Driver(stack, sets_config("sets-scores"))
    items = driver.client.step_prompts(1, "evaluation", evaluation_set="cd-34").prompts
    groups = [
        TrajectoryGroup(
            item.uid,
            [2, 3],
            1,
            [
                TrajectoryResponse(
                    *([5], [-0.5], float(n < k), "stop", "x", n < k),
                    answer="yes" if n < k else f"{n}",
                )
                for n in range(4)
            ],
        )
        for k, item in enumerate(items)
    ]
    driver.client.post_groups(1, "evaluation", encode_groups(groups), evaluation_set="cd-34")
    (evaluation,) = driver.client.evaluations("cd-34")
    scores = {(score.metric, score.k): score for score in evaluation.scores}
    assert scores.keys() == {(m, k) for m in ("pass", "maj") for k in (2, 4)} | {("mean", 4)}
    assert scores["mean", 4].value == 0.5
    # The standard deviation of 0, 1/4, ... 1 is 0.395285, so 1.96 s / sqrt(5) is 0.346477.
    assert scores["mean", 4].low == pytest.approx(0.5 - 0.346477, abs=1e-5)
    assert scores["mean", 4].high == pytest.approx(0.5 + 0.346477, abs=1e-5)
    passes = [pass_at_k(4, k, 2) for k in range(5)]
    assert scores["pass", 2].value == pytest.approx(sum(passes) / 5)
    assert scores["pass", 4].value == 0.8
    # With one correct response it comes first, and ties are won by the first answer.
    assert scores["maj", 4].value == 0.8
    # Blocks of two: 0; the first of two; the first of two; both, because of the tie; both.
    assert scores["maj", 2].value == pytest.approx((0 + 0.5 + 0.5 + 1 + 1) / 5)
    assert scores["pass", 4].high == 1.0
    assert evaluation.mean_reward == evaluation.mean_accuracy == 0.5


def test_without_recorded_answers_there_is_no_majority(stack: Endpoints) -> None:
    driver = Driver(stack, sets_config("sets-no-answers"))
    items = driver.client.step_prompts(1, "evaluation", evaluation_set="cd-4").prompts
    responses = [TrajectoryResponse([5], [-0.5], 1.0, "stop", "x", True) for _ in range(2)]
    groups = [TrajectoryGroup(item.uid, [2, 3], 1, responses) for item in items]
    driver.client.post_groups(1, "evaluation", encode_groups(groups), evaluation_set="cd-4")
    (evaluation,) = driver.client.evaluations("cd-4")
    assert {score.metric for score in evaluation.scores} == {"mean", "pass"}


@pytest.mark.parametrize(("answered", "expected"), [(0, None), (1, 0.2)])
def test_rewards_of_any_number_have_a_mean_and_no_majority_without_answers(
    stack: Endpoints, answered: int, expected: float | None
) -> None:
    """Of 5 prompts, the first `answered` have answers, which are correct."""
    driver = Driver(stack, sets_config(f"sets-rewards-{answered}"))
    items = driver.client.step_prompts(1, "evaluation", evaluation_set="cd-34").prompts
    groups = [
        TrajectoryGroup(
            item.uid,
            [2, 3],
            1,
            [
                TrajectoryResponse(
                    *([5], [-0.5], 0.5 * number, "stop", "x", number < answered),
                    answer="yes" if number < answered else "",
                )
                for _ in range(4)
            ],
        )
        for number, item in enumerate(items)
    ]
    driver.client.post_groups(1, "evaluation", encode_groups(groups), evaluation_set="cd-34")
    (evaluation,) = driver.client.evaluations("cd-34")
    assert evaluation.mean_reward == (0.0 + 0.5 + 1.0 + 1.5 + 2.0) / 5
    majority = [score.value for score in evaluation.scores if score.metric == "maj"]
    assert majority == ([] if expected is None else [expected, expected])


def test_checkpoints_have_the_accuracy_on_the_primary_set(stack: Endpoints) -> None:
    evaluation = {"every": 6, "sets": SETS, "primary": "cd-4"}
    config = small_config("sets-best", evaluation=evaluation)
    driver = Driver(stack, config)
    for step in range(1, 6):
        driver.run_step(step)
    for step in (3, 5):
        driver.client.record_checkpoint(step, f"{step}" * 64)
    evaluate(driver, 4, "cd-34")
    evaluate(driver, 6, "cd-4")
    (best,) = driver.client.evaluations()
    newest, older = driver.client.checkpoints()
    assert (newest.step, newest.accuracy) == (5, best.mean_accuracy)
    assert (older.step, older.accuracy) == (3, None)


@pytest.mark.parametrize(
    ("version", "kind", "name", "message"),
    [
        (1, "evaluation", "cd-5", "no evaluation set 'cd-5'; its sets are cd-34, cd-4"),
        (4, "evaluation", "cd-4", "version 4 is not evaluated on cd-4: its evaluation.every is 6"),
        (1, "fresh", "cd-4", "fresh groups are of no evaluation set"),
    ],
)
def test_rollouts_of_another_set_are_refused(
    stack: Endpoints, version: int, kind: wire.Kind, name: str, message: str
) -> None:
    driver = Driver(stack, sets_config(f"sets-refused-{version}-{kind}-{name[-1]}"))
    with pytest.raises(ServiceError, match=message) as refused:
        driver.client.step_prompts(version, kind, evaluation_set=name)
    assert refused.value.status == 400


def test_a_run_needs_a_dataset_for_each_set(stack: Endpoints) -> None:
    driver = Driver(stack, sets_config("sets-created"))
    state = driver.client.run_state()
    one = {"cd-34": state.test_datasets["cd-34"]}
    same = dict.fromkeys(SETS, one["cd-34"])
    for number, (datasets, message) in enumerate(
        [
            (one, "test_datasets names the sets cd-34, but the evaluation sets of the"),
            (same, "the same dataset for two sets"),
        ]
    ):
        request = wire.RunCreate(
            name=f"sets-refused-{number}",
            config=driver.config.model_dump(mode="json"),
            train_dataset=state.train_dataset,
            test_datasets=datasets,
        )
        with pytest.raises(ServiceError, match=message):
            driver.client.create_run(request)
