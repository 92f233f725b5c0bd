"""The constants and the bound of Theorem 3.2 agree with worked examples."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bapo_core.theory import (
    ImprovementTerm,
    improvement_constants,
    policy_improvement_bound,
    stability_constant,
    total_variation_estimate,
)


def test_the_constant_is_smallest_at_an_accuracy_of_one_half() -> None:
    # By Proposition A.3, K is 1 where sigma is 1/2.
    assert stability_constant(0.25, 0.0) == 1.0
    assert all(stability_constant(mu * (1 - mu), 0.0) > 1.0 for mu in (0.1, 0.4, 0.6, 0.9))


def test_a_group_without_variance_has_no_constant_without_eps() -> None:
    with pytest.raises(ValueError, match="eps"):
        stability_constant(0.0, 0.0)


def test_the_three_constants_agree_for_the_values_of_table_3() -> None:
    k1, k2, k3 = improvement_constants(8, 1 / 8, 1 / 8, 2 / 8, 0.0)
    # Each source admits groups down to mu = 1/8, whose variance mu (1 - mu) is 7/64.
    assert (k1, k2, k3) == pytest.approx((8 / math.sqrt(7) - 1,) * 3)


def test_the_replay_window_of_bapo_mini_has_the_smallest_constant() -> None:
    assert improvement_constants(8, 1 / 8, 0.5, 0.5, 0.0)[2] == 1.0


def test_k3_is_set_by_the_end_further_from_one_half() -> None:
    assert improvement_constants(8, 1 / 8, 0.5, 0.75, 0.0)[2] == stability_constant(0.1875, 0.0)


def test_each_group_has_the_same_weight_in_the_bound() -> None:
    fresh = ImprovementTerm(surrogate=0.5, constant=2.0, tv_new=0.05, tv_old=0.02)
    replayed = ImprovementTerm(surrogate=0.1, constant=1.0, tv_new=0.2, tv_old=0.1)
    assert policy_improvement_bound([fresh]) == pytest.approx(0.26)
    assert policy_improvement_bound([fresh, replayed]) == pytest.approx((0.26 - 0.5) / 2)
    # One replayed group has little weight beside 99 fresh ones.
    worse = ImprovementTerm(surrogate=-0.1, constant=1.0, tv_new=0.0, tv_old=0.0)
    better = ImprovementTerm(surrogate=5.0, constant=1.0, tv_new=0.0, tv_old=0.0)
    assert policy_improvement_bound([worse] * 99 + [better]) == pytest.approx(-0.049)


def test_a_bound_over_no_groups_is_refused() -> None:
    with pytest.raises(ValueError, match="mean over groups"):
        policy_improvement_bound([])


def test_total_variation_of_a_known_pair() -> None:
    # The distance of alpha = (1/2, 1/2) and theta = (3/4, 1/4) is 1/4, and one sample of each
    # token has the exact mean.
    assert total_variation_estimate([math.log(1.5), math.log(0.5)]) == pytest.approx(0.25)


@given(st.lists(st.floats(allow_nan=False), min_size=1))
def test_total_variation_is_a_share(log_ratios: list[float]) -> None:
    assert 0.0 <= total_variation_estimate(log_ratios) <= 1.0


@pytest.mark.parametrize("log_ratios", [[], [0.0, math.nan]])
def test_total_variation_without_data_is_refused(log_ratios: list[float]) -> None:
    with pytest.raises(ValueError, match="total variation"):
        total_variation_estimate(log_ratios)
