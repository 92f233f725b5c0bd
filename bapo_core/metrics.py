"""What a run is judged by, from counts of correct responses (k of G)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping


def accuracy_bins(correct: Iterable[int], group_size: int) -> list[int]:
    """How many groups have k of G correct, for k = 0..G (G + 1 numbers)."""
    bins = [0] * (group_size + 1)
    for count in correct:
        bins[_bin(count, group_size)] += 1
    return bins


def migration_matrix(
    before: Mapping[str, int], after: Mapping[str, int], group_size: int
) -> list[list[int]]:
    """Prompts by their bin before (row) and after (column), (G+1) x (G+1).

    Maps prompt uid to its count of correct responses; prompts in only one of them are left out.
    """
    matrix = [[0] * (group_size + 1) for _ in range(group_size + 1)]
    for uid in before.keys() & after.keys():
        matrix[_bin(before[uid], group_size)][_bin(after[uid], group_size)] += 1
    return matrix


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that k of n responses, c of them correct, include a correct one: 1 - C(n-c,k)/C(n,k).

    Raises `ValueError` unless 0 <= c <= n and 1 <= k <= n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(
            f"pass@{k} of {c} correct among {n} responses needs c <= n and 1 <= k <= n"
        )
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def unlocked_fraction(before: Mapping[str, int], after: Mapping[str, int]) -> float:
    """Share of the prompts with 0 correct before that have some correct after; 0.0 without any.

    A prompt that `after` does not know counts as still unsolved.
    """
    unsolved = [uid for uid, correct in before.items() if correct == 0]
    if not unsolved:
        return 0.0
    return sum(1 for uid in unsolved if after.get(uid, 0) > 0) / len(unsolved)


def _bin(correct: int, group_size: int) -> int:
    if not 0 <= correct <= group_size:
        raise ValueError(f"{correct} correct of {group_size} is impossible")
    return correct
