"""Composition of a training batch from X1, X2 and X3."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from bapo_core.buffers import Dedup, identity
from bapo_core.thresholds import above, within
from bapo_core.types import BatchMember, GroupSummary, Source, TrainingBatch


def build_batch(
    fresh: Sequence[GroupSummary],
    reevaluated: Sequence[GroupSummary],
    candidates: Sequence[GroupSummary],
    *,
    capacity: int,
    window: tuple[float, float],
    c1: float | None,
    rng: random.Random,
    dedup: Dedup = "prompt",
) -> TrainingBatch:
    """X1, then X2, then X3, as whole groups, up to `capacity` groups; never padded.

    fresh: X1, already filtered; the first `capacity` are taken.
    reevaluated: X2, already promoted; taken in order while there is room.
    candidates: eligible entries of B_high; min(len, room left) are drawn uniformly without
        replacement (Eq. 7) and kept in their order.

    A prompt (with dedup "rollout": a rollout) appears once, in the first source that has it.

    `window` and `c1` must already hold for the groups given, and are checked: every candidate has
    c2 <= mu <= c3, every re-evaluated group c1 < mu < 1 (Eq. 6). Pass c1=None under a promotion
    rule other than the paper's. Raises `ValueError` where they do not hold.
    """
    _check_candidates(candidates, window)
    if c1 is not None:
        _check_promoted(reevaluated, c1)

    taken: set[str | int] = set()

    def first_of_each(groups: Iterable[GroupSummary]) -> list[GroupSummary]:
        found: dict[str | int, GroupSummary] = {}
        for group in groups:
            key = identity(group, dedup)
            if key not in taken:
                found.setdefault(key, group)
        return list(found.values())

    def take(groups: Sequence[GroupSummary]) -> list[GroupSummary]:
        taken.update(identity(group, dedup) for group in groups)
        return list(groups)

    x1 = take(first_of_each(fresh)[:capacity])
    x2 = take(first_of_each(reevaluated)[: capacity - len(x1)])
    x3 = _draw(first_of_each(candidates), capacity - len(x1) - len(x2), rng)

    parts = {Source.FRESH: x1, Source.REEVALUATED: x2, Source.REPLAYED: x3}
    return TrainingBatch(
        members=[BatchMember(group, source) for source, part in parts.items() for group in part],
        capacity=capacity,
        window=window,
        counts={source: len(part) for source, part in parts.items()},
    )


def _draw(groups: Sequence[GroupSummary], room: int, rng: random.Random) -> list[GroupSummary]:
    chosen = rng.sample(range(len(groups)), min(room, len(groups)))
    return [groups[index] for index in sorted(chosen)]


def _check_candidates(candidates: Sequence[GroupSummary], window: tuple[float, float]) -> None:
    for group in candidates:
        if not within(group.mean_reward, *window):
            raise ValueError(
                f"candidate group {group.group_id} has mean reward {group.mean_reward}, outside "
                f"the window {window}; choose candidates with buffers.eligible_high"
            )


def _check_promoted(reevaluated: Sequence[GroupSummary], c1: float) -> None:
    for group in reevaluated:
        if not (above(group.mean_reward, c1) and group.correct < group.size):
            raise ValueError(
                f"re-evaluated group {group.group_id} has mean reward {group.mean_reward}, not in "
                f"({c1}, 1); choose X2 with buffers.promoted, and pass c1=None unless its rule "
                "is 'paper'"
            )
