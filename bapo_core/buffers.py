"""The rules of the hard buffer (B_bad) and the high-quality buffer (B_high).

A buffer is a list of group summaries, oldest first. An entry's `step` is the step that produced
the group, which is also the step after whose update it was inserted. Nothing here changes its
arguments: admissions and evictions are returned, and the caller writes the difference.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from bapo_core.thresholds import above, at_most, within
from bapo_core.types import GroupSummary

Dedup = Literal["prompt", "rollout"]
PromotionRule = Literal["paper", "improved_window", "any_gain"]


class EvictionReason(StrEnum):
    """Why an entry left its buffer."""

    CAPACITY = "capacity"
    """First in, first out."""
    EXPIRED = "expired"
    """Too old to be replayed at the next step."""
    REPLACED = "replaced"
    """A newer group of the same prompt came in."""
    SOLVED = "solved"
    """Re-evaluation found mu_new > c1: the prompt is no longer hard."""


Evicted = list[tuple[GroupSummary, EvictionReason]]


@dataclass(frozen=True, slots=True)
class BufferChange:
    """What a step does to a buffer. A group comes in at most once, so none is in both lists."""

    admitted: list[GroupSummary]
    evicted: Evicted

    def apply(self, entries: Sequence[GroupSummary]) -> list[GroupSummary]:
        """The buffer after the change, oldest first."""
        return [*_without(entries, self.evicted), *self.admitted]


def identity(group: GroupSummary, dedup: Dedup) -> str | int:
    """What makes two groups the same: the dataset's prompt, or the rollout (authors' code)."""
    return group.prompt_uid if dedup == "prompt" else group.group_id


# ---- both buffers -------------------------------------------------------------------------------


def admit(
    entries: Sequence[GroupSummary],
    incoming: Sequence[GroupSummary],
    *,
    capacity: int,
    dedup: Dedup = "prompt",
) -> BufferChange:
    """Appends `incoming`: the newest of a kind replaces older ones, the oldest make room.

    Of incoming groups that are the same under `dedup`, the last is admitted; if more come in than
    fit, the last `capacity` are.
    """
    newest = {identity(group, dedup): group for group in incoming}
    distinct = [group for group in incoming if newest[identity(group, dedup)] is group]
    admitted = distinct[max(0, len(distinct) - capacity) :]
    # Everything that came in is newer knowledge of its prompt, even what did not fit itself.
    replaced = [entry for entry in entries if identity(entry, dedup) in newest]
    kept = [entry for entry in entries if identity(entry, dedup) not in newest]
    crowded_out = kept[: max(0, len(kept) + len(admitted) - capacity)]
    return BufferChange(
        admitted=admitted,
        evicted=[
            *((entry, EvictionReason.REPLACED) for entry in replaced),
            *((entry, EvictionReason.CAPACITY) for entry in crowded_out),
        ],
    )


def evict(entries: Sequence[GroupSummary], *, step: int, max_age: int) -> Evicted:
    """After the update of `step`: the entries that cannot be eligible at step + 1 or later."""
    return [(entry, EvictionReason.EXPIRED) for entry in entries if entry.step < step + 1 - max_age]


def eligible(entries: Sequence[GroupSummary], *, step: int, max_age: int) -> list[GroupSummary]:
    """Entries recent enough for `step`: step - max_age <= produced <= step - 1.

    The upper end is an invariant: a group is never replayed in the step that made it.
    """
    return [entry for entry in entries if step - max_age <= entry.step <= step - 1]


# ---- the hard buffer, B_bad ---------------------------------------------------------------------


def admit_hard(
    entries: Sequence[GroupSummary],
    fresh: Sequence[GroupSummary],
    *,
    c1: float,
    capacity: int,
    dedup: Dedup = "prompt",
) -> BufferChange:
    """Inserts this step's unfiltered fresh groups with mu <= c1 into B_bad (FIFO)."""
    hard = [group for group in fresh if at_most(group.mean_reward, c1)]
    return admit(entries, hard, capacity=capacity, dedup=dedup)


def choose_reevaluated(
    entries: Sequence[GroupSummary], *, limit: int, rng: random.Random
) -> list[GroupSummary]:
    """At most `limit` hard entries to generate again, drawn uniformly, oldest first.

    A prompt is generated once: where a prompt has several entries (dedup by rollout), its newest
    stands for it.
    """
    newest = {entry.prompt_uid: entry for entry in entries}
    distinct = [entry for entry in entries if newest[entry.prompt_uid] is entry]
    chosen = rng.sample(range(len(distinct)), min(limit, len(distinct)))
    return [distinct[index] for index in sorted(chosen)]


def promoted(
    stored: GroupSummary, new: GroupSummary, *, rule: PromotionRule = "paper", c1: float
) -> bool:
    """Whether a re-evaluated hard prompt enters X2.

    `paper`: c1 < mu_new < 1 (Eq. 6). `improved_window`: mu_stored < mu_new < 1, so 0 -> 1/8 counts
    too. `any_gain`: mu_stored < mu_new, so mu_new = 1 counts too, with its zero advantages
    (authors' code).
    """
    improved = above(new.mean_reward, stored.mean_reward)
    if rule == "any_gain":
        return improved
    if rule == "improved_window":
        return improved and new.correct < new.size
    return above(new.mean_reward, c1) and new.correct < new.size


def evict_solved(
    entries: Sequence[GroupSummary],
    new_by_prompt: Mapping[str, GroupSummary],
    *,
    after: Literal["drop_solved", "keep"] = "drop_solved",
    c1: float,
) -> Evicted:
    """The hard entries that leave after re-evaluation: those with mu_new > c1, 1 included.

    `keep` evicts none: a prompt is then re-evaluated until it is crowded out (authors' code).
    """
    if after == "keep":
        return []
    solved = {uid for uid, new in new_by_prompt.items() if above(new.mean_reward, c1)}
    return [(entry, EvictionReason.SOLVED) for entry in entries if entry.prompt_uid in solved]


# ---- the high-quality buffer, B_high ------------------------------------------------------------


def admit_high(
    entries: Sequence[GroupSummary],
    fresh: Sequence[GroupSummary],
    *,
    window: tuple[float, float],
    capacity: int,
    max_age: int,
    step: int,
    dedup: Dedup = "prompt",
) -> BufferChange:
    """After the update of `step`: expires old entries, inserts groups with c2 <= mu <= c3 (FIFO).

    Raises `ValueError` if a group of `fresh` was not produced by `step`.
    """
    for group in fresh:
        if group.step != step:
            raise ValueError(
                f"group {group.group_id} was produced by step {group.step}, but step {step} is "
                "being stored; pass only the groups of this step"
            )
    expired = evict(entries, step=step, max_age=max_age)
    medium = [group for group in fresh if within(group.mean_reward, *window)]
    change = admit(_without(entries, expired), medium, capacity=capacity, dedup=dedup)
    return BufferChange(change.admitted, [*expired, *change.evicted])


def eligible_high(
    entries: Sequence[GroupSummary], *, step: int, window: tuple[float, float], max_age: int
) -> list[GroupSummary]:
    """The candidates for X3 at `step`: recent, and c2 <= mu <= c3 by their own mean (Eq. 7).

    The window is this step's: an entry stored under an earlier window may no longer fit.
    """
    recent = eligible(entries, step=step, max_age=max_age)
    return [entry for entry in recent if within(entry.mean_reward, *window)]


def _without(entries: Sequence[GroupSummary], evicted: Evicted) -> list[GroupSummary]:
    gone = {group.group_id for group, _ in evicted}
    return [entry for entry in entries if entry.group_id not in gone]
