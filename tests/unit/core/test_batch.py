"""A training batch is composed of X1, X2 and X3 by the rules, for any groups."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bapo_core.batch import build_batch
from bapo_core.buffers import eligible_high, promoted
from bapo_core.filters import range_filter
from bapo_core.thresholds import replay_window, running_reward
from bapo_core.types import GroupSummary, Source

WINDOW = (0.25, 0.5)


def group(i, correct, *, step=20, uid=None):
    uid = f"p{i}" if uid is None else uid
    return GroupSummary(group_id=i, prompt_uid=uid, step=step, correct=correct, size=8)


def uids(groups):
    return [g.prompt_uid for g in groups]


# ---- the rules with G = 8, B = 6, t = 20, c1 = 1/8 ----

FRESH = [group(i, k, uid=f"p{i}") for i, k in enumerate([0, 1, 4, 8, 7, 8], start=1)]
HARD = [
    group(11 + i, k, uid=u) for i, (u, k) in enumerate([("a", 0), ("b", 0), ("c", 1), ("d", 0)])
]
AGAIN = [
    group(21 + i, k, uid=u) for i, (u, k) in enumerate([("a", 0), ("b", 3), ("c", 8), ("d", 1)])
]
HIGH = [
    group(31 + i, k, step=s, uid=u)
    for i, (u, s, k) in enumerate(
        [("e", 19, 3), ("f", 17, 3), ("g", 16, 3), ("h", 18, 2), ("i", 18, 5)]
    )
]


def make_example(high=HIGH, *, c1=1 / 8, rule="paper", window=None):
    r_tot = running_reward("batch", FRESH, None, [])
    assert r_tot == pytest.approx(0.583333, abs=1e-6)
    window = window or replay_window(r_tot, (1 / 8, 4 / 8), (2 / 8, 5 / 8))
    stored = [old for old in HARD if old.accuracy <= c1]
    again = {new.prompt_uid: new for new in AGAIN}
    x2 = [
        again[old.prompt_uid]
        for old in stored
        if promoted(old, again[old.prompt_uid], rule=rule, c1=c1)
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


def test_each_source_contributes_by_its_rule():
    batch = make_example()
    assert uids(batch.of(Source.FRESH)) == ["p2", "p3", "p5"]
    assert uids(batch.of(Source.REEVALUATED)) == ["b"]
    assert uids(batch.of(Source.REPLAYED)) == ["e", "f"]
    assert batch.counts == {Source.FRESH: 3, Source.REEVALUATED: 1, Source.REPLAYED: 2}
    assert batch.window == pytest.approx((0.34375, 0.46875))


def test_with_too_few_candidates_the_batch_is_smaller_not_padded():
    batch = make_example([entry for entry in HIGH if entry.prompt_uid != "f"])
    assert uids(member.group for member in batch.members) == ["p2", "p3", "p5", "b", "e"]


def test_any_gain_takes_groups_that_improved():
    batch = make_example(rule="any_gain")
    assert uids(batch.of(Source.REEVALUATED)) == ["b", "c", "d"]
    assert batch.counts[Source.REPLAYED] == 0


def test_bapo_mini():
    batch = make_example(c1=0.0, window=(0.5, 0.5))
    assert uids(batch.of(Source.REEVALUATED)) == ["b", "d"]
    assert batch.of(Source.REPLAYED) == []
    assert len(batch.members) == 5


# ---- rules ----


def build(fresh=(), reevaluated=(), candidates=(), **changed):
    arguments = dict(capacity=6, window=WINDOW, c1=1 / 8, rng=random.Random(0), dedup="prompt")
    return build_batch(fresh, reevaluated, candidates, **{**arguments, **changed})


def test_nothing_to_train_is_an_empty_batch():
    batch = build()
    assert batch.members == []
    assert batch.counts == dict.fromkeys(Source, 0)


def test_a_prompt_appears_once_in_the_first_source_that_has_it():
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


def test_by_rollout_a_prompt_may_appear_in_every_source():
    same = [group(1, 4, uid="a")], [group(2, 4, uid="a")], [group(3, 4, uid="a")]
    assert len(build(*same, dedup="rollout").members) == 3


def test_every_candidate_can_be_replayed():
    candidates = [group(i, 4) for i in range(20)]
    rng = random.Random(0)
    batches = [build(candidates=candidates, capacity=2, rng=rng) for _ in range(100)]
    assert {m.group.group_id for batch in batches for m in batch.members} == set(range(20))


def test_a_candidate_outside_the_window_is_refused():
    with pytest.raises(ValueError, match="candidate group 7"):
        build(candidates=[group(7, 5)])


@pytest.mark.parametrize("correct", [0, 1, 8])
def test_a_reevaluated_group_that_eq6_excludes_is_refused(correct):
    with pytest.raises(ValueError, match="re-evaluated group 7"):
        build(reevaluated=[group(7, correct)])
    assert len(build(reevaluated=[group(7, correct)], c1=None).members) == 1


@st.composite
def sources(draw):
    """X1, X2 and X3 over few prompts, so that they overlap; group ids are all different."""
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
def test_composition(parts, capacity, dedup, seed):
    def run():
        return build_batch(
            *parts,
            capacity=capacity,
            window=WINDOW,
            c1=1 / 8,
            rng=random.Random(seed),
            dedup=dedup,
        )

    batch = run()
    keys = [m.group.prompt_uid if dedup == "prompt" else m.group.group_id for m in batch.members]
    available = {g.prompt_uid if dedup == "prompt" else g.group_id for part in parts for g in part}
    # Never over capacity, never twice the same, and full whenever there is enough to fill it.
    assert len(keys) == len(set(keys)) == min(capacity, len(available))
    # X1, X2, X3 in that order, each from its own source, in the order given.
    order = list(Source)
    assert [order.index(m.source) for m in batch.members] == sorted(
        order.index(m.source) for m in batch.members
    )
    for source, part in zip(Source, parts, strict=True):
        taken = batch.of(source)
        assert len(taken) == batch.counts[source]
        positions = [part.index(g) for g in taken]
        assert positions == sorted(positions)
    # An earlier source is exhausted before a later one is used.
    if batch.counts[Source.REPLAYED]:
        members = set(keys)
        for g in (*parts[0], *parts[1]):
            assert (g.prompt_uid if dedup == "prompt" else g.group_id) in members
    assert batch == run()
