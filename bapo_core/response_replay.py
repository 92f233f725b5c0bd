"""Response replay lets responses of earlier steps join the fresh groups of their prompts.

The cache of a prompt is the responses to it in the committed groups of earlier steps, oldest first.
Choosing from it needs rewards and mean log-probs alone, and no tokens.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from bapo_core.config.batches import ResponseReplayConfig
from bapo_core.types import BatchMember, GroupSummary, Source, TrainingBatch


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response of an earlier step."""

    group: GroupSummary
    """The group that it was sampled in."""
    row: int
    """Its index in that group, from 0 on."""
    reward: float
    correct: bool
    mean_logprob: float
    """Mean log-prob of its tokens under the policy that sampled it, in nats."""


def receives_responses(
    group: GroupSummary, settings: ResponseReplayConfig, *, revisited: bool
) -> bool:
    """Returns whether responses of earlier steps are replayed for a fresh group.

    revisited: whether its prompt was drawn because of its past successes (`sampler.kind: exgrpo`).
    """
    match settings.groups:
        case "all":
            return True
        case "unsolved":
            return group.correct == 0
        case "revisited":
            return revisited


def choose_responses(
    cache: Sequence[StoredResponse], settings: ResponseReplayConfig, rng: random.Random
) -> list[StoredResponse]:
    """Chooses the responses of a prompt to replay, oldest first; none if too few are cached.

    The candidates are the newest `settings.candidates` responses of the cache, or of its correct
    ones if `settings.only_correct`. `settings.strategy` chooses `settings.count` of them (RePO,
    arXiv 2506.09340): all of them, the most recent, random ones, those of highest reward, the
    subset whose rewards have the largest variance, or those of highest mean log-prob when they were
    sampled, which have the lowest entropy (ExGRPO, arXiv 2510.02245). Ties go to newer responses.
    """
    candidates = [response for response in cache if response.correct or not settings.only_correct]
    candidates = candidates[-settings.candidates :]
    if len(candidates) < settings.min_candidates:
        return []
    indexes = range(len(candidates))
    count = min(settings.count, len(candidates))
    match settings.strategy:
        case "all":
            chosen = list(indexes)
        case "recent":
            chosen = list(indexes)[-count:]
        case "random":
            chosen = rng.sample(indexes, count)
        case "highest_reward":
            chosen = sorted(indexes, key=lambda i: (candidates[i].reward, i))[-count:]
        case "max_variance":
            chosen = _largest_variance([response.reward for response in candidates], count)
        case "most_likely":
            chosen = sorted(indexes, key=lambda i: (candidates[i].mean_logprob, i))[-count:]
    return [candidates[index] for index in sorted(chosen)]


def _largest_variance(rewards: Sequence[float], count: int) -> list[int]:
    """Returns the indexes of the `count` rewards of largest population variance.

    Ties go to the larger sum. Such a subset has the lowest and the highest rewards and none from
    the middle, because the variance is convex in each reward; so count + 1 subsets are compared.
    """
    by_reward = sorted(range(len(rewards)), key=lambda index: (rewards[index], index))

    def score(highest: int) -> tuple[float, float]:
        values = [rewards[index] for index in subset(highest)]
        total = sum(values)
        # n^2 times the variance: exact for rewards such as 0 and 1, so that ties are seen.
        return count * sum(value * value for value in values) - total * total, total

    def subset(highest: int) -> list[int]:
        split = len(rewards) - highest
        # The newer ones of equal rewards, at this end as well.
        others = sorted(by_reward[:split], key=lambda index: (rewards[index], -index))
        return [*others[: count - highest], *by_reward[split:]]

    return subset(max(range(count + 1), key=score))


def becomes_mixed(
    group: GroupSummary, chosen: Sequence[StoredResponse], *, demonstrated: bool = False
) -> bool:
    """Returns whether what joins a fresh group of equal rewards makes it mixed.

    It does if some of all responses are then correct and others are not.
    chosen: replayed responses that join it. demonstrated: whether a demonstration, which is
    correct, joins it.
    """
    joining = len(chosen) + demonstrated
    correct = group.correct + sum(response.correct for response in chosen) + demonstrated
    return joining > 0 and 0 < correct < group.size + joining


def without_first(member: BatchMember, count: int) -> BatchMember:
    """Returns a member without its first `count` responses, which others replace."""
    rows = range(member.group.size) if member.rows is None else member.rows
    return replace(member, rows=tuple(rows)[count:])


def add_responses(
    batch: TrainingBatch,
    chosen: Mapping[int, Sequence[StoredResponse]],
    settings: ResponseReplayConfig,
) -> TrainingBatch:
    """Puts replayed responses after the fresh groups of their prompts.

    chosen: responses by the id of the fresh group, as `choose_responses` returns them. With
    `settings.replace`, they take the place of the group's first responses, which are no different
    from its others. With advantages `mixed`, they are compared with the group's own; with `split`,
    with each other alone.
    """
    members: list[BatchMember] = []
    for member in batch.members:
        responses = chosen.get(member.group.group_id, ())
        if member.source is not Source.FRESH or not responses:
            members.append(member)
            continue
        if settings.replace:
            member = without_first(member, len(responses))
        members.append(member)
        by_group = groupby(responses, lambda response: response.group.group_id)
        for number, (_, of_group) in enumerate(by_group):
            rows = list(of_group)
            members.append(
                BatchMember(
                    rows[0].group,
                    Source.REPLAYED,
                    rows=tuple(response.row for response in rows),
                    joins_previous=number > 0 or settings.advantages == "mixed",
                )
            )
    return replace(batch, members=members)
