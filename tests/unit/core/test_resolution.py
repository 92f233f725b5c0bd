"""What a comparison states that it can decide has the stated error rate."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bapo_core.resolution import (
    MOST_SEEDS,
    Observation,
    Resolution,
    _studentized_range_cdf,
    decide_pairwise,
    paired_difference,
    resolve,
    studentized_range_quantile,
    students_t_quantile,
)

COMPARISONS = 1500


def simulate(
    rng: np.random.Generator,
    means: Sequence[float],
    seeds: int,
    *,
    sigma: float | Sequence[float] = 1.0,
) -> list[Observation]:
    """Draws runs: the variant's mean, what a seed adds to all variants, and the repetition.

    sigma: standard deviation of repetitions, one for all variants or one for each.
    """
    shared = rng.normal(0, 3, seeds)
    deviations = np.broadcast_to(sigma, len(means))[:, None]
    values = np.array(means)[:, None] + shared + rng.normal(0, deviations, (len(means), seeds))
    return [
        Observation(f"v{variant}", seed, float(values[variant, seed]))
        for variant in range(len(means))
        for seed in range(seeds)
    ]


def decided(observations: Sequence[Observation]) -> Resolution:
    resolution = resolve(observations)
    assert resolution is not None
    return resolution


@pytest.mark.parametrize(
    ("groups", "degrees_of_freedom", "quantile"),
    # Published tables of the 95% quantiles.
    [(2, 1, 17.97), (3, 2, 8.331), (3, 10, 3.877), (6, 10, 4.912), (10, 20, 5.008), (20, 1, 59.56)],
)
def test_the_quantiles_are_those_of_the_tables(
    groups: int, degrees_of_freedom: int, quantile: float
) -> None:
    found = studentized_range_quantile(0.95, groups, degrees_of_freedom)
    assert found == pytest.approx(quantile, rel=5e-4)


@pytest.mark.parametrize(
    ("degrees_of_freedom", "quantile"), [(1, 12.706), (3, 3.182), (10, 2.228), (1000, 1.962)]
)
def test_two_groups_have_students_t(degrees_of_freedom: int, quantile: float) -> None:
    assert students_t_quantile(0.95, degrees_of_freedom) == pytest.approx(quantile, rel=5e-4)


@given(st.floats(0.5, 0.999), st.integers(2, 40), st.integers(1, 10**7))
def test_the_probability_of_a_quantile_is_its_level(
    level: float, groups: int, degrees_of_freedom: int
) -> None:
    found = studentized_range_quantile(level, groups, degrees_of_freedom)
    probability = _studentized_range_cdf(found, groups, degrees_of_freedom)
    assert probability == pytest.approx(level, abs=1e-8)


@pytest.mark.parametrize(("variants", "seeds"), [(2, 3), (3, 2), (6, 3), (8, 5)])
def test_equal_variants_are_ranked_in_five_of_a_hundred_comparisons(
    variants: int, seeds: int
) -> None:
    rng = np.random.default_rng(0)
    ranked = sum(
        set(decided(simulate(rng, [0.0] * variants, seeds)).places().values()) != {(1, variants)}
        for _ in range(COMPARISONS)
    )
    # 4 standard errors of the share of simulated comparisons.
    assert ranked / COMPARISONS == pytest.approx(0.05, abs=4 * math.sqrt(0.05 * 0.95 / COMPARISONS))


def test_true_places_are_within_the_stated_ones() -> None:
    rng = np.random.default_rng(1)
    means = [0.0, 0.0, 0.5, 1.0, 4.0]
    wrong = narrow = 0
    for _ in range(COMPARISONS):
        places = decided(simulate(rng, means, 4)).places()
        for variant, mean in enumerate(means):
            best, worst = places[f"v{variant}"]
            narrow += worst - best < len(means) - 1
            # Equal variants may have any order among each other.
            ahead = sum(other > mean for other in means)
            behind = sum(other < mean for other in means)
            if best > 1 + ahead or worst < len(means) - behind:
                wrong += 1
                break
    assert wrong / COMPARISONS < 0.05
    assert narrow > COMPARISONS, "places that are always 1 to V would be right and say nothing"


@pytest.mark.parametrize("variants", [2, 4])
@pytest.mark.parametrize("difference", [1.0, 2.0])
def test_the_planned_seeds_decide_the_difference_in_four_of_five_cases(
    variants: int, difference: float
) -> None:
    rng = np.random.default_rng(2)
    pilot = decided(simulate(rng, [0.0] * variants, 400))
    seeds = pilot.seeds_for(difference)
    means = [difference, *[0.0] * (variants - 1)]

    def power(count: int) -> float:
        return (
            sum(decided(simulate(rng, means, count)).is_ahead("v0", "v1") for _ in range(600)) / 600
        )

    assert 0.76 < power(seeds) < 0.95
    assert power(seeds // 2) < 0.7


@given(st.integers(2, 12), st.floats(1e-4, 10), st.floats(0.01, 1))
def test_the_planned_seeds_are_the_fewest_that_suffice(
    variants: int, deviation: float, difference: float
) -> None:
    none = np.zeros((variants, variants))
    labels = tuple(f"v{variant}" for variant in range(variants))
    planned = Resolution(labels, none, none, deviation, 5).seeds_for(difference)

    def resolved(seeds: int) -> float:
        freedom = (variants - 1) * (seeds - 1)
        errors = studentized_range_quantile(0.95, variants, freedom) / math.sqrt(2)
        return (errors + students_t_quantile(0.6, freedom)) * deviation * math.sqrt(2 / seeds)

    assert planned == MOST_SEEDS or resolved(planned) <= difference * (1 + 1e-6)
    assert planned == 2 or resolved(planned - 1) > difference * (1 - 1e-6)


def test_the_spread_is_that_of_repetitions_and_not_of_seeds() -> None:
    rng = np.random.default_rng(3)
    found = decided(simulate(rng, [0.0, 5.0, 9.0], 200, sigma=0.5))
    assert found.degrees_of_freedom == 2 * 199
    assert found.deviation == pytest.approx(0.5, rel=0.1)


def test_two_variants_have_the_paired_interval_of_students_t() -> None:
    first, second = [1.0, 2.0, 6.0], [2.0, 4.0, 7.5]
    found = decided(
        [Observation("a", seed, value) for seed, value in enumerate(first)]
        + [Observation("b", seed, value) for seed, value in enumerate(second)]
    )
    gains = np.subtract(second, first)
    assert found.differences[1, 0] == pytest.approx(gains.mean())
    assert found.smallest_difference == pytest.approx(
        4.3027 * gains.std(ddof=1) / math.sqrt(3), rel=1e-4
    )


@pytest.mark.parametrize(
    "observations",
    [
        [("a", 1, 0.5)],
        [("a", 1, 0.5), ("b", 1, 0.1), ("c", 1, 0.9)],
        [("a", 1, 0.5), ("a", 2, 0.6), ("a", 2, 0.7)],
        [("a", 1, 0.5), ("b", 2, 0.1)],
        [("a", 1, 0.5), ("a", 2, math.nan), ("b", 1, 0.1), ("b", 2, 0.2)],
    ],
    ids=["one run", "one seed", "one variant", "one run each", "no number"],
)
def test_nothing_is_decided_without_repetitions(
    observations: list[tuple[str, int, float]],
) -> None:
    assert resolve([Observation(*each) for each in observations]) is None


def test_variants_without_a_seed_in_common_are_not_decided() -> None:
    values = [("a", 1, 0.0), ("a", 1, 0.1), ("b", 2, 9.0), ("b", 2, 9.1)]
    found = decided([Observation(*each) for each in values])
    assert found.smallest_difference == math.inf
    assert found.places() == {"a": (1, 2), "b": (1, 2)}


def test_a_missing_run_widens_what_it_takes_part_in() -> None:
    rng = np.random.default_rng(4)
    whole = simulate(rng, [0.0, 0.0, 0.0], 4)
    found = decided(whole[:-1])
    assert found.degrees_of_freedom == 5
    assert found.thresholds[0, 2] > found.thresholds[0, 1]
    assert found.smallest_difference == pytest.approx(found.thresholds[0, 2])


def test_equal_values_decide_nothing() -> None:
    found = decided([Observation(v, seed, 0.1 + 0.2) for v in "ab" for seed in range(3)])
    assert found.places() == {"a": (1, 2), "b": (1, 2)}


def test_a_difference_that_is_not_positive_is_refused() -> None:
    found = decided(simulate(np.random.default_rng(5), [0.0, 0.0], 3))
    with pytest.raises(ValueError, match="difference is 0; give one above 0"):
        found.seeds_for(0)


@given(
    st.lists(st.lists(st.integers(0, 100), min_size=3, max_size=3), min_size=2, max_size=5).filter(
        lambda values: len({tuple(row) for row in values}) > 1
    ),
    st.integers(1, 50),
    st.integers(-100, 100),
)
def test_places_agree_with_pairs_and_with_any_scale(
    rows: list[list[int]], scale: int, shift: int
) -> None:
    def observe(scale: int, shift: int) -> Resolution:
        return decided(
            [
                Observation(f"v{variant}", seed, float(scale * value + shift))
                for variant, row in enumerate(rows)
                for seed, value in enumerate(row)
            ]
        )

    found, rescaled = observe(1, 0), observe(scale, shift)
    assert rescaled.deviation == pytest.approx(scale * found.deviation, abs=1e-5)
    places, reverse = found.places(), found.places(higher_is_better=False)
    count = len(rows)
    for variant in places:
        ahead = sum(found.is_ahead(variant, other) for other in places)
        behind = sum(found.is_ahead(other, variant) for other in places)
        assert places[variant] == (1 + behind, count - ahead)
        assert reverse[variant] == (1 + ahead, count - behind)


@pytest.mark.parametrize(
    ("differences", "half_width"),
    [
        ([1.0, 3.0, 2.0], 4.303 * 1.0 / 3**0.5),
        ([0.0] * 6 + [12.0] * 6, 2.201 * 6.26703 / 12**0.5),
    ],
)
def test_the_interval_is_that_of_students_t(differences: list[float], half_width: float) -> None:
    assert paired_difference(differences)["half_width"] == pytest.approx(half_width, rel=1e-4)


def share_of_wrong_decisions(sigma: Sequence[float], *, common: bool) -> float:
    """Returns the share of comparisons of equal variants that decide anything."""
    rng = np.random.default_rng(11)
    wrong = 0
    for _ in range(COMPARISONS):
        observations = simulate(rng, [0.0] * len(sigma), 8, sigma=sigma)
        decisions = resolve(observations) if common else decide_pairwise(observations)
        assert decisions is not None
        wrong += bool((np.abs(decisions.differences) > decisions.thresholds).any())
    return wrong / COMPARISONS


@pytest.mark.parametrize(
    "sigma", [(1.0, 1.0, 1.0), (0.3, 1.0, 1.0, 4.0), (1.0, 1.0, 1.0, 1.0, 5.0)]
)
def test_paired_runs_decide_nothing_wrong_whatever_the_deviations(sigma: Sequence[float]) -> None:
    assert share_of_wrong_decisions(sigma, common=False) < 0.06


def test_one_deviation_for_all_decides_too_much_of_a_variant_that_varies_more() -> None:
    """The reason for the check by paired runs."""
    assert share_of_wrong_decisions((1.0, 1.0, 1.0, 1.0, 5.0), common=True) > 0.1


@given(st.lists(st.tuples(*[st.integers(-99, 99)] * 2), min_size=2, max_size=9))
def test_paired_runs_of_two_variants_decide_as_their_resolution(
    pairs: list[tuple[int, int]],
) -> None:
    observations = [
        Observation(f"v{variant}", seed, float(value))
        for seed, values in enumerate(pairs)
        for variant, value in enumerate(values)
    ]
    found, resolution = decide_pairwise(observations), decided(observations)
    assert found is not None
    assert found.variants == resolution.variants
    assert found.differences == pytest.approx(resolution.differences)
    assert found.thresholds == pytest.approx(resolution.thresholds, rel=1e-6, abs=1e-6)


def test_paired_runs_need_two_seeds_in_common() -> None:
    observations = [Observation("a", 1, 0.0), Observation("a", 2, 0.1), Observation("b", 2, 0.9)]
    found = decide_pairwise(observations)
    assert found is not None
    assert found.differences[1, 0] == pytest.approx(0.8)
    assert found.thresholds[0, 1] == math.inf
    assert decide_pairwise(observations[:2]) is None
