"""The lower bound on policy improvement (Theorem 3.2) and its constants, as diagnostics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bapo_core.numerics import MAX_FLOAT64_EXPONENT
from bapo_core.types import Source


@dataclass(frozen=True, slots=True)
class SourceTerm:
    """The terms of one source X_i in the bound of Theorem 3.2, means over its groups."""

    surrogate: float
    """L_i = (J(theta) - J(alpha_i)) / sigma_i."""
    constant: float
    """K_i = (1 - sigma_i) / sigma_i."""
    tv_new: float
    """TV(theta, alpha_i): distance of the updated from the behaviour policy, in [0, 1]."""
    tv_old: float
    """TV(theta_t, alpha_i): distance of the policy before the update, in [0, 1]."""

    @property
    def bound(self) -> float:
        """L_i - 2 K_i TV(theta, alpha_i) - 2 TV(theta_t, alpha_i)."""
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
    """Returns (K1, K2, K3), each at the smallest reward variance that its source admits.

    X1: (G-1)/G^2, at mu = 1/G. X2: c1 (1 - c1), which bounds the variance only while
    mu_new <= 1 - c1 (true on the grid for G = 8, c1 = 1/8). X3: the smaller one at c2 and c3.
    """
    smallest_variances = (
        (group_size - 1) / group_size**2,
        c1 * (1.0 - c1),
        min(c2 * (1.0 - c2), c3 * (1.0 - c3)),
    )
    k1, k2, k3 = (stability_constant(variance, eps) for variance in smallest_variances)
    return k1, k2, k3


def policy_improvement_bound(terms: Mapping[Source, SourceTerm]) -> float:
    """Returns the lower bound of E[I (J(theta) - J(theta_t))] (Theorem 3.2).

    Sources that are absent contribute 0.
    """
    return sum(term.bound for term in terms.values())


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
