"""Response replay chooses responses and adds them to a batch as its methods' papers define."""

from __future__ import annotations

import random
from itertools import combinations
from statistics import pvariance

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bapo_core.config.batches import ResponseReplayConfig
from bapo_core.response_replay import (
    StoredResponse,
    add_responses,
    becomes_mixed,
    choose_responses,
    receives_responses,
)
from bapo_core.types import BatchMember, GroupSummary, Source, TrainingBatch


def cache_of(rewards: list[float], *, size: int = 4) -> list[StoredResponse]:
    """Returns cached responses, oldest first, in groups of `size`; rewards of 1 are correct."""
    groups = [
        GroupSummary(100 + number, "p", number + 1, 0, size)
        for number in range(-(-len(rewards) // size))
    ]
    return [
        StoredResponse(groups[n // size], n % size, reward, reward == 1.0, -((7 * n) % 11) / 10)
        for n, reward in enumerate(rewards)
    ]


def settings(**options: object) -> ResponseReplayConfig:
    return ResponseReplayConfig.model_validate({"min_candidates": 1, **options})


def chosen(cache: list[StoredResponse], /, **options: object) -> list[StoredResponse]:
    return choose_responses(cache, settings(**options), random.Random(1))


def test_the_strategy_recent_takes_the_last_responses_of_the_cache() -> None:
    cache = cache_of([0, 1, 0, 1, 1, 0])
    assert chosen(cache, strategy="recent", count=2) == cache[-2:]
    assert chosen(cache, strategy="all", count=1) == cache
    assert chosen(cache, strategy="all", candidates=4) == cache[-4:]


def test_the_strategy_random_draws_distinct_responses_by_its_generator() -> None:
    cache = cache_of([0.0] * 16)
    draws = {
        tuple(
            response.group.group_id * 10 + response.row
            for response in choose_responses(
                cache, settings(strategy="random", count=3), random.Random(seed)
            )
        )
        for seed in range(20)
    }
    assert len(draws) > 10
    assert all(len(set(draw)) == 3 and list(draw) == sorted(draw) for draw in draws)


def test_the_strategy_highest_reward_prefers_the_newer_of_equal_rewards() -> None:
    cache = cache_of([1, 0.5, 0, 1, 1, 0])
    assert chosen(cache, strategy="highest_reward", count=2) == [cache[3], cache[4]]
    assert chosen(cache, strategy="highest_reward", count=4) == [cache[n] for n in (0, 1, 3, 4)]


def test_the_strategy_most_likely_takes_the_highest_mean_logprobs() -> None:
    cache = cache_of([1.0] * 8)
    best = sorted(cache, key=lambda response: response.mean_logprob)[-3:]
    assert {r.row for r in chosen(cache, strategy="most_likely", count=3)} == {r.row for r in best}


@given(
    st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, -1.0]), min_size=1, max_size=9),
    st.integers(1, 9),
)
def test_the_strategy_max_variance_takes_the_best_of_all_subsets(
    rewards: list[float], count: int
) -> None:
    """RePO compares all C(n, k) subsets, and takes the larger sum among equal variances."""
    count = min(count, len(rewards))
    options = {"strategy": "max_variance", "count": count, "advantages": "mixed"}
    rewards_chosen = [r.reward for r in chosen(cache_of(rewards), **options)]
    best = max((pvariance(subset), sum(subset)) for subset in combinations(rewards, count))
    assert (pvariance(rewards_chosen), sum(rewards_chosen)) == pytest.approx(best)


def test_the_strategy_max_variance_takes_the_newer_of_equal_rewards() -> None:
    cache = cache_of([0, 1, 0, 0, 1, 0.5])
    assert chosen(cache, strategy="max_variance", count=2) == [cache[3], cache[4]]
    assert chosen(cache, strategy="max_variance", count=3) == [cache[n] for n in (1, 3, 4)]
    same = cache_of([0.0] * 6)
    assert chosen(same, strategy="max_variance", count=4) == same[-4:]


def test_nothing_is_replayed_from_too_small_a_cache() -> None:
    cache = cache_of([1, 0, 1, 0])
    assert chosen(cache, min_candidates=5, candidates=16) == []
    assert len(chosen(cache, min_candidates=4, candidates=16)) == 4
    assert chosen(cache, only_correct=True, advantages="mixed", min_candidates=3) == []
    correct = chosen(cache, only_correct=True, advantages="mixed")
    assert correct == [cache[0], cache[2]]
    newest = chosen(cache, only_correct=True, advantages="mixed", candidates=1)
    assert newest == [cache[2]], "the cache holds correct responses alone"


def test_the_setting_groups_decides_which_groups_get_replayed_responses() -> None:
    unsolved, mixed = GroupSummary(1, "p", 3, 0, 4), GroupSummary(2, "q", 3, 1, 4)

    def receives(group: GroupSummary, groups: str, *, revisited: bool = False) -> bool:
        return receives_responses(group, settings(groups=groups), revisited=revisited)

    assert receives(unsolved, "all")
    assert receives(mixed, "all")
    assert receives(unsolved, "unsolved")
    assert not receives(mixed, "unsolved")
    assert receives(mixed, "revisited", revisited=True)
    assert not receives(mixed, "revisited")


def batch_of(*fresh: GroupSummary) -> TrainingBatch:
    other = BatchMember(GroupSummary(9, "r", 1, 2, 4), Source.REPLAYED)
    members = [*(BatchMember(group, Source.FRESH) for group in fresh), other]
    return TrainingBatch(members, 4, (0.25, 0.5), {Source.FRESH: len(fresh), Source.REPLAYED: 1})


def layout(batch: TrainingBatch) -> list[tuple[int, tuple[int, ...] | None, bool]]:
    return [(m.group.group_id, m.rows, m.joins_previous) for m in batch.members]


def test_split_responses_are_a_group_of_their_own_behind_the_fresh_one() -> None:
    cache = cache_of([1, 0, 1, 0, 1])
    batch = add_responses(
        batch_of(GroupSummary(1, "p", 3, 0, 4), GroupSummary(2, "q", 3, 1, 4)),
        {1: [cache[1], cache[2], cache[4]]},
        settings(),
    )
    assert layout(batch) == [
        (1, None, False),
        (100, (1, 2), False),
        (101, (0,), True),
        (2, None, False),
        (9, None, False),
    ]
    assert batch.replayed_responses == 3
    assert batch.counts == {Source.FRESH: 2, Source.REPLAYED: 1}


def test_mixed_responses_join_the_fresh_group_and_may_replace_some_of_it() -> None:
    cache = cache_of([1, 0, 1, 0])
    fresh = GroupSummary(1, "p", 3, 0, 4)
    mixed = add_responses(batch_of(fresh), {1: [cache[2]]}, settings(advantages="mixed"))
    assert layout(mixed)[:2] == [(1, None, False), (100, (2,), True)]
    replaced = add_responses(
        batch_of(fresh), {1: [cache[2]]}, settings(advantages="mixed", replace=True)
    )
    assert layout(replaced)[:2] == [(1, (1, 2, 3), False), (100, (2,), True)]


def test_a_success_makes_an_unsolved_group_mixed() -> None:
    success, failure = cache_of([1, 0])
    unsolved, solved = GroupSummary(1, "p", 3, 0, 4), GroupSummary(2, "q", 3, 4, 4)
    assert becomes_mixed(unsolved, [success])
    assert not becomes_mixed(unsolved, [failure])
    assert not becomes_mixed(unsolved, [])
    assert not becomes_mixed(solved, [success])
    assert becomes_mixed(solved, [failure])
