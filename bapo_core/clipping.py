"""Clip bounds that are searched in each update (BAPO, arXiv 2510.18927, Eq. 8 and Algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bapo_core.config.objectives import AdaptiveClippingConfig

_EPS = 1e-8
"""Constant that the authors' code adds to a denominator."""


@dataclass(frozen=True, slots=True)
class AdaptiveBounds:
    """The bounds of an update's ratios."""

    low: float
    """c_low."""
    high: float
    """c_high."""
    rho: float
    """Contribution of the tokens with positive advantages within these bounds; 1 in an update
    without any advantage, whose bounds do not matter."""


@torch.no_grad()
def search_bounds(
    ratios: Tensor, advantages: Tensor, rollout_logprobs: Tensor, settings: AdaptiveClippingConfig
) -> AdaptiveBounds:
    """Moves the bounds until tokens with positive advantages contribute `settings.target`.

    ratios, advantages, rollout_logprobs: (T,) of all tokens of the update. With u the weight of a
    token, its probability under the rollout policy or 1:

        P(c_high) = sum over A > 0 of u min(r, c_high) A
        N(c_low)  = sum over A < 0 of u max(r, c_low) |A|

    Under `contribution: gradient` only tokens with a gradient count, so those with r < c_high in P
    and those with r > c_low in N, with u r |A| (Eq. 5). The other measures have a flaw: a higher
    c_low raises N, so that moving it lowers rho, and the search always ends at its last value.

    P depends on c_high alone and N on c_low alone, so the search needs no pass over the tokens.
    It stops at the target, or when neither bound can move; the paper's loop also stops when the
    lower bound cannot move from its start, although the upper one could.
    """
    weights = rollout_logprobs.exp() if settings.token_weight == "rollout" else 1.0
    contributions = (weights * advantages.abs()).double()
    good, bad = advantages > 0, advantages < 0
    highs = _candidates(settings.high_range, settings.high_step)
    lows = _candidates(settings.low_range, settings.low_step)
    if settings.contribution == "gradient":
        gradients = contributions * ratios
        positive = [gradients[good & (ratios < high)].sum() for high in highs]
        negative = [gradients[bad & (ratios > low)].sum() for low in lows]
    else:
        positive = [(contributions * ratios.clamp(max=high))[good].sum() for high in highs]
        negative = [(contributions * ratios.clamp(min=low))[bad].sum() for low in lows]

    def rho(at_high: int, at_low: int) -> float:
        return _rho(float(positive[at_high]), float(negative[at_low]), settings.contribution)

    at_high = at_low = 0
    while rho(at_high, at_low) < settings.target:
        upper_moves, lower_moves = at_high + 1 < len(highs), at_low + 1 < len(lows)
        if upper_moves and (settings.order == "upper_first" or not lower_moves):
            at_high += 1
        elif lower_moves:
            at_low += 1
        else:
            break
    return AdaptiveBounds(lows[at_low], highs[at_high], rho(at_high, at_low))


def _candidates(bounds: tuple[float, float], step: float) -> list[float]:
    """Returns start, start + step, ..., up to the end; multiples of the step do not drift."""
    start, end = bounds
    return [start + step * index for index in range(int((end - start) / step + 1e-9) + 1)]


def _rho(positive: float, negative: float, contribution: str) -> float:
    if positive == negative == 0.0:
        return 1.0
    if contribution == "ratio":
        return positive / (negative + _EPS)
    if contribution == "literal":
        return positive / max(abs(positive - negative), _EPS)
    return positive / (positive + negative)
