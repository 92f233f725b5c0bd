"""Comparisons with the thresholds c1, c2, c3, and the replay window [c2, c3] by r_tot (Eq. 8)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from bapo_core.types import GroupSummary

Direction = Literal["eq8", "easy_to_hard", "fixed"]
RewardKind = Literal["batch", "ema", "buffer"]

TOLERANCE = 1e-9
"""Tolerance of comparisons: far above rounding errors, far below the spacing 1/G of accuracies.

Accuracies lie on the grid k/G but thresholds are computed: 0.3 * 0.375 + 0.125 may miss a grid
value by one ulp.
"""

# The authors' code maps r_tot in [0.2, 0.8] onto the whole range, and is constant outside of it.
_EASY_TO_HARD_START, _EASY_TO_HARD_SPAN = 0.2, 0.6


def at_most(mu: float, c: float) -> bool:
    """Whether mu <= c, up to rounding."""
    return mu <= c + TOLERANCE


def at_least(mu: float, c: float) -> bool:
    """Whether mu >= c, up to rounding."""
    return mu >= c - TOLERANCE


def above(mu: float, c: float) -> bool:
    """Whether mu > c by more than rounding."""
    return not at_most(mu, c)


def within(mu: float, c2: float, c3: float) -> bool:
    """Whether c2 <= mu <= c3 (Eq. 7), up to rounding."""
    return at_least(mu, c2) and at_most(mu, c3)


def replay_window(
    r_tot: float,
    c2_range: tuple[float, float],
    c3_range: tuple[float, float],
    direction: Direction = "eq8",
) -> tuple[float, float]:
    """Returns the replay window (c2, c3) at the accuracy r_tot in [0, 1].

    `eq8` rises with r_tot: c = r_tot * (high - low) + low (Eq. 8). `easy_to_hard` falls, as in the
    authors' code: c = high - q * (high - low), q = clip((r_tot - 0.2) / 0.6, 0, 1). `fixed` is the
    window (c2_low, c3_low), which the authors' code has without adaptation; ranges with equal
    ends fix any other.

    Raises `ValueError` if r_tot is not in [0, 1].
    """
    if not 0.0 <= r_tot <= 1.0:
        raise ValueError(f"r_tot is {r_tot}; give a mean of rewards 0 and 1, which is in [0, 1]")
    if direction == "eq8":
        position = r_tot
    elif direction == "easy_to_hard":
        progress = (r_tot - _EASY_TO_HARD_START) / _EASY_TO_HARD_SPAN
        position = 1.0 - min(max(progress, 0.0), 1.0)
    else:
        position = 0.0
    return _interpolate(c2_range, position), _interpolate(c3_range, position)


def _interpolate(ends: tuple[float, float], position: float) -> float:
    low, high = ends
    return position * (high - low) + low


def running_reward(
    kind: RewardKind,
    fresh: Sequence[GroupSummary],
    previous: float | None,
    buffer: Sequence[GroupSummary],
    ema_decay: float = 0.9,
) -> float:
    """Returns r_tot of Eq. 8, which the paper calls only the "global average performance".

    `batch`: accuracy of this step's unfiltered fresh groups. `ema`: its moving average,
    decay * previous + (1 - decay) * batch. `buffer`: accuracy of the groups in B_bad and B_high,
    of which one that is in both counts once (authors' code; biased low, because B_bad dominates).
    Without groups to average over it is
    `previous`, the r_tot of the step before, or 0 at the first step.
    """
    distinct = {group.group_id: group for group in buffer}
    mean = _accuracy(list(distinct.values()) if kind == "buffer" else fresh)
    if mean is None:
        return 0.0 if previous is None else previous
    if kind == "ema" and previous is not None:
        return ema_decay * previous + (1.0 - ema_decay) * mean
    return mean


def _accuracy(groups: Sequence[GroupSummary]) -> float | None:
    """Returns the share of correct responses, or None without responses."""
    responses = sum(group.size for group in groups)
    return sum(group.correct for group in groups) / responses if responses else None
