"""The online filters keep the groups that Appendix A.3 of the paper defines, in their order."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bapo_core.filters import gaussian_filter, range_filter, uniform_filter
from bapo_core.types import GroupSummary


def group(i: int, correct: int, size: int = 8) -> GroupSummary:
    return GroupSummary(group_id=i, prompt_uid=f"p{i}", step=1, correct=correct, size=size)


groups = st.lists(st.integers(0, 8)).map(lambda ks: [group(i, k) for i, k in enumerate(ks)])
rngs = st.integers(0, 2**32).map(random.Random)


def is_subsequence(part: Sequence[GroupSummary], whole: Sequence[GroupSummary]) -> bool:
    ids = [g.group_id for g in part]
    return ids == [g.group_id for g in whole if g.group_id in set(ids)]


@given(groups)
def test_range_keeps_exactly_the_groups_with_a_gradient(fresh: list[GroupSummary]) -> None:
    kept = range_filter(fresh)
    assert [g.correct for g in kept] == [g.correct for g in fresh if 1 <= g.correct <= 7]
    assert is_subsequence(kept, fresh)


@given(groups, rngs)
def test_gaussian_never_keeps_a_group_without_a_gradient(
    fresh: list[GroupSummary], rng: random.Random
) -> None:
    kept = gaussian_filter(fresh, rng=rng)
    assert all(g.mixed for g in kept)
    assert is_subsequence(kept, fresh)


def test_gaussian_accepts_with_the_density_relative_to_its_peak() -> None:
    fresh = [group(i, 1 + i % 7) for i in range(7 * 4000)]
    kept = Counter(g.correct for g in gaussian_filter(fresh, rng=random.Random(0)))
    # Each probability is the density at k/8 over its peak at 4/8.
    expected = {4: 1.0, 3: 0.8226, 5: 0.8226, 2: 0.4578, 6: 0.4578, 1: 0.1724, 7: 0.1724}
    assert kept[4] == 4000
    for k, probability in expected.items():
        assert kept[k] / 4000 == pytest.approx(probability, abs=0.03)


@given(groups, st.floats(0, 1), rngs)
def test_uniform_keeps_the_fraction_whatever_the_mean(
    fresh: list[GroupSummary], fraction: float, rng: random.Random
) -> None:
    kept = uniform_filter(fresh, fraction=fraction, rng=rng)
    assert len(kept) == round(fraction * len(fresh))
    assert is_subsequence(kept, fresh)


def test_uniform_keeps_groups_without_a_gradient_too() -> None:
    assert len(uniform_filter([group(i, 0) for i in range(10)], rng=random.Random(0))) == 6


def test_x1_is_empty_without_a_group_that_has_a_gradient() -> None:
    unmixed_groups = [group(0, 0), group(1, 8)]
    assert range_filter(unmixed_groups) == []
    assert gaussian_filter(unmixed_groups, rng=random.Random(0)) == []
    assert uniform_filter([], rng=random.Random(0)) == []


@given(groups, st.integers(0, 2**32))
def test_the_same_seed_keeps_the_same_groups(fresh: list[GroupSummary], seed: int) -> None:
    for apply_filter in (gaussian_filter, uniform_filter):
        first = apply_filter(fresh, rng=random.Random(seed))
        assert first == apply_filter(fresh, rng=random.Random(seed))
