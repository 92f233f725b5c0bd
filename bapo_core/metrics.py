"""Metrics of a run from counts of correct responses (k of G)."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

NORMAL_QUANTILE = 1.959964
"""97.5% quantile of the normal distribution, which makes two-sided intervals of 95%."""
AGES = (
    ("0", 0, 0),
    ("1", 1, 1),
    ("2", 2, 2),
    ("3_4", 3, 4),
    ("5_9", 5, 9),
    ("10_up", 10, 1 << 62),
)
"""Names of the ages by which a step's metrics report divergence, from the youngest on, with the
first and the last age of each: steps between the policy that sampled a response and the step."""


@dataclass(frozen=True, slots=True)
class Score:
    """A metric of an evaluation: its mean over the prompts, with a 95% confidence interval."""

    metric: Literal["mean", "pass", "maj"]
    """Kind of the metric, as in mean@k, pass@k and maj@k."""
    k: int
    """Number of responses that the metric takes."""
    value: float
    low: float
    high: float


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


def majority_at_k(answers: Sequence[str], correct: Sequence[bool], k: int) -> float:
    """Returns maj@k of a prompt: how often the majority of k responses has a correct answer.

    answers: normalised answer of each response, empty if it has none and so no vote.
    correct: whether each response is correct.

    The n responses are taken in n // k blocks of k, in their order, and the result is the share of
    blocks whose most frequent answer is correct. Of equally frequent answers, the one that occurs
    first counts. An answer is as correct as the first response that gives it.

    Raises `ValueError` unless there are as many answers as verdicts and 1 <= k <= n.
    """
    if len(answers) != len(correct) or not 1 <= k <= len(answers):
        raise ValueError(
            f"maj@{k} of {len(answers)} answers with {len(correct)} verdicts needs as many of both "
            "and 1 <= k <= n"
        )
    starts = range(0, len(answers) - k + 1, k)
    return sum(
        _majority_is_correct(answers[start : start + k], correct[start : start + k])
        for start in starts
    ) / len(starts)


def _majority_is_correct(answers: Sequence[str], correct: Sequence[bool]) -> bool:
    votes = Counter(answer for answer in answers if answer)
    if not votes:
        return False
    # A Counter keeps the order of first occurrences, and so does `most_common` among equals.
    winner, _ = votes.most_common(1)[0]
    return correct[answers.index(winner)]


def sample_counts(samples: int) -> list[int]:
    """Returns the k of which pass@k and maj@k are reported: 2, 4, 8, ... below n, and n itself."""
    powers = (2**exponent for exponent in range(1, samples.bit_length()))
    return sorted({*(k for k in powers if k < samples), samples} - {1})


def mean_score(metric: Literal["mean", "pass", "maj"], k: int, values: Sequence[float]) -> Score:
    """Returns the mean of the prompts' values with its 95% confidence interval.

    The interval is the normal one of the mean over prompts, which are the independent draws: mean
    +- 1.96 s / sqrt(N), with the sample standard deviation s of the N values, cut off at 0 and 1
    (arXiv 2411.00640). It spans [0, 1] for a single prompt, and has no width if all values are
    equal. Raises `ValueError` without values.
    """
    mean = statistics.fmean(values)
    if len(values) == 1:
        return Score(metric, k, mean, 0.0, 1.0)
    half = NORMAL_QUANTILE * statistics.stdev(values, mean) / math.sqrt(len(values))
    return Score(metric, k, mean, max(0.0, mean - half), min(1.0, mean + half))


def scores_of_bins(bins: Sequence[int]) -> list[Score]:
    """Returns mean@n, and pass@k for the k of `sample_counts`, of prompts by correct responses.

    bins: number of prompts with c of n correct, for c = 0..n (`accuracy_bins`).
    """
    n = len(bins) - 1
    correct = [c for c, prompts in enumerate(bins) for _ in range(prompts)]
    scores = [mean_score("mean", n, [c / n for c in correct])]
    for k in sample_counts(n):
        scores.append(mean_score("pass", k, [pass_at_k(n, c, k) for c in correct]))
    return scores


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
