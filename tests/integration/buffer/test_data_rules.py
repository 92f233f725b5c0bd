"""The buffer service serves samplers and batch rules of plug-ins, and records their reasons."""

from __future__ import annotations

import psycopg
import pytest

from services.common.errors import ServiceError
from services.stack.stack import Endpoints
from tests.integration.support.driver import WINDOW, Driver, small_config, snapshot

# The plug-ins are those of docs/adding-a-method.md, in tests/plug_in/.
RULES = {
    "sampler": {"kind": "frontier", "explore": 0.5, "posterior_as_of": "step"},
    "batch": {"rule": "nearest", "most": 2},
    "replay": {"window": WINDOW, "buffer": {"max_age": 8}},
}


def test_a_run_follows_the_rules_of_a_plug_in_and_explains_them(stack: Endpoints) -> None:
    driver = Driver(stack, small_config("rules-plug-in", **RULES))
    replayed, explained = [], set()
    for step in range(1, 9):
        driver.run_step(step)
        members = driver.client.recorded_batch(step).members
        replayed.append(sum(member.source == "replayed" for member in members))
        for prompt in driver.client.all_prompts():
            decision = driver.client.decision(step, prompt.uid)
            assert decision.draw is not None
            assert decision.draw.sampler == "frontier"
            fresh = decision.considered[0]
            assert decision.draw.drawn == (fresh.outcome != "not_considered")
            explained |= {source.reason for source in decision.considered}
    assert max(replayed) == 2
    assert any("2 candidates are nearer to half (batch.most)" in reason for reason in explained)
    assert any("not drawn: others have a higher learnability" in reason for reason in explained)


def test_the_rounds_of_a_step_draw_different_prompts(stack: Endpoints) -> None:
    settings = {
        "sampler": {"kind": "frontier", "posterior_as_of": "step"},
        "rollout": {"prompts_per_step": 8, "group_size": 4, "max_generation_rounds": 3},
        "batch": {"capacity": 24},
    }
    driver = Driver(stack, small_config("rules-rounds", **settings))
    drawn = [
        prompt.uid
        for generation_round in range(3)
        for prompt in driver.client.step_prompts(1, "fresh", generation_round).prompts
    ]
    assert len(drawn) == len(set(drawn)) == 24


def test_prompts_that_are_drawn_without_a_rank_are_explained_as_drawn(stack: Endpoints) -> None:
    settings = {"sampler": {"kind": "exgrpo", "revisit_above": 0.0, "posterior_as_of": "step"}}
    driver = Driver(stack, small_config("rules-revisited", **settings))
    for step in range(1, 4):
        driver.run_step(step)
    drawn = {prompt.uid for prompt in driver.client.step_prompts(3).prompts}
    for prompt in driver.client.all_prompts():
        draw = driver.client.decision(3, prompt.uid).draw
        assert draw is not None
        assert draw.drawn == (prompt.uid in drawn)


def test_a_rewound_run_follows_the_rules_again(stack: Endpoints) -> None:
    driver = Driver(stack, small_config("rules-rewound", **RULES))
    for step in range(1, 4):
        driver.run_step(step)
    driver.client.record_checkpoint(3, "a" * 64)
    for step in range(4, 7):
        driver.run_step(step)
    first = snapshot(driver)
    assert driver.client.begin_attempt().current_step == 3
    for step in range(4, 7):
        driver.run_step(step)
    assert snapshot(driver) == first


def test_batches_without_recorded_reasons_are_explained_too(stack: Endpoints) -> None:
    """A batch of an earlier version is composed again, which gives the same reasons."""
    settings = {
        "demonstrations": {"supervise_every": 2},
        "reevaluate": {"enabled": False, "c1": 0.25},
    }
    driver = Driver(stack, small_config("rules-unrecorded", **settings))
    for step in range(1, 6):
        driver.run_step(step)
    uids = [prompt.uid for prompt in driver.client.all_prompts()]
    recorded = [[driver.client.decision(step, uid) for uid in uids] for step in range(1, 6)]
    manifests = [driver.client.recorded_batch(step) for step in range(1, 6)]
    assert any(manifest.supervised for manifest in manifests)
    with psycopg.connect(driver.stack.database_url.replace("+psycopg", "")) as connection:
        connection.execute(
            "update step_record set decisions = null, supervised = null from run "
            "where run.id = run_id and run.name = %s",
            [driver.config.name],
        )
    assert [driver.client.recorded_batch(step) for step in range(1, 6)] == manifests
    assert [[driver.client.decision(step, uid) for uid in uids] for step in range(1, 6)] == recorded


def test_a_sampler_that_fails_is_refused_with_its_cause(stack: Endpoints) -> None:
    driver = Driver(stack, small_config("rules-failing", sampler="unsound"))
    message = r"sampler unsound failed: ZeroDivisionError: .* \(bapo_unsound.py, line 11\)"
    with pytest.raises(ServiceError, match=message):
        driver.client.step_prompts(1)


def test_a_batch_rule_that_fails_is_refused_with_its_cause(stack: Endpoints) -> None:
    driver = Driver(stack, small_config("rules-failing-batch", batch="unsound"))
    driver.roll_out(1)
    message = r"batch rule unsound failed: KeyError: .* \(bapo_unsound.py, line 15\)"
    with pytest.raises(ServiceError, match=message):
        driver.client.batch(1)
