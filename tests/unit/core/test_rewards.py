"""Rewards are weighted sums of parts, and difficulty does not depend on them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bapo_core.config import load_config
from bapo_core.config.rollouts import RewardConfig
from bapo_core.errors import ConfigError
from bapo_core.rewards import (
    check_reward,
    check_reward_sign,
    overlong_punishment,
    reward_parts,
    reward_without_length,
    total_reward,
)
from bapo_core.tasks import get_task, is_solved

numbers = st.floats(-10, 10)


def eq_13(length: int, longest: int, cache: int) -> float:
    """Transcribes the three cases of Eq. 13 of arXiv 2503.14476."""
    if length <= longest - cache:
        return 0.0
    if length <= longest:
        return ((longest - cache) - length) / cache
    return -1.0


@given(st.integers(1, 20_480))
def test_the_overlong_punishment_is_eq_13(length: int) -> None:
    # DAPO expects 16,384 tokens and adds a cache of 4,096.
    expected = eq_13(length, 20_480, 4_096)
    assert overlong_punishment(length, 20_480, 0.2) == pytest.approx(expected, abs=1e-9)


def test_a_response_at_the_limit_is_punished_whatever_the_share() -> None:
    for share in (0.01, 0.2, 1.0):
        assert overlong_punishment(8, 8, share) == -1.0
    assert overlong_punishment(6, 8, 0.25) == 0.0


def test_the_default_reward_is_that_of_the_answer() -> None:
    for answer in (0.0, 0.3, 1.0):
        parts = reward_parts(
            answer, {"format": 1.0}, tokens=8, max_tokens=8, settings=RewardConfig()
        )
        assert parts == {"answer": answer, "format": 1.0}
        assert total_reward(parts, RewardConfig()) == answer


@given(numbers, numbers, numbers, st.floats(0, 3), st.integers(0, 100))
def test_the_reward_is_the_weighted_sum_of_its_parts(
    answer: float, form: float, weight: float, overlong_weight: float, tokens: int
) -> None:
    settings = RewardConfig(
        wrong=-1.0,
        correct=2.0,
        weights={"format": weight, "absent": 5.0},
        overlong_share=0.5,
        overlong_weight=overlong_weight,
    )
    parts = reward_parts(answer, {"format": form}, tokens=tokens, max_tokens=100, settings=settings)
    punishment = eq_13(tokens, 100, 50)
    assert parts == {"answer": answer, "format": form, "overlong": pytest.approx(punishment)}
    expected = -1.0 * (1 - answer) + 2.0 * answer + weight * form + overlong_weight * punishment
    assert total_reward(parts, settings) == pytest.approx(expected, abs=1e-9)


def test_a_failure_of_the_reward_function_is_a_part_without_a_weight() -> None:
    settings = RewardConfig(wrong=-1.0)
    parts = reward_parts(0.0, {}, tokens=8, max_tokens=8, settings=settings, failed=True)
    assert parts == {"answer": 0.0, "failed": 1.0}
    assert total_reward(parts, settings) == -1.0


def test_format_credit_of_countdown_is_a_tenth() -> None:
    """TinyZero and MoPPS reward a correct answer by 1, another answer by 0.1, and none by 0."""
    task = get_task("countdown")
    settings = RewardConfig(correct=0.9, weights={"format": 0.1})
    check_reward(task, settings)
    rewards = []
    for response in ("<answer>3*7+4</answer>", "<answer>3+7+4</answer>", "I do not know."):
        verdict = task.verify({"nums": [3, 4, 7], "target": 25}, response)
        parts = reward_parts(
            verdict.reward, verdict.parts, tokens=1, max_tokens=9, settings=settings
        )
        rewards.append(total_reward(parts, settings))
    assert rewards == [1.0, 0.1, 0.0]


@pytest.mark.parametrize(
    ("response", "form"), [(r"\boxed{3}", 1.0), (r"\boxed{2}", 1.0), ("3", 0.0), (r"\boxed{", 0.0)]
)
def test_the_format_of_mathematics_is_a_boxed_answer(response: str, form: float) -> None:
    assert get_task("math").verify({"answer": "3"}, response).parts == {"format": form}


def test_a_weight_of_an_unknown_part_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"names 'length', but .* countdown have the parts format"
    ):
        check_reward(get_task("countdown"), RewardConfig(weights={"length": 1.0}))


def test_punishing_correct_answers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"wrong .1. is not below correct .1."):
        load_config(None, ["reward.wrong=1"])


@pytest.mark.parametrize(
    "override", ["reward.wrong=-1", "reward.overlong_share=0.1", "reward.weights={format: -0.1}"]
)
def test_maxrl_refuses_rewards_below_0(override: str) -> None:
    with pytest.raises(ConfigError, match=r"maxrl.* allows rewards below 0"):
        load_config(None, ["algorithm=maxrl", override])
    load_config(None, ["algorithm=maxrl", "reward.weights={format: 0.1}"])


def test_dapo_rewards_with_plus_and_minus_1() -> None:
    config = load_config(None, ["algorithm=dapo"])
    assert (config.reward.wrong, config.reward.correct) == (-1.0, 1.0)
    assert config.reward.overlong_share == pytest.approx(4_096 / 20_480)
    assert config.loss.mask_truncated


def test_a_negative_reward_is_refused_where_the_estimator_divides_by_the_mean() -> None:
    with pytest.raises(ConfigError, match=r"the reward -1, but advantage.estimator is 'maxrl'"):
        check_reward_sign(-1.0, "maxrl")
    check_reward_sign(0.0, "maxrl")
    check_reward_sign(-1.0, "group")


def test_the_reward_without_length_has_all_parts_but_the_punishment() -> None:
    settings = RewardConfig(wrong=-1.0, weights={"format": 0.5}, overlong_share=0.5)
    parts = {"answer": 0.75, "format": 1.0, "overlong": -0.25}
    assert reward_without_length(parts, settings) == 0.5 + 0.5
    assert total_reward(parts, settings) == 0.75
    assert reward_without_length(parts | {"overlong": 0.0}, settings) == 1.0


@pytest.mark.parametrize(
    ("reward", "status", "solved_at", "expected"),
    [
        (1.0, "ok", None, True),
        (1.0, "scored", None, False),
        (0.0, "ok", None, True),
        (1.0, "scored", 1.0, True),
        (0.1 + 0.2, "scored", 0.3, True),
        (0.1 * 3, "scored", 0.3 + 1e-15, True),
        (0.99, "ok", 1.0, False),
        (-2.0, "scored", -2.5, True),
    ],
)
def test_a_verdict_is_correct_by_its_status_or_from_a_reward_on(
    reward: float, status: str, solved_at: float | None, expected: bool
) -> None:
    assert is_solved(reward, status, solved_at) == expected


@given(st.lists(st.sampled_from([0.0, 1e-30, 1.0, 1e10, 1e38, 3.4e38]), min_size=3, max_size=3))
def test_a_weighed_sum_of_rewards_stays_within_float32(sizes: list[float]) -> None:
    weights = {"format": 1e10, "length": -1e30}
    settings = RewardConfig(correct=2.0, wrong=-1.0, weights=weights)
    for sign in (1, -1):
        answer, form, length = (sign * size for size in sizes)
        parts = {"answer": answer, "format": form, "length": length}
        for reward in (total_reward(parts, settings), reward_without_length(parts, settings)):
            assert np.isfinite(np.float32(reward))


def test_infinite_parts_of_both_signs_are_not_the_best_reward() -> None:
    settings = RewardConfig(weights={"format": 1e300, "length": -1e300})
    parts = {"answer": 1.0, "format": 1e38, "length": 1e38}
    assert total_reward(parts, settings) == 0.0
    assert reward_without_length(parts, settings) == 0.0
