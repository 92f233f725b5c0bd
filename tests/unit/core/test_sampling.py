"""Samplers draw deterministically by their papers' formulas, and no prompt twice in a step."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bapo_core.config.samplers import SAMPLER_KINDS, UniformConfig
from bapo_core.sampling import (
    Posterior,
    candidate_positions,
    prompt_positions,
    rank_by_difficulty,
    rank_by_thompson,
    rank_candidates,
    stream_positions,
)
from bapo_core.seeding import derive_rng

groups = st.lists(
    st.integers(1, 8).flatmap(lambda k: st.tuples(st.integers(0, k), st.just(k))), max_size=12
)
decays = st.floats(0.0, 1.0)
posteriors = st.lists(
    st.builds(Posterior, st.floats(1.0, 50.0), st.floats(1.0, 50.0)), min_size=1, max_size=40
)


# ---- the uniform sampler ----


def test_the_uniform_sampler_draws_the_recorded_prompts() -> None:
    """A change would give every stored run other prompts when it is resumed."""
    assert prompt_positions(42, 6, dataset_size=2000, prompts_per_step=6) == UNIFORM_42_6
    assert prompt_positions(7, 401, dataset_size=2000, prompts_per_step=5) == UNIFORM_7_401


UNIFORM_42_6 = (925, 1267, 686, 209, 1132, 1703)
UNIFORM_7_401 = (723, 1506, 1329, 958, 1983)


# ---- the stream of dynamic sampling ----


@st.composite
def streams(draw: st.DrawFn) -> tuple[int, int, int]:
    """Draws (dataset_size, prompts of a round, most rounds) where a step can be filled."""
    per_round, rounds = draw(st.integers(1, 9)), draw(st.integers(2, 5))
    most = per_round * rounds
    size = draw(st.integers(most, 5 * most) | st.sampled_from([most, most + 1, 2 * most - 1]))
    return size, per_round, rounds


@given(streams(), st.integers(0, 2**40), st.integers(0, 10**9))
def test_any_prompts_that_a_step_may_draw_from_the_stream_differ(
    stream: tuple[int, int, int], seed: int, first: int
) -> None:
    size, per_round, rounds = stream
    distinct = per_round * rounds
    numbers = stream_positions(
        seed, first, 2 * size + distinct, dataset_size=size, distinct=distinct
    )
    for start in range(len(numbers) - distinct + 1):
        assert len(set(numbers[start : start + distinct])) == distinct


@given(streams(), st.integers(0, 2**40), st.integers(0, 10**6))
def test_each_epoch_of_the_stream_has_every_prompt_once(
    stream: tuple[int, int, int], seed: int, epoch: int
) -> None:
    size, per_round, rounds = stream
    drawn = stream_positions(
        seed, epoch * size, size, dataset_size=size, distinct=per_round * rounds
    )
    assert sorted(drawn) == list(range(size))


@given(streams(), st.integers(0, 2**40), st.data())
def test_steps_of_any_number_of_rounds_draw_the_stream_without_gaps(
    stream: tuple[int, int, int], seed: int, data: st.DataObject
) -> None:
    size, per_round, most_rounds = stream
    drawn: list[int] = []
    for rounds in data.draw(st.lists(st.integers(1, most_rounds), max_size=30)):
        first = len(drawn)
        step = [
            position
            for generation_round in range(rounds)
            for position in stream_positions(
                seed,
                first + generation_round * per_round,
                per_round,
                dataset_size=size,
                distinct=per_round * most_rounds,
            )
        ]
        assert len(set(step)) == len(step)
        drawn += step
    counts = Counter(drawn)
    epochs = len(drawn) / size
    assert all(math.floor(epochs) <= counts[i] <= math.ceil(epochs) for i in range(size))


def test_epochs_of_the_stream_are_in_different_orders() -> None:
    def epoch(number: int) -> tuple[int, ...]:
        return stream_positions(5, 600 * number, 600, dataset_size=600, distinct=64)

    assert epoch(0) == epoch(0)
    places = [dict(zip(epoch(number), range(600), strict=True)) for number in (0, 1)]
    moved = [abs(places[0][prompt] - places[1][prompt]) for prompt in range(600)]
    assert sum(distance > 50 for distance in moved) > 300


def test_a_dataset_of_one_step_has_the_same_order_in_every_epoch() -> None:
    """Otherwise a step that begins in the middle of the dataset would draw a prompt twice."""
    drawn = stream_positions(5, 0, 36, dataset_size=12, distinct=12)
    assert drawn[:12] == drawn[12:24] == drawn[24:]


def test_the_stream_is_refused_without_the_prompts_of_a_step() -> None:
    with pytest.raises(ValueError, match="11 prompts cannot fill one step of 12; lower rollout"):
        stream_positions(5, 0, 4, dataset_size=11, distinct=12)


def test_the_stream_draws_the_recorded_prompts() -> None:
    """A change would give every stored run other prompts when it is resumed."""
    assert stream_positions(42, 1998, 6, dataset_size=2000, distinct=24) == STREAM_42


STREAM_42 = (1503, 1244, 1841, 1002, 339, 667)


# ---- posteriors ----


@given(groups, decays)
def test_the_posterior_is_the_closed_form_of_moppss_update(
    results: list[tuple[int, int]], decay: float
) -> None:
    posterior = Posterior()
    for correct, size in results:
        posterior = posterior.updated(correct, size, decay=decay)
    n = len(results)
    a = 1 + sum(decay ** (n - i) * s for i, (s, _) in enumerate(results, start=1))
    b = 1 + sum(decay ** (n - i) * (k - s) for i, (s, k) in enumerate(results, start=1))
    assert (posterior.a, posterior.b) == (pytest.approx(a, abs=1e-9), pytest.approx(b, abs=1e-9))
    assert posterior.mean == pytest.approx(a / (a + b))


@given(groups)
def test_without_decay_the_posterior_counts_responses_exactly(
    results: list[tuple[int, int]],
) -> None:
    posterior = Posterior()
    for correct, size in results:
        posterior = posterior.updated(correct, size, decay=1.0)
    assert posterior.a - 1 == sum(s for s, _ in results)
    assert posterior.b - 1 == sum(k - s for s, k in results)


# ---- candidates ----


@given(st.integers(0, 2**40), st.integers(1, 10**6), st.integers(1, 4), st.integers(1, 12))
def test_no_candidate_is_drawn_twice_in_a_step(
    seed: int, step: int, rounds: int, per_round: int
) -> None:
    drawn = [
        position
        for generation_round in range(rounds)
        for position in candidate_positions(
            seed,
            step,
            generation_round,
            dataset_size=rounds * per_round + 5,
            candidates_per_round=per_round,
            max_rounds=rounds,
        )
    ]
    assert len(set(drawn)) == len(drawn) == rounds * per_round
    assert all(0 <= position < rounds * per_round + 5 for position in drawn)


def test_candidates_are_drawn_uniformly() -> None:
    size, per_round, steps = 40, 10, 4000
    counts = Counter(
        position
        for step in range(1, steps + 1)
        for position in candidate_positions(
            7, step, 0, dataset_size=size, candidates_per_round=per_round, max_rounds=1
        )
    )
    expected = steps * per_round / size
    # The tolerance is five standard deviations of a binomial count.
    assert all(abs(counts[p] - expected) < 5 * math.sqrt(expected) for p in range(size))


def test_a_dataset_that_cannot_give_the_candidates_is_refused() -> None:
    with pytest.raises(ValueError, match="31 prompts cannot give the 32 candidates of one step"):
        candidate_positions(1, 1, 0, dataset_size=31, candidates_per_round=16, max_rounds=2)
    with pytest.raises(ValueError, match=r"round 2 is not in 0\.\.1"):
        candidate_positions(1, 1, 2, dataset_size=32, candidates_per_round=16, max_rounds=2)


# ---- MoPPS ----


@given(posteriors, st.integers(0, 2**40), st.floats(0.0, 1.0))
def test_mopps_takes_the_smallest_squared_distances_of_its_draws(
    candidates: list[Posterior], seed: int, target: float
) -> None:
    ranked = rank_by_thompson(candidates, target=target, rng=random.Random(seed))
    rng = random.Random(seed)
    draws = [rng.betavariate(candidate.a, candidate.b) for candidate in candidates]
    expected = sorted(range(len(draws)), key=lambda index: (draws[index] - target) ** 2)
    assert [(ranking.candidate, ranking.draw) for ranking in ranked] == [
        (index, draws[index]) for index in expected
    ]


@given(posteriors, st.integers(0, 2**40))
def test_candidates_within_the_band_come_first_in_the_order_given(
    candidates: list[Posterior], seed: int
) -> None:
    ranked = rank_by_thompson(candidates, band=(0.3, 0.7), rng=random.Random(seed))
    rng = random.Random(seed)
    draws = [rng.betavariate(candidate.a, candidate.b) for candidate in candidates]
    inside = [index for index, draw in enumerate(draws) if 0.3 <= draw <= 0.7]
    outside = sorted(set(range(len(draws))) - set(inside), key=lambda i: abs(draws[i] - 0.5))
    assert [ranking.candidate for ranking in ranked] == inside + outside


def test_thompson_draws_follow_the_posterior() -> None:
    candidates = [Posterior(7.0, 3.0)] * 20_000
    draws = [c.draw for c in rank_by_thompson(candidates, rng=random.Random(1))]
    mean = sum(draws) / len(draws)
    variance = sum((draw - mean) ** 2 for draw in draws) / len(draws)
    assert mean == pytest.approx(0.7, abs=0.005)
    assert variance == pytest.approx(7 * 3 / (10**2 * 11), rel=0.05)


# ---- DOTS ----


def test_dots_samples_with_the_papers_probabilities() -> None:
    candidates = [Posterior(a, 10.0 - a) for a in (5.0, 6.0, 3.0, 8.0)]
    temperature = 0.2
    weights = [math.exp(-abs(candidate.mean - 0.5) / temperature) for candidate in candidates]
    rng, trials = random.Random(3), 40_000
    firsts, pairs = Counter[int](), Counter[tuple[int, int]]()
    for _ in range(trials):
        ranked = rank_by_difficulty(candidates, temperature=temperature, rng=rng)
        first, second = ranked[0].candidate, ranked[1].candidate
        firsts[first] += 1
        pairs[first, second] += 1
    total = sum(weights)
    for index, weight in enumerate(weights):
        assert firsts[index] / trials == pytest.approx(weight / total, abs=0.012)
    # Draws are without replacement, so the second is drawn from the other candidates.
    expected = weights[0] / total * weights[2] / (total - weights[0])
    assert pairs[0, 2] / trials == pytest.approx(expected, abs=0.012)


def test_with_the_papers_temperature_dots_takes_the_nearest() -> None:
    candidates = [Posterior(1.0 + k, 9.0 - k) for k in range(9)]
    ranked = rank_by_difficulty(candidates, temperature=1e-3, rng=random.Random(5))
    assert ranked[0].candidate == 4
    assert {ranking.candidate for ranking in ranked[:3]} == {3, 4, 5}


def test_a_draw_of_zero_keeps_the_weight_finite() -> None:
    class Zero(random.Random):
        def expovariate(self, lambd: float = 1.0) -> float:  # noqa: ARG002
            return 0.0

    (candidate,) = rank_by_difficulty([Posterior()], rng=Zero())
    assert math.isfinite(candidate.draw)


# ---- MoPPS and DOTS ----


@pytest.mark.parametrize("kind", ["mopps", "dots"])
def test_a_ranking_is_a_function_of_seed_step_round_and_posteriors(kind: str) -> None:
    settings = SAMPLER_KINDS.sections[kind]()
    candidates = [Posterior(1.0 + k % 5, 1.0 + k % 7) for k in range(64)]

    def order(seed: int = 1, step: int = 2, generation_round: int = 0) -> list[int]:
        ranked = rank_candidates(
            settings, candidates, seed=seed, step=step, generation_round=generation_round
        )
        assert sorted(ranking.candidate for ranking in ranked) == list(range(64))
        return [ranking.candidate for ranking in ranked]

    derive_rng(1, "another").random()
    assert order() == order()
    assert len({tuple(o) for o in (order(), order(3), order(1, 3), order(1, 2, 1))}) == 4


def test_the_uniform_sampler_ranks_nothing() -> None:
    with pytest.raises(ValueError, match="the sampler uniform has no candidates to rank"):
        rank_candidates(UniformConfig(), [], seed=1, step=1, generation_round=0)
