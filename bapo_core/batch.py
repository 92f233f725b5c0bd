"""Composition of a training batch from X1, X2 and X3."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from bapo_core.buffers import Dedup, Window, dedup_key, is_replayable
from bapo_core.thresholds import above
from bapo_core.types import BatchMember, GroupSummary, Source, TrainingBatch


def build_batch(
    fresh: Sequence[GroupSummary],
    reevaluated: Sequence[GroupSummary],
    candidates: Sequence[GroupSummary],
    *,
    capacity: int,
    window: tuple[float, float],
    selects_mixed: bool = False,
    c1: float | None,
    rng: random.Random,
    dedup: Dedup = "prompt",
) -> TrainingBatch:
    """Composes a training batch of X1, X2 and X3, in that order, of at most `capacity` groups.

    fresh: X1, already filtered; the first `capacity` are taken.
    reevaluated: X2, already promoted; taken in order while there is room.
    candidates: eligible entries of B_high, of which min(len, room) are drawn uniformly without
        replacement to be X3 (Eq. 7); they keep their order.
    window: the replay window (c2, c3), which every candidate's mu must be in.
    selects_mixed: whether candidates must be mixed instead, whatever their mu (DOTS).
    c1: every re-evaluated group must be mixed and have mu > c1 (Eq. 6); None under a promotion rule
        other than the paper's.

    A dedup key appears once, in the first source that has it. A batch is never padded. Raises
    `ValueError` for a group outside of its thresholds.
    """
    _check_candidates(candidates, None if selects_mixed else window)
    if c1 is not None:
        _check_promoted(reevaluated, c1)

    taken: set[str | int] = set()

    def distinct(groups: Iterable[GroupSummary]) -> list[GroupSummary]:
        """Returns the first group of every dedup key that is not taken yet."""
        first: dict[str | int, GroupSummary] = {}
        for group in groups:
            key = dedup_key(group, dedup)
            if key not in taken:
                first.setdefault(key, group)
        return list(first.values())

    def take(groups: Sequence[GroupSummary]) -> list[GroupSummary]:
        taken.update(dedup_key(group, dedup) for group in groups)
        return list(groups)

    x1 = take(distinct(fresh)[:capacity])
    x2 = take(distinct(reevaluated)[: capacity - len(x1)])
    x3 = _draw(distinct(candidates), capacity - len(x1) - len(x2), rng)

    by_source = {Source.FRESH: x1, Source.REEVALUATED: x2, Source.REPLAYED: x3}
    return TrainingBatch(
        members=[
            BatchMember(group, source) for source, groups in by_source.items() for group in groups
        ],
        capacity=capacity,
        window=window,
        counts={source: len(groups) for source, groups in by_source.items()},
    )


def _draw(groups: Sequence[GroupSummary], room: int, rng: random.Random) -> list[GroupSummary]:
    drawn = rng.sample(range(len(groups)), min(room, len(groups)))
    return [groups[index] for index in sorted(drawn)]


def _check_candidates(candidates: Sequence[GroupSummary], window: Window) -> None:
    for group in candidates:
        if not is_replayable(group, window):
            reason = (
                "equal rewards"
                if window is None
                else f"accuracy {group.accuracy}, outside the replay window {window}"
            )
            raise ValueError(
                f"candidate group {group.group_id} has {reason}; choose candidates with "
                "buffers.eligible_high"
            )


def _check_promoted(reevaluated: Sequence[GroupSummary], c1: float) -> None:
    for group in reevaluated:
        if not (above(group.accuracy, c1) and group.mixed):
            raise ValueError(
                f"re-evaluated group {group.group_id} has accuracy {group.accuracy}, not in "
                f"({c1}, 1), or equal rewards; choose X2 with buffers.promoted, and pass c1=None "
                "unless its rule is 'paper'"
            )
