"""The rules of the hard buffer (B_bad) and the high-quality buffer (B_high).

A buffer is a list of group summaries, oldest first. An entry's `step` is the step that the group
was rolled out for, after whose update it is inserted. No function changes its arguments: admissions
and evictions are returned, and the caller applies them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median
from typing import Literal

from bapo_core.thresholds import above, at_most, within
from bapo_core.types import GroupSummary

Dedup = Literal["prompt", "rollout"]
PromotionRule = Literal["paper", "improved_window", "any_gain"]


class EvictionReason(StrEnum):
    """The reason of an eviction from a buffer."""

    CAPACITY = "capacity"
    """The buffer was full, and the entry was its oldest (first in, first out)."""
    EXPIRED = "expired"
    """The entry is too old to be replayed at the next step."""
    REPLACED = "replaced"
    """A newer group with the same dedup key was admitted."""
    SOLVED = "solved"
    """Re-evaluation measured mu_new > c1, so the prompt is no longer hard."""
    SUPERVISED = "supervised"
    """A supervised update trained on the prompt's demonstration (ReLIFT)."""


Evicted = list[tuple[GroupSummary, EvictionReason]]
Window = tuple[float, float] | None
"""The replay window (c2, c3), or None where all mixed groups are stored (DOTS)."""


@dataclass(frozen=True, slots=True)
class BufferChange:
    """The admissions and evictions of a step; a group is in at most one of the two lists."""

    admitted: list[GroupSummary]
    evicted: Evicted

    def apply(self, entries: Sequence[GroupSummary]) -> list[GroupSummary]:
        """Returns the entries after the change, oldest first."""
        return [*_without(entries, self.evicted), *self.admitted]


def dedup_key(group: GroupSummary, dedup: Dedup) -> str | int:
    """Returns the key that duplicates share: a prompt's uid, or a group's id (authors' code)."""
    return group.prompt_uid if dedup == "prompt" else group.group_id


# ---- both buffers -------------------------------------------------------------------------------


def admit(
    entries: Sequence[GroupSummary],
    incoming: Sequence[GroupSummary],
    *,
    capacity: int,
    dedup: Dedup = "prompt",
) -> BufferChange:
    """Appends `incoming` to a buffer, replacing duplicates and evicting the oldest entries.

    Of incoming groups with the same dedup key, the last is admitted; of more groups than the
    capacity, the last ones are.
    """
    newest = {dedup_key(group, dedup): group for group in incoming}
    distinct = [group for group in incoming if newest[dedup_key(group, dedup)] is group]
    admitted = distinct[max(0, len(distinct) - capacity) :]
    # An incoming group supersedes its prompt's entry even if it exceeds the capacity itself.
    replaced = [entry for entry in entries if dedup_key(entry, dedup) in newest]
    kept = [entry for entry in entries if dedup_key(entry, dedup) not in newest]
    oldest = kept[: max(0, len(kept) + len(admitted) - capacity)]
    return BufferChange(
        admitted=admitted,
        evicted=[
            *((entry, EvictionReason.REPLACED) for entry in replaced),
            *((entry, EvictionReason.CAPACITY) for entry in oldest),
        ],
    )


def find_expired(entries: Sequence[GroupSummary], *, step: int, max_age: int | None) -> Evicted:
    """Returns the entries that, after the update of `step`, are too old for any later step.

    With `max_age` None, no entry is ever too old.
    """
    if max_age is None:
        return []
    return [(entry, EvictionReason.EXPIRED) for entry in entries if entry.step < step + 1 - max_age]


def eligible(
    entries: Sequence[GroupSummary], *, step: int, max_age: int | None
) -> list[GroupSummary]:
    """Returns the entries of the steps step - max_age to step - 1, or with None all before `step`.

    The upper bound is an invariant: a group is never replayed in the step it was rolled out for.
    """
    first = 1 if max_age is None else step - max_age
    return [entry for entry in entries if first <= entry.step <= step - 1]


# ---- the hard buffer, B_bad ---------------------------------------------------------------------


def admit_hard(
    entries: Sequence[GroupSummary],
    fresh: Sequence[GroupSummary],
    *,
    c1: float,
    capacity: int,
    dedup: Dedup = "prompt",
) -> BufferChange:
    """Inserts the step's unfiltered fresh groups with mu <= c1 into B_bad (FIFO)."""
    hard = [group for group in fresh if at_most(group.accuracy, c1)]
    return admit(entries, hard, capacity=capacity, dedup=dedup)


def choose_reevaluated(
    entries: Sequence[GroupSummary], *, limit: int, rng: random.Random
) -> list[GroupSummary]:
    """Draws at most `limit` entries of B_bad to re-evaluate, uniformly; returns the oldest first.

    A prompt is drawn at most once: of its entries (with dedup by rollout), only the newest counts.
    """
    newest = {entry.prompt_uid: entry for entry in entries}
    distinct = [entry for entry in entries if newest[entry.prompt_uid] is entry]
    chosen = rng.sample(range(len(distinct)), min(limit, len(distinct)))
    return [distinct[index] for index in sorted(chosen)]


def promoted(
    stored: GroupSummary, new: GroupSummary, *, rule: PromotionRule = "paper", c1: float
) -> bool:
    """Whether the re-evaluated group `new` of a hard prompt enters X2.

    `paper`: c1 < mu_new < 1 (Eq. 6). `improved_window`: mu_stored < mu_new < 1, so 0 -> 1/8 counts
    too. `any_gain`: mu_stored < mu_new, so mu_new = 1 counts too, with its zero advantages
    (authors' code).

    mu_new < 1 keeps out groups without advantages, and is read as: the rewards differ. Given
    mu_new > 0, it is the same for rewards of 1 and 0.
    """
    improved = above(new.accuracy, stored.accuracy)
    if rule == "any_gain":
        return improved
    if rule == "improved_window":
        return improved and new.mixed
    return above(new.accuracy, c1) and new.mixed


def evict_solved(
    entries: Sequence[GroupSummary],
    new_by_prompt: Mapping[str, GroupSummary],
    *,
    c1: float,
) -> Evicted:
    """Evicts the entries of B_bad whose re-evaluation has mu_new > c1, mu_new = 1 included.

    new_by_prompt: re-evaluated groups by prompt uid.
    """
    solved = {uid for uid, new in new_by_prompt.items() if above(new.accuracy, c1)}
    return [(entry, EvictionReason.SOLVED) for entry in entries if entry.prompt_uid in solved]


# ---- the high-quality buffer, B_high ------------------------------------------------------------


def is_replayable(group: GroupSummary, window: Window) -> bool:
    """Whether a group may be stored and replayed: c2 <= mu <= c3 (Eq. 7), or mixed if None."""
    return group.mixed if window is None else within(group.accuracy, *window)


def admit_high(
    entries: Sequence[GroupSummary],
    fresh: Sequence[GroupSummary],
    *,
    window: Window,
    capacity: int,
    max_age: int | None,
    step: int,
    dedup: Dedup = "prompt",
) -> BufferChange:
    """Inserts the step's unfiltered fresh groups with c2 <= mu <= c3 into B_high (FIFO).

    Entries that have become too old are evicted. window: the replay window of the step.
    Raises `ValueError` if a group of `fresh` is not of `step`.
    """
    for group in fresh:
        if group.step != step:
            raise ValueError(
                f"group {group.group_id} was produced by step {group.step}, but step {step} is "
                "being committed; pass only the groups of this step"
            )
    expired = find_expired(entries, step=step, max_age=max_age)
    medium = [group for group in fresh if is_replayable(group, window)]
    change = admit(_without(entries, expired), medium, capacity=capacity, dedup=dedup)
    return BufferChange(change.admitted, [*expired, *change.evicted])


def eligible_high(
    entries: Sequence[GroupSummary], *, step: int, window: Window, max_age: int | None
) -> list[GroupSummary]:
    """Returns the candidates for X3 at `step`: recent entries with c2 <= mu <= c3 (Eq. 7).

    Without a window, they are the recent entries that are mixed. The window is that of `step`: an
    entry admitted under an earlier window may be outside of it.
    """
    recent = eligible(entries, step=step, max_age=max_age)
    return [entry for entry in recent if is_replayable(entry, window)]


# ---- replay by the effective sample size --------------------------------------------------------


DECAY_STEPS = 10
"""Number of measured decays of the effective share of which the median counts. The share of one
step may be an outlier, because a single unlikely token can take most of it (0.13 where others are
0.95, in one of 60 steps of `examples/countdown.yaml`), and the decay changes with the learning
rate."""


def median_decay(measured: Sequence[float]) -> float | None:
    """Returns the median of the last measured decays of the effective share; None without any.

    measured: values of the metric `ESS_DECAY`, oldest first.
    """
    last = measured[-DECAY_STEPS:]
    return median(last) if last else None


def predict_ess_fraction(group: GroupSummary, *, step: int, decay: float | None) -> float:
    """Returns the effective share in [0, 1] that a group's tokens will have at `step`.

    It is exp(-decay a) for a policy that is a steps old. As long as no decay is measured, a policy
    that is one step old counts as the current one, so that there is something to measure, and an
    older one as too far away.
    """
    age = step - group.policy_version
    if decay is None:
        return float(age <= 1)
    return math.exp(-decay * age)


def find_effective(
    entries: Sequence[GroupSummary], *, step: int, decay: float | None, min_ess_fraction: float
) -> list[GroupSummary]:
    """Returns the entries whose predicted effective share at `step` is large enough."""
    return [
        entry
        for entry in entries
        if predict_ess_fraction(entry, step=step, decay=decay) >= min_ess_fraction
    ]


def _without(entries: Sequence[GroupSummary], evicted: Evicted) -> list[GroupSummary]:
    evicted_ids = {group.group_id for group, _ in evicted}
    return [entry for entry in entries if entry.group_id not in evicted_ids]
