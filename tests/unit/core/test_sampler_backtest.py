"""Back-tests of samplers estimate the results of prompts that were not rolled out."""

from __future__ import annotations

import random

import pytest

from bapo_core.backtest import GroupLength, RecordedStep
from bapo_core.config import ConfigError, RunConfig, config_from
from bapo_core.sampler_backtest import Estimator, Expectation, SamplerTest, fit_prior
from bapo_core.sampling import Posterior
from bapo_core.types import GroupSummary

SIZE, PROMPTS, DATASET, STEPS = 8, 64, 512, 40


def config(**sampler: object) -> RunConfig:
    return config_from(
        {
            "name": "sampler-test",
            "steps": STEPS,
            "rollout": {"prompts_per_step": PROMPTS, "group_size": SIZE},
            "sampler": sampler or {"kind": "uniform"},
        }
    )


def recorded_step(step: int, positions: list[int], abilities: list[float]) -> RecordedStep:
    """Returns a step in which the prompts at these positions have groups of random results."""
    rng = random.Random(step)
    fresh = []
    for number, position in enumerate(positions):
        correct = sum(rng.random() < abilities[position] for _ in range(SIZE))
        fresh.append(GroupSummary(step * DATASET + number, str(position), step, correct, SIZE))
    return RecordedStep(
        step=step,
        fresh=fresh,
        reevaluated=[],
        lengths={group.group_id: GroupLength(1, 0) for group in fresh},
        positions={str(position): position for position in positions},
    )


def recorded_steps(abilities: list[float]) -> list[RecordedStep]:
    """Returns the steps of a run whose sampler was uniform."""
    test = SamplerTest(config(), DATASET)
    steps = []
    for number in range(1, STEPS + 1):
        drawn = list(test.add(recorded_step(number, list(range(PROMPTS)), abilities)))
        steps.append(recorded_step(number, drawn, abilities))
    return steps


@pytest.mark.parametrize(("a", "b"), [(1.0, 1.0), (0.3, 2.0), (5.0, 4.0)])
def test_the_expectation_is_that_of_a_beta_binomial_number(a: float, b: float) -> None:
    """The probabilities of k of G follow from k = 0 by the ratio of neighbours."""
    weights = [1.0]
    for k in range(SIZE):
        ratio = (SIZE - k) / (k + 1) * (a + k) / (b + SIZE - k - 1)
        weights.append(weights[-1] * ratio)
    chances = [weight / sum(weights) for weight in weights]
    means = [k / SIZE for k in range(SIZE + 1)]
    expected = Expectation.of_posterior(Posterior(a, b), SIZE)
    assert expected.accuracy == pytest.approx(
        sum(chance * mean for chance, mean in zip(chances, means, strict=True))
    )
    assert expected.signal == pytest.approx(
        sum(chance * mean * (1 - mean) for chance, mean in zip(chances, means, strict=True))
    )
    assert expected.no_signal == pytest.approx(chances[0] + chances[-1])


def test_the_prior_has_the_moments_of_the_groups() -> None:
    rng = random.Random(0)
    groups = []
    for number in range(20_000):
        ability = rng.betavariate(0.6, 2.4)
        correct = sum(rng.random() < ability for _ in range(SIZE))
        groups.append(GroupSummary(number, str(number), 1, correct, SIZE))
    prior = fit_prior(groups)
    assert prior.a == pytest.approx(0.6, rel=0.05)
    assert prior.b == pytest.approx(2.4, rel=0.05)


@pytest.mark.parametrize("correct", [0, SIZE])
def test_without_different_results_the_prior_is_uniform(correct: int) -> None:
    groups = [GroupSummary(number, "1", 1, correct, SIZE) for number in range(3)]
    assert fit_prior(groups) == fit_prior([]) == Posterior()


def test_results_of_a_prompt_change_the_estimate_of_this_prompt_most() -> None:
    abilities = [0.05] * DATASET
    abilities[0] = 1.0
    estimator = Estimator()
    assert estimator.is_untried(0)
    estimator.add(recorded_step(1, list(range(PROMPTS)), abilities))
    assert not estimator.is_untried(0)
    assert estimator.is_untried(PROMPTS)
    assert estimator.expect(0, SIZE).accuracy > 0.5
    assert estimator.expect(PROMPTS, SIZE).accuracy < 0.15


@pytest.mark.parametrize("kind", ["mopps", "dots", "exgrpo"])
def test_estimates_of_drawn_prompts_are_near_to_what_was_recorded_of_them(kind: str) -> None:
    """Adaptive samplers draw prompts by their results, so their last results flatter them."""
    rng = random.Random(3)
    abilities = [rng.betavariate(0.5, 1.5) for _ in range(DATASET)]
    test = SamplerTest(
        config(kind=kind, **({"revisit_above": 0.1} if kind == "exgrpo" else {})), DATASET
    )
    for step in recorded_steps(abilities):
        drawn = test.add(step)
        assert len(set(drawn)) == PROMPTS
    result = test.result()
    assert 0 < result.recorded < result.drawn == STEPS * PROMPTS
    assert result.recorded_accuracy is not None
    assert result.estimated_accuracy_of_recorded == pytest.approx(
        result.recorded_accuracy, abs=0.03
    )
    uniform = SamplerTest(config(), DATASET)
    for step in recorded_steps(abilities):
        uniform.add(step)
    assert uniform.result().recorded == uniform.result().drawn
    assert result.signal_per_step > 1.05 * uniform.result().signal_per_step
    assert result.no_signal < uniform.result().no_signal


def test_an_estimate_of_the_true_abilities_is_near_to_them() -> None:
    rng = random.Random(4)
    abilities = [rng.betavariate(0.5, 1.5) for _ in range(DATASET)]
    test = SamplerTest(config(kind="mopps"), DATASET, first=STEPS // 2)
    true_signal = steps = 0.0
    for step in recorded_steps(abilities):
        drawn = test.add(step)
        if step.step >= STEPS // 2:
            true_signal += sum(abilities[p] * (1 - abilities[p]) * (1 - 1 / SIZE) for p in drawn)
            steps += 1
    assert test.result().steps == steps
    assert test.result().signal_per_step == pytest.approx(true_signal / steps, rel=0.05)


def test_a_sampler_that_needs_more_prompts_than_there_are_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"mine: sampler.kind=mopps draws from 1024 prompts in a "
        r"step, and the run's data set has 512; lower sampler.candidates",
    ):
        SamplerTest(config(kind="mopps", candidates=16), DATASET, where="mine")


def test_a_sampler_that_begins_with_the_results_of_another_run_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"sampler.prior_run is warm: .* the results of one run"):
        SamplerTest(config(kind="mopps", prior_run="warm"), DATASET)


def test_a_run_whose_results_decide_the_rounds_of_a_step_is_refused() -> None:
    rounds = config().model_copy(
        update={"rollout": config().rollout.model_copy(update={"max_generation_rounds": 3})}
    )
    with pytest.raises(ConfigError, match=r"rollout.max_generation_rounds is 3"):
        SamplerTest(rounds, DATASET)
