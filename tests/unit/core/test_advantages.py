"""Advantages agree with worked examples and are exactly 0 where rewards are equal."""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from bapo_core.advantages import gae, group_relative

Std = Literal["population", "sample"]


def rewards(k: int, size: int) -> torch.Tensor:
    return torch.tensor([[1.0] * k + [0.0] * (size - k)])


# Each row is (std, G, k, advantage of a correct response, advantage of a wrong one).
@pytest.mark.parametrize(
    ("std", "size", "k", "correct", "wrong"),
    [
        ("population", 4, 1, 1.732046, -0.577349),
        ("population", 4, 2, 0.999998, -0.999998),
        ("population", 8, 1, 2.645739, -0.377963),
        ("population", 8, 2, 1.732046, -0.577349),
        ("population", 8, 4, 0.999998, -0.999998),
        ("population", 8, 7, 0.377963, -2.645739),
        ("sample", 4, 1, 1.499997, -0.499999),
        ("sample", 4, 2, 0.866024, -0.866024),
        ("sample", 8, 1, 2.474867, -0.353552),
        ("sample", 8, 2, 1.620182, -0.540061),
        ("sample", 8, 4, 0.935413, -0.935413),
    ],
)
def test_group_relative_advantages_agree_with_worked_examples(
    std: Std, size: int, k: int, correct: float, wrong: float
) -> None:
    expected = [[correct] * k + [wrong] * (size - k)]
    advantages = group_relative(rewards(k, size).double(), std=std, eps=1e-6)
    assert advantages.tolist() == [pytest.approx(expected[0], abs=1e-6)]


@pytest.mark.parametrize("std", ["population", "sample"])
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1])
def test_a_group_without_variance_gets_exactly_zero(std: Std, value: float) -> None:
    advantages = group_relative(torch.full((1, 7), value), std=std)
    assert advantages.tolist() == [[0.0] * 7]


def test_groups_do_not_influence_each_other() -> None:
    both = torch.cat([rewards(1, 8), rewards(4, 8)])
    # The order of additions may depend on the number of rows, so that the last bits differ: the
    # tolerance is 10 times float32's resolution at 1.
    alone = group_relative(rewards(1, 8))
    torch.testing.assert_close(group_relative(both)[:1], alone, atol=1e-6, rtol=0)


@pytest.mark.parametrize("shape", [(8,), (3, 1)])
def test_rewards_without_groups_of_at_least_two_responses_are_refused(
    shape: tuple[int, ...],
) -> None:
    with pytest.raises(ValueError, match="G >= 2"):
        group_relative(torch.zeros(shape))


def test_gae_without_discount_is_the_reward_to_go_minus_the_value() -> None:
    advantages, returns = gae(
        torch.tensor([[0.0, 0.0, 1.0]]),
        torch.tensor([[0.2, 0.5, 0.6]]),
        torch.ones(1, 3),
        gamma=1.0,
        lam=1.0,
    )
    assert advantages[0].tolist() == pytest.approx([0.8, 0.5, 0.4])
    assert returns[0].tolist() == pytest.approx([1.0, 1.0, 1.0])


def test_gae_agrees_with_a_worked_example() -> None:
    # delta_2 = 1 - .4 = .6; delta_1 = .9*.4 - .2 = .16; A_1 = .16 + .9*.5*.6 = .43
    advantages, returns = gae(
        torch.tensor([[0.0, 1.0]]),
        torch.tensor([[0.2, 0.4]]),
        torch.ones(1, 2),
        gamma=0.9,
        lam=0.5,
    )
    assert advantages[0].tolist() == pytest.approx([0.43, 0.6])
    assert returns[0].tolist() == pytest.approx([0.63, 1.0])


def test_gae_skips_masked_positions_whatever_they_hold() -> None:
    nan = float("nan")
    without_gaps = gae(
        torch.tensor([[0.0, 1.0]]),
        torch.tensor([[0.2, 0.4]]),
        torch.ones(1, 2),
        gamma=0.9,
        lam=0.5,
    )
    with_gaps = gae(
        torch.tensor([[0.0, nan, 1.0, nan]]),
        torch.tensor([[0.2, nan, 0.4, nan]]),
        torch.tensor([[1, 0, 1, 0]]),
        gamma=0.9,
        lam=0.5,
    )
    for expected, result in zip(without_gaps, with_gaps, strict=True):
        assert result[:, [0, 2]].equal(expected)
        assert result[:, [1, 3]].tolist() == [[0.0, 0.0]]
