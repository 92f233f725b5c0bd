"""`replay.select: effective_sample_size` through the real service: X3 follows measured decays."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from bapo_core.backtest import BackTest, EffectiveShares
from bapo_core.config import ConfigError
from bapo_core.types import ESS_DECAY
from services.buffer.api import wire
from services.cli.recorded_groups import back_test, recorded_steps
from services.cli.variants import Variant, read_variants
from services.report.backtest_table import OWN_RULES
from services.stack.stack import Endpoints
from tests.integration.buffer.test_forks import Trained
from tests.integration.support.driver import Driver, small_config, snapshot

SHIPPED = Path(__file__).parents[3] / "examples/variants/effective_sample_size.yaml"
LIMIT = 0.8
DECAYS = [None, 0.001, 0.001, 9.0, 0.001, None, 0.5, 0.5, 0.5]
"""Decay that each step measures, from step 1 on; None where all its tokens are of its policy."""
RULE = {"select": "effective_sample_size", "min_ess_fraction": LIMIT}


class Measured(Trained):
    """A run whose trainer measures these decays, by step."""

    decays: Mapping[int, float] = {
        step: decay for step, decay in enumerate(DECAYS, 1) if decay is not None
    }

    def metrics_of(self, step: int) -> dict[str, float]:
        metrics = super().metrics_of(step)
        return metrics | {ESS_DECAY: self.decays[step]} if step in self.decays else metrics


def make_driver(stack: Endpoints, name: str, **sections: Any) -> Measured:
    """Returns a run whose batches have room for replayed groups."""
    sections = {
        "replay": RULE,
        "reevaluate": {"enabled": False},
        "batch": {"capacity": 64},
        "checkpoint": {"every": 1, "keep": 100},
        "task": {"options": {"template": "short"}, "train_prompts": 80, "test_prompts": 4},
    } | sections
    return Measured(stack, small_config(name, **sections))


def run_steps(driver: Driver, first: int = 1) -> list[wire.BatchManifest]:
    return [driver.run_step(step) for step in range(first, len(DECAYS) + 1)]


def replayed(manifest: wire.BatchManifest) -> set[str]:
    return {member.prompt_uid for member in manifest.members if member.source == "replayed"}


def test_groups_near_the_policy_are_replayed_at_any_age(stack: Endpoints) -> None:
    driver = make_driver(stack, "effective")
    oldest = {}
    for step in range(1, len(DECAYS) + 1):
        stored = {entry.prompt_uid: entry for entry in driver.client.buffer("high_quality")}
        manifest = driver.run_step(step)
        measured = [value for value in DECAYS[: step - 1] if value is not None]
        fresh = {member.prompt_uid for member in manifest.members if member.source == "fresh"}
        near = set()
        for uid, entry in stored.items():
            age = step - driver.config.schedule.policy_version(entry.step)
            share = float(age <= 1)
            if measured:
                share = math.exp(-age * median(measured))
            if share >= LIMIT:
                near.add(uid)
        assert replayed(manifest) == near - fresh
        ages = [step - stored[uid].step for uid in replayed(manifest)]
        oldest[step] = max(ages, default=0)
    # The outlier of step 4 changes nothing; once half of the steps say so, the policy is far.
    assert oldest[8] == 7
    assert oldest[9] == 0


def test_decisions_name_the_predicted_share(stack: Endpoints) -> None:
    driver = make_driver(stack, "effective-reasons")
    driver.decays = {2: 0.1, 3: 0.1}
    for step in (1, 2, 3, 4):
        driver.run_step(step)

    def reasons(step: int) -> dict[str, set[str]]:
        """Returns how the reasons on stored groups end, by the outcome."""
        ends: dict[str, set[str]] = {"used": set(), "not_used": set()}
        for prompt in driver.client.all_prompts():
            decision = driver.client.decision(step, prompt.uid).considered[-1]
            if decision.outcome != "not_considered":
                ends[decision.outcome].add(decision.reason.partition(" at step ")[2][3:])
        return ends

    limit = "(replay.min_ess_fraction = 0.8)"
    inside = "with different rewards (replay.select = effective_sample_size)"
    assert reasons(2)["used"] == {
        f"{inside}, 1 step after its policy, before the first measured decay {limit}"
    }
    assert reasons(3)["used"] == {
        f"{inside}, with an effective share of 0.905 predicted after 1 step {limit}",
        f"{inside}, with an effective share of 0.819 predicted after 2 steps {limit}",
    }
    assert reasons(4)["not_used"] == {
        f"too far from the policy, with an effective share of 0.741 predicted after 3 steps {limit}"
    }


def test_a_rewound_run_composes_the_same_batches(stack: Endpoints) -> None:
    driver = make_driver(stack, "effective-rewound")
    run_steps(driver)
    before = snapshot(driver)
    for step in (6, 3, 1):
        driver.client.rewind(step)
        run_steps(driver, step + 1)
        assert snapshot(driver) == before


def test_decays_that_were_undone_do_not_count(stack: Endpoints) -> None:
    driver = make_driver(stack, "effective-undone")
    driver.decays = {2: 9.0}
    driver.run_step(1)
    driver.run_step(2)
    assert not replayed(driver.run_step(3))
    driver.client.rewind(1)
    driver.decays = {2: 0.001}
    driver.run_step(2)
    assert replayed(driver.run_step(3))


def test_a_fork_goes_on_by_the_decays_of_its_parent(stack: Endpoints) -> None:
    parent = make_driver(stack, "effective-parent")
    manifests = run_steps(parent)
    state = parent.client.fork_run(wire.ForkRequest(name="effective-child", step=4, values={}))
    child = Measured(stack, state.config, create=lambda _client, _config: None)
    assert [replayed(manifest) for manifest in run_steps(child, 5)] == [
        replayed(manifest) for manifest in manifests[4:]
    ]


def test_a_back_test_composes_the_batches_by_the_recorded_decays(stack: Endpoints) -> None:
    """Both of the run's own rules, and of another run's: their fresh groups are the same."""
    one = make_driver(stack, "effective-own")
    other = make_driver(stack, "effective-other", replay={"select": "mixed"})
    manifests = run_steps(one)
    run_steps(other)
    found = back_test(
        other.client, [Variant("near", {"replay": RULE})], first=1, last=None, where="r"
    )
    own = back_test(one.client, [], first=1, last=None, where="r")
    assert own.first_difference is None
    assert found.results["near"] == own.results[OWN_RULES]
    shares = EffectiveShares({step.step: step.metrics for step in other.client.steps()})
    test = BackTest(one.config, shares=shares)
    steps = recorded_steps(other.client, other.config, len(DECAYS))
    for recorded, manifest in zip(steps, manifests, strict=True):
        batch = test.add(recorded)
        assert [member.group.prompt_uid for member in batch.members] == [
            member.prompt_uid for member in manifest.members
        ]


def test_the_shipped_rules_are_answered_by_a_run_with_decays(stack: Endpoints) -> None:
    driver = make_driver(stack, "effective-shipped", replay={"select": "mixed"})
    driver.decays = dict.fromkeys(range(1, 10), 0.06)
    run_steps(driver)
    found = back_test(driver.client, read_variants(str(SHIPPED)), first=1, last=None, where="rules")
    replayed = {label: result.replayed for label, result in found.results.items()}
    assert replayed["share of 0.95"] < replayed["share of 0.9"] < replayed["share of 0.8"]
    assert replayed["share of 0.8"] < replayed["any age"]


def test_a_back_test_of_a_run_without_decays_is_refused(stack: Endpoints) -> None:
    driver = make_driver(stack, "effective-unmeasured", replay={"select": "mixed"})
    driver.run_step(1)  # which measures no decay
    rule = Variant("near", {"replay": RULE})
    reason = "near: replay.select is effective_sample_size, .* 'effective-unmeasured' has it: .*"
    with pytest.raises(ConfigError, match=reason):
        back_test(driver.client, [rule], first=1, last=None, where="rules")
    own = make_driver(stack, "effective-first-step")
    own.run_step(1)
    assert back_test(own.client, [], first=1, last=None, where="rules").first_difference is None
