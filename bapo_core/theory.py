"""The lower bound on policy improvement (Theorem 3.2) and its constants, as diagnostics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bapo_core.numerics import MAX_FLOAT64_EXPONENT


@dataclass(frozen=True, slots=True)
class ImprovementTerm:
    """The terms of one group in the bound of Theorem 3.2."""

    surrogate: float
    """L = (J(theta) - J(alpha)) / sigma: the mean advantage of the responses, each weighted with
    theta(y) / alpha(y)."""
    constant: float
    """K = (1 - sigma) / sigma."""
    tv_new: float
    """TV(theta, alpha): distance of the updated from the behaviour policy, in [0, 1]."""
    tv_old: float
    """TV(theta_t, alpha): distance of the policy before the update, in [0, 1]."""

    @property
    def bound(self) -> float:
        """L - 2 K TV(theta, alpha) - 2 TV(theta_t, alpha)."""
        return self.surrogate - 2.0 * self.constant * self.tv_new - 2.0 * self.tv_old


def stability_constant(variance: float, eps: float) -> float:
    """Returns K = (1 - sigma) / sigma, sigma = sqrt(variance + eps); about 1 at mu = 1/2.

    Raises `ValueError` if variance + eps is not positive: the constant is then infinite.
    """
    if variance < 0.0 or variance + eps <= 0.0:
        raise ValueError(
            f"variance {variance} with eps {eps} has no finite constant; use a variance >= 0 and "
            "eps > 0"
        )
    sigma = math.sqrt(variance + eps)
    return (1.0 - sigma) / sigma


def improvement_constants(
    group_size: int, c1: float, c2: float, c3: float, eps: float
) -> tuple[float, float, float]:
    """Returns the theorem's constants (K1, K2, K3), each at a reward variance of its source.

    X1: (G-1)/G^2, at mu = 1/G. X2: c1 (1 - c1), which is the smallest variance only while
    mu_new <= 1 - c1 (true on the grid for G = 8, c1 = 1/8). X3: the smaller one at c2 and c3.
    They hold for rewards of 1 and 0, as the theorem does, and are constants for reports; a bound
    takes the variance of each group instead.
    """
    smallest_variances = (
        (group_size - 1) / group_size**2,
        c1 * (1.0 - c1),
        min(c2 * (1.0 - c2), c3 * (1.0 - c3)),
    )
    k1, k2, k3 = (stability_constant(variance, eps) for variance in smallest_variances)
    return k1, k2, k3


def policy_improvement_bound(terms: Sequence[ImprovementTerm]) -> float:
    """Returns the lower bound of E[I (J(theta) - J(theta_t))] (Theorem 3.2) over groups.

    It is the mean over all groups of the batch: the proof takes the expectation of 1{x in X_i}
    times the terms of a group, so each source has the weight of its share of the groups. The
    theorem's sum over sources is without these weights, and would let one replayed group count as
    much as all fresh ones. Raises `ValueError` without groups.
    """
    if not terms:
        raise ValueError("the bound is a mean over groups, got none; leave out empty batches")
    return sum(term.bound for term in terms) / len(terms)


def total_variation_estimate(log_ratios: Sequence[float]) -> float:
    """Estimates TV(theta, alpha) by log theta(y) - log alpha(y) of whole responses y ~ alpha.

    Returns min(1, mean of |exp(log ratio) - 1| / 2). Raises `ValueError` without samples or on NaN.
    """
    if not log_ratios or any(math.isnan(ratio) for ratio in log_ratios):
        raise ValueError(
            f"total variation needs log-ratios that are not NaN, got {len(log_ratios)}, of which "
            f"{sum(map(math.isnan, log_ratios))} are NaN; leave out sources without data"
        )
    distances = (0.5 * abs(math.exp(min(x, MAX_FLOAT64_EXPONENT)) - 1.0) for x in log_ratios)
    return min(1.0, sum(distances) / len(log_ratios))
