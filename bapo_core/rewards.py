"""The reward of a response is the weighted sum of parts that the verifier and its length give.

Whether the rewards of a group differ decides whether it has advantages. Difficulty is another
matter: the accuracy k/G of a group counts correct responses (`task.solved_at`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from bapo_core.config.estimators import ESTIMATOR_ENTRY_POINTS, ESTIMATOR_KINDS
from bapo_core.config.rollouts import RewardConfig
from bapo_core.errors import ConfigError
from bapo_core.plug_ins import find
from bapo_core.tasks import Task
from bapo_core.tasks.base import MAX_REWARD

ANSWER = "answer"
"""Name of the part that is the verdict's own reward, which every response has."""
FAILED = "failed"
"""Name of the part that is 1 for a response on which the reward function failed: it raised an
exception or took too long. Other responses lack it, and no weight applies to it."""
OVERLONG = "overlong"
"""Name of the part that punishes long responses (`overlong_punishment`)."""


def reward_parts(
    answer: float,
    parts: Mapping[str, float],
    *,
    tokens: int,
    max_tokens: int,
    settings: RewardConfig,
    failed: bool = False,
) -> dict[str, float]:
    """Returns the parts of a response's reward by name, without weights.

    answer: reward of the verdict. parts: further parts of the verdict. tokens: length of the
    response, of at most `max_tokens`. failed: whether there is no verdict, because the reward
    function failed.
    """
    named = {ANSWER: answer, **parts}
    if failed:
        named[FAILED] = 1.0
    if settings.overlong_share:
        named[OVERLONG] = overlong_punishment(tokens, max_tokens, settings.overlong_share)
    return named


def total_reward(parts: Mapping[str, float], settings: RewardConfig) -> float:
    """Returns the reward of a response with these parts.

    R = wrong + (correct - wrong) answer + sum_p weight_p part_p + overlong_weight overlong

    It is at most `MAX_REWARD` away from 0, whatever the weights, because it is stored as float32.
    It is 0 where the weighed parts are infinite and cancel.
    """
    reward = reward_without_length(parts, settings)
    return _bound(reward + settings.overlong_weight * parts.get(OVERLONG, 0.0))


def reward_without_length(parts: Mapping[str, float], settings: RewardConfig) -> float:
    """Returns the reward of a response with these parts, without the punishment of length.

    A group whose rewards differ by this punishment alone is not mixed: the filter of DAPO (arXiv
    2503.14476, Eq. 11) compares answers.
    """
    reward = settings.wrong + (settings.correct - settings.wrong) * parts.get(ANSWER, 0.0)
    weighed = (weight * parts.get(name, 0.0) for name, weight in settings.weights.items())
    return _bound(reward + sum(weighed))


def _bound(reward: float) -> float:
    if math.isnan(reward):  # Parts beyond the largest float of both signs have no sum.
        return 0.0
    return max(-MAX_REWARD, min(MAX_REWARD, reward))


def overlong_punishment(tokens: int, max_tokens: int, share: float) -> float:
    """Returns the soft overlong punishment in [-1, 0] (DAPO, arXiv 2503.14476, Eq. 13).

    It is 0 up to `(1 - share) * max_tokens` tokens and falls linearly to -1 at `max_tokens`.
    """
    return -min(1.0, max(0.0, 1.0 + (tokens - max_tokens) / (share * max_tokens)))


def check_reward_sign(reward: float, estimator: str) -> None:
    """Raises `ConfigError` for a negative reward where the estimator of advantages takes none.

    MaxRL divides by the mean reward of a group, which trains backwards where it is below 0. An
    estimator of a plug-in declares by the attribute `non_negative` that it needs such rewards.
    """
    if reward < 0 and estimator in _non_negative_estimators(estimator):
        raise ConfigError(
            f"a response got the reward {reward:g}, but advantage.estimator is {estimator!r}, "
            "which needs rewards of 0 and more; have the task give no negative rewards, or set "
            "another estimator"
        )


@lru_cache(maxsize=8)
def _non_negative_estimators(estimator: str) -> frozenset[str]:
    """Returns the estimators that need non-negative rewards, of the built-in ones and this one."""
    if estimator in ESTIMATOR_KINDS.sections:
        return frozenset(("maxrl",))
    loaded: Any = find(
        estimator, {}, group=ESTIMATOR_ENTRY_POINTS, kind="estimator", error=ConfigError
    )
    return frozenset((estimator,) if getattr(loaded, "non_negative", False) else ())


def check_reward(task: Task, settings: RewardConfig) -> None:
    """Raises `ConfigError` for a weight of a part that the task's verdicts do not have."""
    known = getattr(task, "reward_parts", ())
    for name in settings.weights:
        if name not in known:
            raise ConfigError(
                f"reward.weights names {name!r}, but the verdicts of task {task.name} have "
                f"{'the parts ' + ', '.join(known) if known else 'no parts'}; correct or remove it"
            )
