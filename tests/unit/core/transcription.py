"""Algorithm 1 and the data rules of other methods, written again from their descriptions.

It shares nothing with `bapo_core.algorithm` but the types of groups, the configuration and the
seeds of draws, which are part of the specification: a draw is `Random.sample` of indexes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from bapo_core.algorithm import StepState
from bapo_core.config import RunConfig
from bapo_core.response_replay import StoredResponse
from bapo_core.seeding import derive_rng
from bapo_core.types import GroupSummary

Member = tuple[int, str, tuple[int, ...] | None, bool]
"""(group id, source, rows, joins_previous)."""
EPSILON = 1e-9


def compose(config: RunConfig, state: StepState) -> tuple[list[Member], float, tuple[float, float]]:
    """Returns the members of a batch, r_tot and the replay window."""
    fresh = state.fresh
    r_tot = running_accuracy(config, state)
    c2, c3 = window_at(config, r_tot)
    replayed = {
        group.group_id: responses
        for rank, group in enumerate(fresh)
        if (responses := replay_responses(config, state, rank, group))
    }
    joined = {
        group.group_id
        for group in fresh
        if group.prompt_uid in state.demonstrated
        and (
            config.demonstrations.join == "all"
            or (config.demonstrations.join == "unsolved" and not group.correct)
        )
    }
    sources: list[tuple[str, list[GroupSummary]]] = [
        ("fresh", online_filter(config, state, replayed, joined)),
        ("reevaluated", improved(config, state)),
        ("replayed", []),
    ]
    if config.replay.select != "off" and (
        config.replay.last_step is None or state.step <= config.replay.last_step
    ):
        age = config.high_quality_buffer.max_age
        sources[2][1].extend(
            entry
            for entry in state.high
            if (age is None or state.step - entry.step <= age)
            and is_near(config, state, entry)
            and is_replayable(config, entry, (c2, c3))
        )
    taken: list[tuple[str, GroupSummary]] = []
    for source, groups in sources:
        keys = {key_of(config, group) for _, group in taken}
        new: list[GroupSummary] = []
        for group in groups:
            if key_of(config, group) not in keys:
                new.append(group)
                keys.add(key_of(config, group))
        room = config.batch_capacity - len(taken)
        if source == "replayed":
            rng = derive_rng(config.seed, "batch", state.step)
            indexes = rng.sample(range(len(new)), min(room, len(new)))
            new = [new[index] for index in sorted(indexes)]
        taken += [(source, group) for group in new[:room]]
    members: list[Member] = []
    for source, group in taken:
        rows = tuple(range(group.size))
        others = replayed.get(group.group_id, []) if source == "fresh" else []
        if source == "fresh" and group.group_id in joined:
            rows = rows[1:]
        if config.response_replay.groups != "off" and config.response_replay.replace:
            rows = rows[len(others) :]
        whole = len(rows) == group.size
        members.append((group.group_id, source, None if whole else rows, False))
        runs = itertools.groupby(others, key=lambda response: response.group.group_id)
        for number, (group_id, run) in enumerate(runs):
            joins = number > 0 or compares_with_fresh(config)
            members.append((group_id, "replayed", tuple(r.row for r in run), joins))
    return members, r_tot, (c2, c3)


def rewards_differ(group: GroupSummary) -> bool:
    """Returns whether there are advantages; rewards that are not recorded are 1 and 0."""
    if group.lowest_reward is None:
        return group.correct > 0 and group.correct != group.size
    return group.lowest_reward != group.highest_reward


def is_replayable(config: RunConfig, group: GroupSummary, window: tuple[float, float]) -> bool:
    if config.replay.select != "window":
        return rewards_differ(group)
    return window[0] - EPSILON <= group.correct / group.size <= window[1] + EPSILON


def is_near(config: RunConfig, state: StepState, group: GroupSummary) -> bool:
    """Returns whether the policy is near enough to the one that sampled the group."""
    if config.replay.select != "effective_sample_size":
        return True
    age = state.step - group.policy_version
    if state.ess_decay is None:
        return age < 2
    return age * state.ess_decay <= math.log(1 / config.replay.min_ess_fraction)


def compares_with_fresh(config: RunConfig) -> bool:
    return config.response_replay.groups != "off" and config.response_replay.advantages == "mixed"


def key_of(config: RunConfig, group: GroupSummary) -> str | int:
    return group.prompt_uid if config.batch.dedup == "prompt" else group.group_id


def running_accuracy(config: RunConfig, state: StepState) -> float:
    kind = config.replay_window.r_tot
    groups = {
        g.group_id: g for g in ([*state.hard, *state.high] if kind == "buffer" else state.fresh)
    }
    if not groups:
        return state.r_tot_before or 0.0
    mean = sum(g.correct for g in groups.values()) / sum(g.size for g in groups.values())
    if kind != "ema" or state.r_tot_before is None:
        return mean
    decay = config.replay_window.ema_decay
    return decay * state.r_tot_before + (1.0 - decay) * mean


def window_at(config: RunConfig, r_tot: float) -> tuple[float, float]:
    if config.replay.select in ("mixed", "effective_sample_size"):
        size = config.rollout.group_size
        return 1 / size, 1 - 1 / size
    settings = config.replay_window
    position = {
        "eq8": r_tot,
        "easy_to_hard": 1.0 - min(1.0, max(0.0, (r_tot - 0.2) / 0.6)),
        "fixed": 0.0,
    }[settings.direction]
    (low2, high2), (low3, high3) = settings.c2_range, settings.c3_range
    return position * (high2 - low2) + low2, position * (high3 - low3) + low3


def replay_responses(
    config: RunConfig, state: StepState, rank: int, group: GroupSummary
) -> list[StoredResponse]:
    settings = config.response_replay
    if settings.groups == "off":
        return []
    wanted = {
        "all": True,
        "unsolved": not group.correct,
        "revisited": rank < state.revisited,
    }[settings.groups]
    if not wanted:
        return []
    pool = [
        r for r in state.caches.get(group.prompt_uid, ()) if r.correct or not settings.only_correct
    ]
    pool = pool[-settings.candidates :]
    if len(pool) < settings.min_candidates:
        return []
    count = min(settings.count, len(pool))
    numbers = range(len(pool))
    rng = derive_rng(config.seed, "responses", state.step, group.prompt_uid)
    chosen: Sequence[int] = {
        "all": lambda: list(numbers),
        "recent": lambda: list(numbers[-count:]),
        "random": lambda: rng.sample(numbers, count),
        "highest_reward": lambda: best(numbers, count, lambda i: pool[i].reward),
        "most_likely": lambda: best(numbers, count, lambda i: pool[i].mean_logprob),
        "max_variance": lambda: most_various([r.reward for r in pool], count),
    }[settings.strategy]()
    return [pool[index] for index in sorted(chosen)]


def best(numbers: Sequence[int], count: int, value: Any) -> list[int]:
    """Returns the numbers of the largest values; newer ones win ties."""
    return sorted(numbers, key=lambda number: (-value(number), -number))[:count]


def most_various(rewards: Sequence[float], count: int) -> list[int]:
    """Returns the subset of largest variance: of all subsets, by the definition."""

    def score(subset: tuple[int, ...]) -> tuple[Fraction, Fraction, list[int]]:
        values = [Fraction(rewards[index]) for index in subset]
        mean = sum(values) / len(values)
        variance = sum((value - mean) ** 2 for value in values)
        # Ties go to the larger sum, and then to newer responses.
        return variance, sum(values, Fraction(0)), sorted(subset, reverse=True)

    return list(max(itertools.combinations(range(len(rewards)), count), key=score))


def online_filter(
    config: RunConfig,
    state: StepState,
    replayed: dict[int, list[StoredResponse]],
    joined: set[int],
) -> list[GroupSummary]:
    fresh, settings = list(state.fresh), config.fresh
    rng = derive_rng(config.seed, "filter", state.step)
    if settings.filter == "none":
        return fresh
    if settings.filter == "uniform":
        count = round(settings.uniform_fraction * len(fresh))
        return [fresh[index] for index in sorted(rng.sample(range(len(fresh)), count))]
    if settings.filter == "gaussian":
        mixed = [group for group in fresh if rewards_differ(group)]
        mean, sigma = settings.gaussian_mean, settings.gaussian_sigma
        return [
            g
            for g in mixed
            if rng.random() < math.exp(-0.5 * ((g.correct / g.size - mean) / sigma) ** 2)
        ]
    kept = []
    for group in fresh:
        others = replayed.get(group.group_id, ())
        if not compares_with_fresh(config):
            others = ()
        verdicts = [True] * group.correct + [False] * (group.size - group.correct)
        joining = [response.correct for response in others]
        if group.group_id in joined:
            joining.append(True)
        if rewards_differ(group) or (joining and len({*verdicts, *joining}) == 2):
            kept.append(group)
    return kept


def improved(config: RunConfig, state: StepState) -> list[GroupSummary]:
    before = {entry.prompt_uid: Fraction(entry.correct, entry.size) for entry in state.hard}
    kept = []
    for group in state.reevaluated:
        new, old = Fraction(group.correct, group.size), before[group.prompt_uid]
        rule = config.reevaluate.rule
        above = (
            new > old
            if rule != "paper"
            else group.correct / group.size > config.reevaluate.c1 + EPSILON
        )
        if above and (rule == "any_gain" or rewards_differ(group)):
            kept.append(group)
    return kept


def supervised(config: RunConfig, state: StepState) -> list[int]:
    count = config.demonstrations.supervise_every
    unsolved = [
        entry.group_id
        for entry in state.hard
        if not entry.correct and entry.prompt_uid in state.demonstrated
    ]
    return unsolved[len(unsolved) - count :] if 0 < count <= len(unsolved) else []


def settle(
    config: RunConfig, state: StepState, window: tuple[float, float], trained: Sequence[int]
) -> dict[str, tuple[list[int], dict[int, str]]]:
    """Returns, for each buffer, the ids after the commit, and the reason of each eviction."""
    result = {}
    c1, step = config.reevaluate.c1, state.step
    if config.reevaluate.enabled or config.demonstrations.supervise_every:
        gone: dict[int, str] = {}
        drops = config.hard_buffer.evict_solved
        solved = {
            group.prompt_uid
            for group in state.reevaluated
            if drops and group.correct / group.size > c1 + EPSILON
        }
        for entry in state.hard:
            if entry.prompt_uid in solved:
                gone[entry.group_id] = "solved"
            if entry.group_id in trained:
                gone[entry.group_id] = "supervised"
        hard = [g for g in state.fresh if g.correct / g.size <= c1 + EPSILON]
        held = [entry for entry in state.hard if entry.group_id not in gone]
        result["hard"] = queue(config, held, hard, config.hard_capacity, gone)
    if config.replay.select != "off" and (
        config.replay.last_step is None or step + 1 <= config.replay.last_step
    ):
        gone, age = {}, config.high_quality_buffer.max_age
        for entry in state.high:
            if age is not None and step + 1 - entry.step > age:
                gone[entry.group_id] = "expired"
        again = state.reevaluated if config.replays_reevaluated else []
        medium = [group for group in [*state.fresh, *again] if is_replayable(config, group, window)]
        held = [entry for entry in state.high if entry.group_id not in gone]
        capacity = config.high_quality_buffer.capacity
        result["high_quality"] = queue(config, held, medium, capacity, gone)
    return result


def queue(
    config: RunConfig,
    held: Sequence[GroupSummary],
    incoming: Sequence[GroupSummary],
    capacity: int,
    gone: dict[int, str],
) -> tuple[list[int], dict[int, str]]:
    """Appends groups to a queue in which the newest group of a key replaces the others."""
    new = {key_of(config, group) for group in incoming}
    gone |= {entry.group_id: "replaced" for entry in held if key_of(config, entry) in new}
    held = [entry for entry in held if key_of(config, entry) not in new]
    last = {key_of(config, group): group.group_id for group in incoming}
    entering = [group for group in incoming if last[key_of(config, group)] == group.group_id]
    line = [*held, *entering]
    dropped = {group.group_id for group in line[: max(0, len(line) - capacity)]}
    gone |= {entry.group_id: "capacity" for entry in held if entry.group_id in dropped}
    return [group.group_id for group in line if group.group_id not in dropped], gone
