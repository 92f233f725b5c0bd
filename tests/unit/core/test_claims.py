"""A claim is judged by what its runs decide, never by means alone."""

from __future__ import annotations

import numpy as np
import pytest

from bapo_core.claims import combine_verdicts, judge_equal, judge_larger
from bapo_core.resolution import Observation, Resolution, resolve


def decided(noise: float, *means: float, seeds: int = 4) -> Resolution:
    """Returns what runs of variants a, b, ... decide, whose repetitions differ by about `noise`."""
    rng = np.random.default_rng(0)
    resolution = resolve(
        [
            Observation("abcdef"[index], seed, mean + rng.normal(0, noise))
            for index, mean in enumerate(means)
            for seed in range(seeds)
        ]
    )
    assert resolution is not None
    return resolution


@pytest.mark.parametrize(
    ("means", "verdict"), [((0.4, 0.3), "holds"), ((0.3, 0.4), "does not hold")]
)
def test_a_decided_difference_is_a_verdict_in_its_direction(
    means: tuple[float, float], verdict: str
) -> None:
    assert judge_larger(decided(0.005, *means), "a", "b").verdict == verdict


def test_a_larger_mean_that_is_not_decided_is_no_verdict() -> None:
    judgement = judge_larger(decided(0.2, 0.4, 0.3), "a", "b")
    assert judgement.difference > 0
    assert judgement.difference < judgement.threshold
    assert judgement.verdict == "not decided"


def test_a_claim_of_at_least_so_much_needs_more_than_a_decided_difference() -> None:
    resolution = decided(0.001, 0.40, 0.39)
    assert judge_larger(resolution, "a", "b").verdict == "holds"
    assert judge_larger(resolution, "a", "b", by=0.05).verdict == "does not hold"
    assert judge_larger(decided(0.2, 0.40, 0.39), "a", "b", by=0.05).verdict == "not decided"


def test_equality_needs_an_interval_within_the_bounds() -> None:
    assert judge_equal(decided(0.001, 0.4, 0.4), "a", "b", within=0.02).verdict == "holds"
    assert judge_equal(decided(0.1, 0.4, 0.4), "a", "b", within=0.02).verdict == "not decided"
    assert judge_equal(decided(0.001, 0.4, 0.3), "a", "b", within=0.02).verdict == "does not hold"


def test_more_variants_make_the_same_difference_less_decided() -> None:
    thresholds = [
        judge_larger(decided(0.02, *means), "a", "b").threshold / decided(0.02, *means).deviation
        for means in ((0.4, 0.3), (0.4, 0.3, 0.3, 0.3, 0.3, 0.3))
    ]
    # The second has 15 degrees of freedom and the first 3, so compare with the paired interval.
    assert thresholds[1] == pytest.approx(4.5947 / np.sqrt(2) * np.sqrt(2 / 4), abs=1e-3)
    assert thresholds[0] == pytest.approx(3.1824 * np.sqrt(2 / 4), abs=1e-3)


def test_variants_that_no_seed_connects_decide_nothing() -> None:
    resolution = resolve(
        [Observation(label, seed, 0.1 * seed) for label in "ab" for seed in (1, 2)]
        + [Observation(label, seed, 0.1 * seed) for label in "cd" for seed in (3, 4)]
    )
    assert resolution is not None
    assert judge_larger(resolution, "a", "c").verdict == "not decided"


def test_a_claim_of_several_parts_holds_if_all_do() -> None:
    assert combine_verdicts(["holds", "holds"]) == "holds"
    assert combine_verdicts(["holds", "not decided"]) == "not decided"
    assert combine_verdicts(["not decided", "does not hold", "holds"]) == "does not hold"
    assert combine_verdicts([]) == "not decided"
