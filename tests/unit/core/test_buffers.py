"""The buffers admit, evict and select groups by the rules, for any history."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bapo_core.buffers import (
    Dedup,
    EvictionReason,
    PromotionRule,
    admit,
    admit_hard,
    admit_high,
    choose_reevaluated,
    eligible,
    eligible_high,
    evict_solved,
    find_effective,
    find_expired,
    median_decay,
    predict_ess_fraction,
    promoted,
)
from bapo_core.thresholds import within
from bapo_core.types import GroupSummary

WINDOW = (0.25, 0.5)


def group(
    i: int, correct: int = 0, *, step: int = 1, uid: str | None = None, size: int = 8
) -> GroupSummary:
    uid = f"p{i}" if uid is None else uid
    return GroupSummary(group_id=i, prompt_uid=uid, step=step, correct=correct, size=size)


def ids(groups: Iterable[GroupSummary]) -> list[int]:
    return [g.group_id for g in groups]


def reasons(evicted: Iterable[tuple[GroupSummary, EvictionReason]]) -> dict[int, EvictionReason]:
    return {g.group_id: reason for g, reason in evicted}


@st.composite
def histories(draw: st.DrawFn) -> list[list[GroupSummary]]:
    """Draws the fresh groups of each step, of few prompts, so that prompts come back."""
    count = 0
    steps = []
    for step in range(1, draw(st.integers(1, 8)) + 1):
        fresh = []
        for uid in draw(st.lists(st.sampled_from("abcdefgh"), max_size=6, unique=True)):
            count += 1
            fresh.append(group(count, draw(st.integers(0, 8)), step=step, uid=uid))
        steps.append(fresh)
    return steps


# ---- both buffers ----


def test_a_full_buffer_evicts_its_oldest_group() -> None:
    change = admit([group(1), group(2)], [group(3)], capacity=2)
    assert reasons(change.evicted) == {1: EvictionReason.CAPACITY}
    assert ids(change.apply([group(1), group(2)])) == [2, 3]


def test_the_newest_group_of_a_prompt_replaces_the_older() -> None:
    change = admit([group(1, uid="a"), group(2, uid="b")], [group(3, uid="a")], capacity=2)
    assert reasons(change.evicted) == {1: EvictionReason.REPLACED}
    assert ids(change.apply([group(1, uid="a"), group(2, uid="b")])) == [2, 3]


def test_by_rollout_a_prompt_may_have_several_entries() -> None:
    change = admit([group(1, uid="a")], [group(2, uid="a")], capacity=2, dedup="rollout")
    assert ids(change.admitted) == [2]
    assert change.evicted == []


def test_of_more_groups_than_fit_the_last_are_admitted() -> None:
    change = admit([group(1)], [group(2), group(3), group(4)], capacity=2)
    assert ids(change.admitted) == [3, 4]
    assert reasons(change.evicted) == {1: EvictionReason.CAPACITY}


@given(histories(), st.integers(1, 10), st.sampled_from(["prompt", "rollout"]))
def test_admission_keeps_the_newest_within_capacity(
    history: list[list[GroupSummary]], capacity: int, dedup: Dedup
) -> None:
    entries: list[GroupSummary] = []
    for fresh in history:
        change = admit(entries, fresh, capacity=capacity, dedup=dedup)
        after = change.apply(entries)
        # The change reports every group that enters or leaves the buffer.
        assert sorted(ids(after) + ids(g for g, _ in change.evicted)) == sorted(
            ids(entries) + ids(change.admitted)
        )
        assert len(after) <= capacity
        assert ids(after) == sorted(ids(after))  # oldest first
        entries = after
    seen = [g for fresh in history for g in fresh]
    if dedup == "prompt":
        seen = sorted({g.prompt_uid: g for g in seen}.values(), key=lambda g: g.group_id)
        assert len({g.prompt_uid for g in entries}) == len(entries)
    assert set(ids(entries)) <= set(ids(seen))
    if dedup == "rollout":
        assert ids(entries) == ids(seen)[-capacity:]


def test_of_two_incoming_groups_of_a_prompt_the_last_is_admitted() -> None:
    incoming = [group(1, uid="a"), group(2, uid="b"), group(3, uid="a")]
    assert ids(admit([], incoming, capacity=5).admitted) == [2, 3]
    assert ids(admit([], incoming, capacity=5, dedup="rollout").admitted) == [1, 2, 3]


def test_only_groups_of_the_last_steps_are_eligible_and_never_those_of_the_step_itself() -> None:
    entries = [group(step, step=step) for step in range(1, 8)]
    assert ids(eligible(entries, step=6, max_age=3)) == [3, 4, 5]


def test_without_a_limit_of_age_all_groups_of_earlier_steps_are_eligible() -> None:
    entries = [group(step, step=step) for step in range(1, 8)]
    assert ids(eligible(entries, step=6, max_age=None)) == [1, 2, 3, 4, 5]
    assert find_expired(entries, step=6, max_age=None) == []


@given(st.integers(1, 30), st.integers(1, 5), st.lists(st.integers(0, 40)))
def test_a_group_expires_when_it_can_never_be_eligible_again(
    step: int, max_age: int, steps: list[int]
) -> None:
    entries = [group(i, step=min(s, step)) for i, s in enumerate(steps)]
    expired = ids(g for g, _ in find_expired(entries, step=step, max_age=max_age))
    later = {
        i
        for future in range(step + 1, step + 1 + max_age)
        for i in ids(eligible(entries, step=future, max_age=max_age))
    }
    assert set(expired) == set(ids(entries)) - later


# ---- the hard buffer ----


def test_groups_of_an_accuracy_up_to_c1_enter_the_hard_buffer() -> None:
    fresh = [group(i, k) for i, k in enumerate([0, 1, 4, 8, 7, 8], start=1)]
    assert ids(admit_hard([], fresh, c1=1 / 8, capacity=6).admitted) == [1, 2]


# Each entry of the hard buffer is (correct of 8 before, correct of 8 after the re-evaluation).
HARD_ENTRIES = {"a": (0, 0), "b": (0, 3), "c": (1, 8), "d": (0, 1)}


@pytest.mark.parametrize(
    ("rule", "c1", "expected"),
    [
        ("paper", 1 / 8, {"b"}),
        ("improved_window", 1 / 8, {"b", "d"}),
        ("any_gain", 1 / 8, {"b", "c", "d"}),
        ("paper", 0.0, {"b", "d"}),  # BAPO-mini
    ],
)
def test_each_rule_promotes_its_groups(rule: PromotionRule, c1: float, expected: set[str]) -> None:
    promoted_uids = {
        uid
        for uid, (old, new) in HARD_ENTRIES.items()
        if promoted(group(1, old), group(2, new), rule=rule, c1=c1)
    }
    assert promoted_uids == expected


def test_solved_prompts_leave_the_hard_buffer() -> None:
    stored = [group(i, old, uid=uid) for i, (uid, (old, _)) in enumerate(HARD_ENTRIES.items())]
    new = {uid: group(10, k, uid=uid) for uid, (_, k) in HARD_ENTRIES.items()}
    left = evict_solved(stored, new, c1=1 / 8)
    assert {g.prompt_uid for g, _ in left} == {"b", "c"}
    assert {reason for _, reason in left} == {EvictionReason.SOLVED}


def test_prompts_not_reevaluated_stay() -> None:
    assert evict_solved([group(1, uid="a")], {"b": group(2, 8, uid="b")}, c1=1 / 8) == []


@given(st.lists(st.sampled_from("abcdef")), st.integers(1, 10), st.integers(0, 2**32))
def test_reevaluated_prompts_are_within_the_limit_distinct_and_in_order(
    uids: list[str], limit: int, seed: int
) -> None:
    entries = [group(i, uid=uid) for i, uid in enumerate(uids)]
    chosen = choose_reevaluated(entries, limit=limit, rng=random.Random(seed))
    assert len(chosen) == min(limit, len(set(uids)))
    assert len({g.prompt_uid for g in chosen}) == len(chosen)
    assert ids(chosen) == sorted(ids(chosen))
    newest = {uid: i for i, uid in enumerate(uids)}
    assert all(newest[g.prompt_uid] == g.group_id for g in chosen)
    assert chosen == choose_reevaluated(entries, limit=limit, rng=random.Random(seed))


def test_every_hard_prompt_can_be_reevaluated() -> None:
    entries = [group(i) for i in range(20)]
    rng = random.Random(0)
    drawn = {i for _ in range(50) for i in ids(choose_reevaluated(entries, limit=3, rng=rng))}
    assert drawn == set(range(20))


# ---- the high-quality buffer ----

# Each entry of the high-quality buffer is (step, correct of 8).
HIGH_QUALITY_ENTRIES = {"e": (19, 3), "f": (17, 3), "g": (16, 3), "h": (18, 2), "i": (18, 5)}


def test_candidates_are_within_age_and_window() -> None:
    entries = [
        group(i, k, step=s, uid=u) for i, (u, (s, k)) in enumerate(HIGH_QUALITY_ENTRIES.items())
    ]
    candidates = eligible_high(entries, step=20, window=(0.34375, 0.46875), max_age=3)
    assert [g.prompt_uid for g in candidates] == ["e", "f"]


def test_groups_outside_the_window_do_not_enter_the_high_quality_buffer() -> None:
    fresh = [group(i, k, step=20) for i, k in enumerate([0, 1, 4, 8, 7, 8])]
    change = admit_high([], fresh, window=(0.34375, 0.46875), capacity=8, max_age=3, step=20)
    assert change.admitted == []


def test_old_entries_expire_in_a_step_without_fresh_groups() -> None:
    change = admit_high(
        [group(1, 3, step=3), group(2, 3, step=4)],
        [],
        window=WINDOW,
        capacity=8,
        max_age=3,
        step=6,
    )
    assert reasons(change.evicted) == {1: EvictionReason.EXPIRED}


def test_groups_of_another_step_are_refused() -> None:
    with pytest.raises(ValueError, match="group 7 was produced by step 4"):
        admit_high([], [group(7, 3, step=4)], window=WINDOW, capacity=8, max_age=3, step=5)


@given(histories(), st.integers(1, 8), st.integers(1, 4), st.sampled_from(["prompt", "rollout"]))
def test_replay_is_recent_of_medium_difficulty_and_never_of_its_own_step(
    history: list[list[GroupSummary]], capacity: int, max_age: int, dedup: Dedup
) -> None:
    entries: list[GroupSummary] = []
    for step, fresh in enumerate(history, start=1):
        candidates = eligible_high(entries, step=step, window=WINDOW, max_age=max_age)
        assert all(step - max_age <= g.step < step for g in candidates)
        # The window moves, so it alone may exclude an entry that the buffer keeps.
        assert candidates == [g for g in entries if within(g.accuracy, *WINDOW)]
        change = admit_high(
            entries,
            fresh,
            window=WINDOW,
            capacity=capacity,
            max_age=max_age,
            step=step,
            dedup=dedup,
        )
        assert set(ids(change.admitted)) <= {
            g.group_id for g in fresh if within(g.accuracy, *WINDOW)
        }
        entries = change.apply(entries)
        assert len(entries) <= capacity


# ---- replay by the effective sample size --------------------------------------------------------


def of_version(version: int) -> GroupSummary:
    return GroupSummary(version, f"p{version}", 50, 4, 8, policy_version=version)


def test_the_decay_is_the_median_of_the_last_ten() -> None:
    assert median_decay([]) is None
    assert median_decay([0.25]) == 0.25
    # The first one is left out; of ten values, the middle two count.
    assert median_decay([9.0, *[0.1] * 5, *[0.3] * 5]) == pytest.approx(0.2)


def test_the_effective_share_falls_with_the_age_of_the_policy() -> None:
    assert predict_ess_fraction(of_version(60), step=60, decay=0.5) == 1.0
    assert predict_ess_fraction(of_version(57), step=60, decay=0.5) == pytest.approx(0.22313016)
    assert predict_ess_fraction(of_version(1), step=60, decay=0.0) == 1.0


def test_before_a_decay_is_measured_only_the_policy_before_is_near() -> None:
    entries = [of_version(version) for version in (58, 59, 60)]
    found = find_effective(entries, step=60, decay=None, min_ess_fraction=0.999)
    assert ids(found) == [59, 60]


@given(
    versions=st.lists(st.integers(1, 60), unique=True),
    decay=st.floats(0.0, 2.0),
    limit=st.floats(0.01, 0.99),
)
def test_entries_up_to_an_age_are_near(versions: list[int], decay: float, limit: float) -> None:
    """The rule is a limit of age that follows the measured decay."""
    entries = [of_version(version) for version in sorted(versions)]
    found = find_effective(entries, step=60, decay=decay, min_ess_fraction=limit)
    assert found == entries[len(entries) - len(found) :]
    assert all(math.exp(-decay * (60 - entry.policy_version)) >= limit for entry in found)
    faster = find_effective(entries, step=60, decay=2 * decay, min_ess_fraction=limit)
    assert len(faster) <= len(found)
