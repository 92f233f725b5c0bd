"""Random states of a step under every preset and variant of the data rules."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

from bapo_core.algorithm import StepState, draw_reevaluated
from bapo_core.config import PRESETS, RunConfig, config_from, merge
from bapo_core.errors import ConfigError
from bapo_core.response_replay import StoredResponse
from bapo_core.types import GroupSummary

SIZE = 8
SMALL: Mapping[str, Any] = {
    "name": "random",
    "steps": 40,
    "rollout": {"prompts_per_step": 12, "group_size": SIZE},
    "optimizer": {"minibatch_prompts": 4},
    "hard_buffer": {"capacity": 10},
    "reevaluate": {"max_prompts": 4},
    "sync": {"every": 2, "reevaluate_every": 2},
    "batch": {"capacity": 12},
}
MIXED_RESPONSES = {
    "groups": "unsolved",
    "candidates": 6,
    "min_candidates": 1,
    "count": 2,
    "only_correct": True,
    "advantages": "mixed",
    "replace": True,
}
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "as preset": {},
    "fresh.filter=none": {"fresh": {"filter": "none"}},
    "fresh.filter=gaussian": {"fresh": {"filter": "gaussian"}},
    "fresh.filter=uniform": {"fresh": {"filter": "uniform"}},
    "fresh.filter=range": {"fresh": {"filter": "range"}},
    "reevaluate.rule=any_gain": {"reevaluate": {"rule": "any_gain"}},
    "hard entries of one prompt improve": {
        "batch": {"dedup": "rollout"},
        "reevaluate": {"rule": "any_gain"},
    },
    "reevaluate.rule=improved_window": {"reevaluate": {"rule": "improved_window"}},
    "batch.dedup=rollout": {"batch": {"dedup": "rollout"}},
    "small batch": {"batch": {"capacity": 4}},
    "window moves down by a moving average": {
        "replay": {"select": "window", "window": {"direction": "easy_to_hard", "r_tot": "ema"}}
    },
    "window moves by the buffers": {"replay": {"select": "window", "window": {"r_tot": "buffer"}}},
    "fixed window": {"replay": {"select": "window", "window": {"direction": "fixed"}}},
    "mixed groups of all steps": {
        "replay": {"select": "mixed", "last_step": 5, "buffer": {"max_age": None}},
    },
    "mixed groups near the policy": {
        "replay": {"select": "effective_sample_size", "min_ess_fraction": 0.8},
    },
    "hard entries are kept and new groups are stored": {
        "hard_buffer": {"evict_solved": False},
        "replay": {"select": "window", "store_reevaluated": True},
    },
    "demonstrations join all": {"demonstrations": {"join": "all"}},
    "demonstrations join unsolved groups": {"demonstrations": {"join": "unsolved"}},
    "supervised updates": {"demonstrations": {"supervise_every": 2}},
    "responses join unsolved groups": {"response_replay": MIXED_RESPONSES},
    "responses join all groups": {
        "response_replay": {"groups": "all", "candidates": 5, "min_candidates": 3, "count": 3}
    },
}


def small_configs() -> Iterator[tuple[str, RunConfig]]:
    """Yields a name and a configuration for each preset and variant that fit each other."""
    for preset in PRESETS:
        for variant, changes in VARIANTS.items():
            for seed in range(2):
                values = merge({**SMALL, "algorithm": preset, "seed": seed}, changes)
                try:
                    config = config_from(values)
                except ConfigError:
                    continue
                if config.replay.select != "off":
                    config = config_from(merge(values, {"replay": {"buffer": {"capacity": 9}}}))
                yield f"{preset}, {variant}, seed {seed}", config


def random_state(config: RunConfig, seed: int) -> StepState:
    """Returns a state that a run might be in, with several entries of a prompt in a buffer."""
    rng = random.Random(seed)
    step, size = rng.randint(4, 8), config.rollout.group_size
    uids = [f"prompt:{number}" for number in range(rng.randint(14, 30))]
    ids = iter(range(1, 10_000))

    rewards = rng.choice(["not recorded", "1 and 0", "real", "real"])

    def group(uid: str, at: int, correct: int) -> GroupSummary:
        bounds: tuple[float | None, float | None] = (None, None)
        if rewards == "1 and 0":
            bounds = (float(correct == size), float(correct > 0))
        elif rewards == "real":
            # Correct responses may have equal rewards, and wrong ones different rewards.
            lowest = rng.choice([-0.5, 0.0, 0.7])
            bounds = (lowest, rng.choice([lowest, lowest + 0.4]))
        version = max(1, at - rng.randint(0, 2))
        return GroupSummary(next(ids), uid, at, correct, size, version, *bounds)

    def any_count() -> int:
        return rng.choice([0, 0, 1, size, rng.randint(0, size), rng.randint(0, size)])

    # Under `dedup: rollout`, a prompt may have several entries.
    of_hard = uids[:5] if config.batch.dedup == "rollout" else uids
    hard = [
        group(rng.choice(of_hard), at, rng.choice([0, 0, 1]))
        for at in sorted(rng.choices(range(1, step), k=rng.choice([0, 4, 8, 10])))
    ]
    high = [
        group(rng.choice(uids), at, rng.randint(rewards != "real", size - (rewards != "real")))
        for at in sorted(rng.choices(range(1, step), k=rng.randint(0, 9)))
    ]
    if config.batch.dedup == "prompt":
        hard = list({entry.prompt_uid: entry for entry in hard}.values())
        high = list({entry.prompt_uid: entry for entry in high}.values())
    caches = {
        uid: [
            StoredResponse(
                past,
                row,
                float(row < past.correct),
                row < past.correct,
                rng.choice([-1.0, -0.5, rng.uniform(-2, 0)]),
            )
            for past in [group(uid, at, any_count()) for at in range(1, rng.randint(2, 4))]
            for row in range(size)
        ]
        for uid in rng.sample(uids, len(uids) // 2)
    }
    fresh = [
        group(uid, step, any_count()) for uid in rng.sample(uids, config.rollout.prompts_per_step)
    ]
    reevaluated = []
    if config.reevaluates_at(step):
        drawn = draw_reevaluated(config, step, hard)
        reevaluated = [group(entry.prompt_uid, step, any_count()) for entry in drawn]
    return StepState(
        step=step,
        fresh=fresh,
        reevaluated=reevaluated,
        hard=hard if config.keeps_hard_buffer else [],
        high=high if config.replay.select != "off" else [],
        r_tot_before=rng.choice([None, rng.random()]),
        revisited=rng.randint(0, 4) if config.sampler.kind == "exgrpo" else 0,
        caches=caches,
        demonstrated=frozenset(rng.sample(uids, len(uids) // 2)),
        ess_decay=rng.choice([None, 0.0, rng.uniform(0.0, 0.15), rng.uniform(0.0, 0.15)]),
    )
