"""Online filters that select X1 from a step's fresh groups (A.3).

Groups are kept whole and in order. A filter may keep none, and X1 is then empty.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from bapo_core.types import GroupSummary


def range_filter(groups: Sequence[GroupSummary]) -> list[GroupSummary]:
    """Keeps groups whose rewards differ; the others have zero advantages (first part of Eq. 5).

    For rewards of 1 and 0, these are the groups with 1/G <= mu <= (G-1)/G.
    """
    return [group for group in groups if group.mixed]


def gaussian_filter(
    groups: Sequence[GroupSummary],
    *,
    mean: float = 0.5,
    sigma: float = 0.2,
    rng: random.Random,
) -> list[GroupSummary]:
    """Keeps each mixed group with probability exp(-(mu - mean)^2 / (2 sigma^2)) (A.3).

    mu is the share of correct responses, whatever their rewards.
    """

    def accepted(group: GroupSummary) -> bool:
        distance = (group.accuracy - mean) / sigma
        return rng.random() < math.exp(-0.5 * distance * distance)

    return [group for group in groups if group.mixed and accepted(group)]


def uniform_filter(
    groups: Sequence[GroupSummary], *, fraction: float = 0.6, rng: random.Random
) -> list[GroupSummary]:
    """Keeps round(fraction * n) of the n groups, drawn uniformly whatever their mu (A.3)."""
    kept = rng.sample(range(len(groups)), round(fraction * len(groups)))
    return [groups[index] for index in sorted(kept)]
