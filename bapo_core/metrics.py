"""Metrics of a run from counts of correct responses (k of G)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping


def accuracy_bins(correct: Iterable[int], group_size: int) -> list[int]:
    """Returns the number of groups with k of G correct, for k = 0..G (G + 1 numbers)."""
    bins = [0] * (group_size + 1)
    for count in correct:
        bins[_bin(count, group_size)] += 1
    return bins


def migration_matrix(
    before: Mapping[str, int], after: Mapping[str, int], group_size: int
) -> list[list[int]]:
    """Returns the number of prompts by bin before (row) and after (column), (G+1) x (G+1).

    before, after: number of correct responses by prompt uid; prompts in only one are left out.
    """
    matrix = [[0] * (group_size + 1) for _ in range(group_size + 1)]
    for uid in before.keys() & after.keys():
        matrix[_bin(before[uid], group_size)][_bin(after[uid], group_size)] += 1
    return matrix


def pass_at_k(n: int, c: int, k: int) -> float:
    """Returns pass@k, 1 - C(n-c,k)/C(n,k), from n responses of which c are correct.

    It is the probability that k of them, drawn at random, include a correct one.

    Raises `ValueError` unless 0 <= c <= n and 1 <= k <= n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(
            f"pass@{k} of {c} correct among {n} responses needs c <= n and 1 <= k <= n"
        )
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def unlocked_fraction(before: Mapping[str, int], after: Mapping[str, int]) -> float:
    """Returns the share of prompts with 0 correct before that have some correct after.

    It is 0.0 without such prompts. A prompt that is not in `after` counts as unsolved.
    """
    unsolved = [uid for uid, correct in before.items() if correct == 0]
    if not unsolved:
        return 0.0
    return sum(1 for uid in unsolved if after.get(uid, 0) > 0) / len(unsolved)


def _bin(correct: int, group_size: int) -> int:
    if not 0 <= correct <= group_size:
        raise ValueError(f"{correct} correct of {group_size}: give a count in 0..{group_size}")
    return correct
