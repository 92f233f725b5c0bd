"""Computes which differences a comparison of variants with several seeds can decide.

A value of variant i with seed j is modelled as m_i + b_j + e_ij: what the variant adds, what all
variants share with a seed (the order of the training prompts, and the prompts themselves if each
seed has its own), and the difference between repetitions of one run, which is normal with one
standard deviation sigma for all variants. What all seeds share, such as one set of held-out
prompts, is not in sigma: the comparison is about this set. Sigma is estimated from the residuals of
the least-squares fit, and all pairs of variants are tested together by Tukey's honestly significant
difference (Tukey-Kramer if seeds are missing), so that the chance of any wrong decision among all
pairs is at most 5%.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import combinations
from statistics import NormalDist, mean, stdev

import numpy as np
from numpy.typing import NDArray

LEVEL = 0.95
"""Chance that no pair of equal variants is decided."""
POWER = 0.8
"""Statistical power (probability to decide a true difference) that planned seeds must have."""
MOST_SEEDS = 1_000_000
"""Most seeds that a plan states."""
PRECISION = 1e-9
"""Largest error of the probability at a computed quantile."""
FEWEST_PAIRS = 3
"""Smallest number of seeds with a shown interval: with two seeds, Student's t is 12.7."""


@dataclass(frozen=True, slots=True)
class Observation:
    """The value of a measure for one run."""

    variant: str
    seed: int
    value: float


@dataclass(frozen=True, slots=True)
class Decisions:
    """Decisions of a comparison about one measure: differences between variants and thresholds."""

    variants: tuple[str, ...]
    """Labels of the V variants, in the order of their first observations."""
    differences: NDArray[np.float64]
    """Estimated differences between variants, row minus column, of shape (V, V). With the same
    seeds for all variants, they are the differences of the means."""
    thresholds: NDArray[np.float64]
    """Smallest decided difference of each pair of variants, of shape (V, V); infinite for a pair
    that no seeds connect."""

    @property
    def smallest_difference(self) -> float:
        """Smallest difference that is decided for every pair of variants."""
        pairs = combinations(range(len(self.variants)), 2)
        return max(float(self.thresholds[pair]) for pair in pairs)

    def is_ahead(self, variant: str, other: str) -> bool:
        """Returns whether the variant's value is decided to be larger than the other's."""
        pair = self.variants.index(variant), self.variants.index(other)
        return bool(self.differences[pair] > self.thresholds[pair])

    def places(self, *, higher_is_better: bool = True) -> dict[str, tuple[int, int]]:
        """Returns the best and the worst place that each variant may have, from 1 on.

        The best place is 1 + the number of variants that are decided to be better, the worst one V
        - the number of variants that are decided to be worse. The true places of all variants are
        within these bounds together with a probability of at least 95% (Al Mohamad, Goeman and van
        Zwet 2019, arXiv:1708.02729).
        """
        ahead = self.differences > self.thresholds
        better, worse = (ahead.sum(axis=0), ahead.sum(axis=1))
        if not higher_is_better:
            better, worse = worse, better
        count = len(self.variants)
        return {
            variant: (1 + int(better[index]), count - int(worse[index]))
            for index, variant in enumerate(self.variants)
        }


@dataclass(frozen=True, slots=True)
class Resolution(Decisions):
    """Decisions by one standard deviation for all variants, and what more seeds would decide."""

    deviation: float
    """Estimate of sigma, the standard deviation of repetitions of one run."""
    degrees_of_freedom: int
    """Degrees of freedom of the estimate: (V - 1)(n - 1) for V variants with the same n seeds."""

    def seeds_for(self, difference: float) -> int:
        """Returns the number of seeds that decides a true difference with a power of 80%.

        The number holds for as many variants as here, each with the same seeds. It is the smallest
        n with difference >= (q / sqrt(2) + t) * sigma * sqrt(2 / n), where q is the quantile of the
        studentized range and t Student's 80% quantile, both with (V - 1)(n - 1) degrees of freedom.
        """
        if difference <= 0:
            raise ValueError(f"difference is {difference}; give one above 0")

        variants = len(self.variants)

        def needed(degrees_of_freedom: int) -> float:
            errors = studentized_range_quantile(LEVEL, variants, degrees_of_freedom) / math.sqrt(2)
            errors += students_t_quantile(2 * POWER - 1, degrees_of_freedom)
            return 2 * (errors * self.deviation / difference) ** 2

        # The quantiles decrease with the degrees of freedom, so that the number for the most of
        # them is a lower bound, and usually at most three below the result.
        fewest = needed((variants - 1) * MOST_SEEDS)
        seeds = max(2, math.ceil(min(fewest, MOST_SEEDS)))
        while seeds < MOST_SEEDS and needed((variants - 1) * (seeds - 1)) > seeds:
            seeds += 1
        return seeds


def format_places(places: tuple[int, int]) -> str:
    """Returns the best and the worst place of a variant as text, such as `1-3`, or `2` if equal."""
    best, worst = places
    return str(best) if best == worst else f"{best}-{worst}"


def resolve(observations: Sequence[Observation]) -> Resolution | None:
    """Returns what the observations of a measure decide.

    None if they do not show how far repetitions differ: with one variant, or with one seed each.
    """
    variants = list(dict.fromkeys(each.variant for each in observations))
    seeds = list(dict.fromkeys(each.seed for each in observations))
    design = np.array(
        [
            [float(each.variant == variant) for variant in variants]
            + [float(each.seed == seed) for seed in seeds]
            for each in observations
        ]
    )
    values = np.array([each.value for each in observations])
    if len(variants) < 2 or not np.isfinite(values).all():
        return None
    inverse = np.linalg.pinv(design)
    degrees_of_freedom = len(values) - int(np.linalg.matrix_rank(design))
    if degrees_of_freedom == 0:
        return None
    effects = inverse @ values
    residuals = values - design @ effects
    # Rounding errors of values that fit exactly must not decide anything.
    rounding = 1e-9 * float(np.abs(values).max())
    deviation = math.sqrt(float(residuals @ residuals) / degrees_of_freedom)
    quantile = studentized_range_quantile(LEVEL, len(variants), degrees_of_freedom) / math.sqrt(2)
    size = len(variants)
    differences = np.zeros((size, size))
    thresholds = np.zeros((size, size))
    for i, j in combinations(range(size), 2):
        contrast = np.zeros(design.shape[1])
        contrast[i], contrast[j] = 1.0, -1.0
        weights = contrast @ inverse
        is_estimable = np.allclose(weights @ design, contrast, atol=1e-8)
        error = deviation * float(np.linalg.norm(weights)) if is_estimable else math.inf
        differences[i, j] = float(weights @ values)
        differences[j, i] = -differences[i, j]
        thresholds[i, j] = thresholds[j, i] = max(quantile * error, rounding)
    return Resolution(tuple(variants), differences, thresholds, deviation, degrees_of_freedom)


def decide_pairwise(observations: Sequence[Observation]) -> Decisions | None:
    """Returns what the paired runs of each two variants decide, without a common sigma.

    The threshold of a pair is Student's t at the level 1 - 0.05 / (V (V - 1) / 2), times the
    standard error of the mean difference between its runs of equal seeds: the chance of any wrong
    decision among all pairs is at most 5% (Bonferroni) whatever standard deviation each variant
    has, but more seeds are needed. It is infinite with less than two seeds in common. None with one
    variant.
    """
    values: dict[str, dict[int, float]] = {}
    for each in observations:
        values.setdefault(each.variant, {})[each.seed] = each.value
    runs = list(values.values())
    size = len(runs)
    if size < 2:
        return None
    differences = np.zeros((size, size))
    thresholds = np.zeros((size, size))
    for i, j in combinations(range(size), 2):
        common = [runs[i][seed] - runs[j][seed] for seed in runs[i] if seed in runs[j]]
        found = paired_difference(common, pairs=math.comb(size, 2)) if common else {}
        differences[i, j] = found.get("mean", 0.0)
        differences[j, i] = -differences[i, j]
        # Rounding errors of values that fit exactly must not decide anything.
        rounding = 1e-9 * max(map(abs, (*runs[i].values(), *runs[j].values())))
        threshold = max(found.get("half_width", math.inf), rounding)
        thresholds[i, j] = thresholds[j, i] = threshold
    return Decisions(tuple(values), differences, thresholds)


def students_t_quantile(level: float, degrees_of_freedom: int) -> float:
    """Returns t with P(|T| <= t) = level for Student's distribution."""
    # The studentized range of two values is sqrt(2) |T|.
    return studentized_range_quantile(level, 2, degrees_of_freedom) / math.sqrt(2)


def paired_difference(differences: Sequence[float], *, pairs: int = 1) -> dict[str, float]:
    """Returns the mean of the differences between runs of equal seeds, and their number as `seeds`.

    With more than one there is also `half_width`, half of the 95% confidence interval of the mean
    by Student's t. With several pairs of variants, the intervals of all of them together have 95%
    by Bonferroni's correction.
    """
    count = len(differences)
    found: dict[str, float] = {"mean": mean(differences), "seeds": count}
    if count > 1:
        quantile = students_t_quantile(1 - (1 - LEVEL) / pairs, count - 1)
        found["half_width"] = quantile * stdev(differences) / math.sqrt(count)
    return found


@lru_cache(maxsize=4096)
def studentized_range_quantile(level: float, groups: int, degrees_of_freedom: int) -> float:
    """Returns q with P(Q <= q) = level for the studentized range Q of `groups` normal values.

    Q is the range of the values divided by an independent estimate of their standard deviation.
    """

    def excess(q: float) -> float:
        return _studentized_range_cdf(q, groups, degrees_of_freedom) - level

    # The Illinois algorithm (Dowell and Jarratt 1971): secants of two points on both sides of the
    # root, where the value at a point that is kept a second time in a row is halved.
    low, at_low = 0.0, -level
    high, at_high = 1.0, excess(1.0)
    while at_high < 0:
        low, at_low = high, at_high
        high, at_high = 2 * high, excess(2 * high)
    while True:
        q = high - at_high * (high - low) / (at_high - at_low)
        at_q = excess(q)
        if abs(at_q) < PRECISION:
            return q
        if at_q * at_high < 0:
            low, at_low = high, at_high
        else:
            at_low /= 2
        high, at_high = q, at_q


def _studentized_range_cdf(q: float, groups: int, degrees_of_freedom: int) -> float:
    """Integrates the distribution of the range over the estimated standard deviation s:

    P(Q <= q) = int f(s) k int phi(z) (Phi(z) - Phi(z - q s))^(k - 1) dz ds, with f the density of
    sqrt(chi^2 / degrees of freedom) and k the number of groups.
    """
    freedom = float(degrees_of_freedom)
    spread = 8 / math.sqrt(2 * freedom)
    s, s_weights = _gauss_legendre(max(0.0, 1 - spread), 1 + spread)
    with np.errstate(divide="ignore"):
        density = np.exp(
            math.log(2)
            + freedom / 2 * math.log(freedom / 2)
            - math.lgamma(freedom / 2)
            + (freedom - 1) * np.log(s)
            - freedom / 2 * s**2
        )
    z, z_weights = _gauss_legendre(-8.0, 8.0)
    normal = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
    within = _normal_cdf(z) - _normal_cdf(z[None, :] - q * s[:, None])
    ranges = groups * (within ** (groups - 1)) @ (normal * z_weights)
    return float(ranges @ (density * s_weights))


def _gauss_legendre(low: float, high: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    nodes, weights = _legendre_rule()
    half = (high - low) / 2
    return low + half * (nodes + 1), half * weights


@cache
def _legendre_rule() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns nodes and weights on [-1, 1], which a service must not compute when it starts."""
    nodes, weights = np.polynomial.legendre.leggauss(160)
    return nodes, weights


def _normal_cdf(x: NDArray[np.float64]) -> NDArray[np.float64]:
    shares: NDArray[np.float64] = np.interp(x, *_normal_table())
    return shares


@cache
def _normal_table() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns points and the normal distribution function at these points."""
    normal, points = NormalDist(), np.linspace(-9.0, 9.0, 8001)
    return points, np.array([normal.cdf(point) for point in points.tolist()])
