"""A training batch is composed of X1, X2 and X3 by the rules, for any groups."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bapo_core.batch import build_batch
from bapo_core.buffers import Dedup, PromotionRule, eligible_high, promoted
from bapo_core.filters import range_filter
from bapo_core.thresholds import replay_window, running_reward
from bapo_core.types import GroupSummary, Source, TrainingBatch

WINDOW = (0.25, 0.5)


def group(i: int, correct: int, *, step: int = 20, uid: str | None = None) -> GroupSummary:
    uid = f"p{i}" if uid is None else uid
    return GroupSummary(group_id=i, prompt_uid=uid, step=step, correct=correct, size=8)


def uids(groups: Iterable[GroupSummary]) -> list[str]:
    return [g.prompt_uid for g in groups]


# ---- a worked example with G = 8, B = 6, t = 20, c1 = 1/8 ----

FRESH = [group(i, k, uid=f"p{i}") for i, k in enumerate([0, 1, 4, 8, 7, 8], start=1)]
HARD = [
    group(11 + i, k, uid=u) for i, (u, k) in enumerate([("a", 0), ("b", 0), ("c", 1), ("d", 0)])
]
REEVALUATED = [
    group(21 + i, k, uid=u) for i, (u, k) in enumerate([("a", 0), ("b", 3), ("c", 8), ("d", 1)])
]
HIGH = [
    group(31 + i, k, step=s, uid=u)
    for i, (u, s, k) in enumerate(
        [("e", 19, 3), ("f", 17, 3), ("g", 16, 3), ("h", 18, 2), ("i", 18, 5)]
    )
]


def make_example(
    high: Sequence[GroupSummary] = HIGH,
    *,
    c1: float = 1 / 8,
    rule: PromotionRule = "paper",
    window: tuple[float, float] | None = None,
) -> TrainingBatch:
    r_tot = running_reward("batch", FRESH, None, [])
    assert r_tot == pytest.approx(0.583333, abs=1e-6)
    window = window or replay_window(r_tot, (1 / 8, 4 / 8), (2 / 8, 5 / 8))
    stored = [old for old in HARD if old.accuracy <= c1]
    reevaluated = {new.prompt_uid: new for new in REEVALUATED}
    x2 = [
        reevaluated[old.prompt_uid]
        for old in stored
        if promoted(old, reevaluated[old.prompt_uid], rule=rule, c1=c1)
    ]
    return build_batch(
        range_filter(FRESH),
        x2,
        eligible_high(high, step=20, window=window, max_age=3),
        capacity=6,
        window=window,
        c1=c1 if rule == "paper" else None,
        rng=random.Random(0),
    )


def test_each_source_contributes_by_its_rule() -> None:
    batch = make_example()
    assert uids(batch.of(Source.FRESH)) == ["p2", "p3", "p5"]
    assert uids(batch.of(Source.REEVALUATED)) == ["b"]
    assert uids(batch.of(Source.REPLAYED)) == ["e", "f"]
    assert batch.counts == {Source.FRESH: 3, Source.REEVALUATED: 1, Source.REPLAYED: 2}
    assert batch.window == pytest.approx((0.34375, 0.46875))


def test_with_too_few_candidates_the_batch_is_smaller_not_padded() -> None:
    batch = make_example([entry for entry in HIGH if entry.prompt_uid != "f"])
    assert uids(member.group for member in batch.members) == ["p2", "p3", "p5", "b", "e"]


def test_the_rule_any_gain_promotes_every_group_that_improved() -> None:
    batch = make_example(rule="any_gain")
    assert uids(batch.of(Source.REEVALUATED)) == ["b", "c", "d"]
    assert batch.counts[Source.REPLAYED] == 0


def test_bapo_mini_promotes_any_success_and_replays_an_accuracy_of_one_half_alone() -> None:
    batch = make_example(c1=0.0, window=(0.5, 0.5))
    assert uids(batch.of(Source.REEVALUATED)) == ["b", "d"]
    assert batch.of(Source.REPLAYED) == []
    assert len(batch.members) == 5


# ---- any groups ----


def build(
    fresh: Sequence[GroupSummary] = (),
    reevaluated: Sequence[GroupSummary] = (),
    candidates: Sequence[GroupSummary] = (),
    **changed: Any,
) -> TrainingBatch:
    arguments: dict[str, Any] = dict(
        capacity=6, window=WINDOW, c1=1 / 8, rng=random.Random(0), dedup="prompt"
    )
    return build_batch(fresh, reevaluated, candidates, **{**arguments, **changed})


def test_without_groups_the_batch_is_empty() -> None:
    batch = build()
    assert batch.members == []
    assert batch.counts == dict.fromkeys(Source, 0)


def test_a_prompt_appears_once_in_the_first_source_that_has_it() -> None:
    batch = build(
        [group(1, 4, uid="a")],
        [group(2, 4, uid="a"), group(3, 4, uid="b")],
        [group(4, 4, uid="a"), group(5, 4, uid="b"), group(6, 4, uid="c")],
    )
    assert [(m.group.group_id, m.source) for m in batch.members] == [
        (1, Source.FRESH),
        (3, Source.REEVALUATED),
        (6, Source.REPLAYED),
    ]


def test_by_rollout_a_prompt_may_appear_in_every_source() -> None:
    same = [group(1, 4, uid="a")], [group(2, 4, uid="a")], [group(3, 4, uid="a")]
    assert len(build(*same, dedup="rollout").members) == 3


def test_every_candidate_can_be_replayed() -> None:
    candidates = [group(i, 4) for i in range(20)]
    rng = random.Random(0)
    batches = [build(candidates=candidates, capacity=2, rng=rng) for _ in range(100)]
    assert {m.group.group_id for batch in batches for m in batch.members} == set(range(20))


def test_a_candidate_outside_the_window_is_refused() -> None:
    with pytest.raises(ValueError, match="candidate group 7"):
        build(candidates=[group(7, 5)])


@pytest.mark.parametrize("correct", [0, 1, 8])
def test_a_reevaluated_group_that_eq6_excludes_is_refused(correct: int) -> None:
    with pytest.raises(ValueError, match="re-evaluated group 7"):
        build(reevaluated=[group(7, correct)])
    assert len(build(reevaluated=[group(7, correct)], c1=None).members) == 1


@st.composite
def sources(draw: st.DrawFn) -> list[list[GroupSummary]]:
    """Draws X1, X2 and X3 over few prompts, so that they overlap; group ids are all different."""
    sizes = [draw(st.integers(0, 8)) for _ in range(3)]
    names = iter(range(sum(sizes)))
    return [
        [
            group(next(names), draw(st.integers(2, 4)), uid=draw(st.sampled_from("abcdefghij")))
            for _ in range(size)
        ]
        for size in sizes
    ]


@given(sources(), st.integers(1, 12), st.sampled_from(["prompt", "rollout"]), st.integers(0, 2**32))
def test_a_batch_is_full_distinct_and_ordered_by_source(
    groups_by_source: list[list[GroupSummary]], capacity: int, dedup: Dedup, seed: int
) -> None:
    def compose() -> TrainingBatch:
        return build_batch(
            *groups_by_source,
            capacity=capacity,
            window=WINDOW,
            c1=1 / 8,
            rng=random.Random(seed),
            dedup=dedup,
        )

    batch = compose()
    keys = [m.group.prompt_uid if dedup == "prompt" else m.group.group_id for m in batch.members]
    available = {
        g.prompt_uid if dedup == "prompt" else g.group_id for part in groups_by_source for g in part
    }
    # No group appears twice, and the batch is full whenever there are enough groups to fill it.
    assert len(keys) == len(set(keys)) == min(capacity, len(available))
    # The sources come in the order X1, X2, X3, and the groups of each in the order given.
    order = list(Source)
    assert [order.index(m.source) for m in batch.members] == sorted(
        order.index(m.source) for m in batch.members
    )
    for source, part in zip(Source, groups_by_source, strict=True):
        taken = batch.of(source)
        assert len(taken) == batch.counts[source]
        positions = [part.index(g) for g in taken]
        assert positions == sorted(positions)
    # An earlier source is exhausted before a later one is used.
    if batch.counts[Source.REPLAYED]:
        members = set(keys)
        for g in (*groups_by_source[0], *groups_by_source[1]):
            assert (g.prompt_uid if dedup == "prompt" else g.group_id) in members
    assert batch == compose()
