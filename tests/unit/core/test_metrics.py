"""Bins, migration matrix, pass@k and unlocked prompts are counted correctly."""

from __future__ import annotations

import statistics
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bapo_core.metrics import (
    accuracy_bins,
    majority_at_k,
    mean_score,
    migration_matrix,
    pass_at_k,
    sample_counts,
    scores_of_bins,
    unlocked_fraction,
)


def test_bins_count_groups_by_their_correct_responses() -> None:
    assert accuracy_bins([0, 0, 2, 4], 4) == [2, 0, 1, 0, 1]
    assert accuracy_bins([], 2) == [0, 0, 0]


@pytest.mark.parametrize("correct", [-1, 5])
def test_an_impossible_count_is_refused(correct: int) -> None:
    with pytest.raises(ValueError, match=r"correct of 4: give a count in 0\.\.4"):
        accuracy_bins([correct], 4)


def test_migration_has_a_row_per_bin_before_and_a_column_per_bin_after() -> None:
    before = {"a": 0, "b": 0, "c": 2, "gone": 1}
    after = {"a": 0, "b": 2, "c": 1, "new": 1}
    assert migration_matrix(before, after, 2) == [[1, 0, 1], [0, 0, 0], [0, 1, 0]]


@given(st.dictionaries(st.text(), st.integers(0, 8)), st.dictionaries(st.text(), st.integers(0, 8)))
def test_migration_counts_the_prompts_in_both(
    before: dict[str, int], after: dict[str, int]
) -> None:
    assert sum(map(sum, migration_matrix(before, after, 8))) == len(before.keys() & after.keys())


@given(st.integers(1, 8), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_response(
    n: int, data: st.DataObject
) -> None:
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    subsets = list(combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, 2, 5), (4, 2, 0), (4, -1, 1)])
def test_pass_at_k_refuses_what_cannot_be_drawn(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="pass@"):
        pass_at_k(n, c, k)


def test_the_unlocked_fraction_is_the_share_of_unsolved_prompts_solved_since() -> None:
    before = {"a": 0, "b": 0, "c": 3, "unknown": 0, "d": 0}
    after = {"a": 1, "b": 0, "c": 0, "d": 8}
    assert unlocked_fraction(before, after) == 0.5
    assert unlocked_fraction({"c": 3}, {"c": 5}) == 0.0
    assert unlocked_fraction({}, {}) == 0.0


@pytest.mark.parametrize(
    ("answers", "correct", "k", "expected"),
    [
        (["7", "8", "7"], [True, False, True], 3, 1.0),
        (["7", "8", "8"], [True, False, False], 3, 0.0),
        (["8", "7", "8", "7"], [False, True, False, True], 4, 0.0),  # a tie: 8 comes first
        (["7", "8", "8", "7"], [True, False, False, True], 4, 1.0),  # a tie: 7 comes first
        (["", "", "7"], [False, False, True], 3, 1.0),  # a response without an answer has no vote
        (["", ""], [False, False], 2, 0.0),
        (["8", "7", "7", "7"], [False, True, True, True], 2, 0.5),  # blocks 8, 7 and 7, 7
        (["7", "7", "8"], [True, True, False], 2, 1.0),  # the third response is in no block of 2
    ],
)
def test_maj_at_k_is_the_share_of_blocks_whose_majority_is_correct(
    answers: list[str], correct: list[bool], k: int, expected: float
) -> None:
    assert majority_at_k(answers, correct, k) == expected


def test_a_majority_of_more_answers_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="maj@3 of 2 answers"):
        majority_at_k(["1", "2"], [True, False], 3)


def test_reported_k_are_powers_of_two_and_the_number_of_samples() -> None:
    assert {n: sample_counts(n) for n in (1, 2, 3, 8, 12)} == {
        1: [],
        2: [2],
        3: [2, 3],
        8: [2, 4, 8],
        12: [2, 4, 8, 12],
    }


def test_the_confidence_interval_is_that_of_the_mean_over_prompts() -> None:
    score = mean_score("mean", 4, [0.25, 0.5, 0.75, 0.5])
    half = 1.959964 * statistics.stdev([0.25, 0.5, 0.75, 0.5]) / 2
    assert (score.value, score.low, score.high) == (0.5, 0.5 - half, 0.5 + half)


def test_a_confidence_interval_stays_within_0_to_1_and_is_0_to_1_for_one_prompt() -> None:
    assert mean_score("pass", 2, [0.0, 0.0, 1.0]).low == 0.0
    assert mean_score("pass", 2, [1.0, 1.0, 0.0]).high == 1.0
    single = mean_score("pass", 2, [1.0])
    assert (single.value, single.low, single.high) == (1.0, 0.0, 1.0)


def test_bins_give_the_mean_accuracy_and_pass_at_k() -> None:
    scores = {(score.metric, score.k): score.value for score in scores_of_bins([1, 0, 1, 0, 2])}
    assert scores == {
        ("mean", 4): (0 + 0.5 + 1 + 1) / 4,
        ("pass", 2): pytest.approx((0 + (1 - 1 / 6) + 2) / 4),
        ("pass", 4): 0.75,
    }
