"""The replay window and r_tot follow Eq. 8 and its variants."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bapo_core.thresholds import (
    Direction,
    RewardKind,
    above,
    at_least,
    at_most,
    replay_window,
    running_reward,
    within,
)
from bapo_core.types import GroupSummary

C2, C3 = (1 / 8, 4 / 8), (2 / 8, 5 / 8)  # Table 3


def group(correct: int, size: int = 8) -> GroupSummary:
    return GroupSummary(group_id=1, prompt_uid="p", step=1, correct=correct, size=size)


@pytest.mark.parametrize(
    ("direction", "r_tot", "window", "grid"),
    [
        ("eq8", 0.0, (0.125, 0.25), {1, 2}),
        ("eq8", 0.3, (0.2375, 0.3625), {2}),
        ("eq8", 1.0, (0.5, 0.625), {4, 5}),
        ("easy_to_hard", 0.0, (0.5, 0.625), {4, 5}),
        ("easy_to_hard", 0.3, (0.4375, 0.5625), {4}),
        ("easy_to_hard", 1.0, (0.125, 0.25), {1, 2}),
    ],
)
def test_windows_contain_the_accuracies_of_the_grid(
    direction: Direction, r_tot: float, window: tuple[float, float], grid: set[int]
) -> None:
    c2, c3 = replay_window(r_tot, C2, C3, direction)
    assert (c2, c3) == pytest.approx(window, abs=1e-12)
    assert {k for k in range(9) if within(k / 8, c2, c3)} == grid


def test_windows_agree_with_a_worked_example() -> None:
    assert replay_window(28 / 48, C2, C3) == pytest.approx((0.34375, 0.46875))
    falling = replay_window(28 / 48, C2, C3, "easy_to_hard")
    assert falling == pytest.approx((0.260417, 0.385417), abs=1e-6)


@given(st.floats(0, 1))
def test_without_adaptation_the_window_is_made_of_the_lower_ends(r_tot: float) -> None:
    assert replay_window(r_tot, C2, C3, "fixed") == (1 / 8, 2 / 8)


@given(
    st.floats(0, 1),
    st.tuples(st.floats(0, 1), st.floats(0, 1)).map(sorted),
    st.sampled_from(["eq8", "easy_to_hard", "off"]),
)
def test_thresholds_stay_in_their_range(
    r_tot: float, ends: tuple[float, float], direction: Direction
) -> None:
    low, high = ends
    c2, c3 = replay_window(r_tot, (low, high), (low, high), direction)
    assert c2 == c3
    assert low - 1e-12 <= c2 <= high + 1e-12


@given(st.floats(0, 1), st.floats(0, 1))
def test_eq8_rises_and_easy_to_hard_falls(a: float, b: float) -> None:
    less, more = sorted((a, b))
    assert replay_window(less, C2, C3)[0] <= replay_window(more, C2, C3)[0]
    falling = [replay_window(r, C2, C3, "easy_to_hard")[0] for r in (less, more)]
    assert falling[0] >= falling[1]


@pytest.mark.parametrize("r_tot", [-0.1, 1.1, math.nan])
def test_r_tot_outside_the_unit_interval_is_refused(r_tot: float) -> None:
    with pytest.raises(ValueError, match="r_tot"):
        replay_window(r_tot, C2, C3)


@given(st.integers(2, 64), st.data())
def test_comparisons_on_the_grid_survive_rounding(size: int, data: st.DataObject) -> None:
    k, j = data.draw(st.integers(0, size)), data.draw(st.integers(0, size))
    mu = math.fsum([1 / size] * k) * (1 + 1e-15)
    c = sum([1 / size] * j)  # accumulates rounding errors
    assert at_most(mu, c) == (k <= j)
    assert at_least(mu, c) == (k >= j)
    assert above(mu, c) == (k > j)


def test_a_group_in_both_buffers_counts_once_in_r_tot() -> None:
    hard = [GroupSummary(1, "a", 1, 0, 8), GroupSummary(2, "b", 1, 0, 8)]
    shared = GroupSummary(3, "c", 1, 1, 8)
    assert running_reward("buffer", [], None, [*hard, shared, shared]) == 1 / 24


def test_r_tot_is_the_accuracy_of_the_batch_its_average_or_the_buffers() -> None:
    fresh, buffer = [group(8), group(4)], [group(1), group(1)]
    assert running_reward("batch", fresh, 0.1, buffer) == 0.75
    assert running_reward("ema", fresh, 0.25, buffer, ema_decay=0.9) == pytest.approx(0.3)
    assert running_reward("ema", fresh, None, buffer) == 0.75
    assert running_reward("buffer", fresh, 0.1, buffer) == 0.125


@pytest.mark.parametrize("kind", ["batch", "ema", "buffer"])
def test_r_tot_stays_where_there_is_nothing_to_average(kind: RewardKind) -> None:
    assert running_reward(kind, [], 0.4, []) == 0.4
    assert running_reward(kind, [], None, []) == 0.0
