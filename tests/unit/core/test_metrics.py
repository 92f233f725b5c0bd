"""Bins, migration matrix, pass@k and unlocked prompts are counted correctly."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bapo_core.metrics import accuracy_bins, migration_matrix, pass_at_k, unlocked_fraction


def test_bins_count_groups_by_their_correct_responses():
    assert accuracy_bins([0, 0, 2, 4], 4) == [2, 0, 1, 0, 1]
    assert accuracy_bins([], 2) == [0, 0, 0]


@pytest.mark.parametrize("correct", [-1, 5])
def test_an_impossible_count_is_refused(correct):
    with pytest.raises(ValueError, match=r"correct of 4: give a count in 0\.\.4"):
        accuracy_bins([correct], 4)


def test_migration_has_a_row_per_bin_before_and_a_column_per_bin_after():
    before = {"a": 0, "b": 0, "c": 2, "gone": 1}
    after = {"a": 0, "b": 2, "c": 1, "new": 1}
    assert migration_matrix(before, after, 2) == [[1, 0, 1], [0, 0, 0], [0, 1, 0]]


@given(st.dictionaries(st.text(), st.integers(0, 8)), st.dictionaries(st.text(), st.integers(0, 8)))
def test_migration_counts_the_prompts_in_both(before, after):
    assert sum(map(sum, migration_matrix(before, after, 8))) == len(before.keys() & after.keys())


@given(st.integers(1, 8), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_response(n, data):
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    subsets = list(combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, 2, 5), (4, 2, 0), (4, -1, 1)])
def test_pass_at_k_refuses_what_cannot_be_drawn(n, c, k):
    with pytest.raises(ValueError, match="pass@"):
        pass_at_k(n, c, k)


def test_unlocked_is_the_share_of_the_unsolved_solved_since():
    before = {"a": 0, "b": 0, "c": 3, "unknown": 0, "d": 0}
    after = {"a": 1, "b": 0, "c": 0, "d": 8}
    assert unlocked_fraction(before, after) == 0.5
    assert unlocked_fraction({"c": 3}, {"c": 5}) == 0.0
    assert unlocked_fraction({}, {}) == 0.0
