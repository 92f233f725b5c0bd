"""Losses, clipping and aggregation agree with worked examples."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from bapo_core.losses import (
    AGGREGATIONS,
    Aggregation,
    aggregate,
    clip_fraction,
    clipped_surrogate,
    clipped_tokens,
    scale_count,
    sequence_ratio,
    token_scale,
)

CLIP: dict[str, Any] = dict(clip_low=0.2, clip_high=0.28)
RATIOS = torch.tensor([0.5, 0.7, 0.9, 1.1, 1.25, 1.4, 4.0, 12.0], dtype=torch.double)


def surrogate(ratios: torch.Tensor, advantage: float, **options: Any) -> torch.Tensor:
    advantages = torch.full_like(ratios, advantage)
    zeros, mask = torch.zeros_like(ratios), torch.ones_like(ratios)
    return clipped_surrogate(ratios.log(), zeros, advantages, mask, **{**CLIP, **options})


@pytest.mark.parametrize(
    ("advantage", "dual_clip", "expected"),
    [
        (1.0, None, [-0.5, -0.7, -0.9, -1.1, -1.25, -1.28, -1.28, -1.28]),
        (-1.0, None, [0.8, 0.8, 0.9, 1.1, 1.25, 1.4, 4, 12]),
        (-1.0, 3.0, [0.8, 0.8, 0.9, 1.1, 1.25, 1.4, 3, 3]),
        (-1.0, 10.0, [0.8, 0.8, 0.9, 1.1, 1.25, 1.4, 4, 10]),
        (1.0, 3.0, [-0.5, -0.7, -0.9, -1.1, -1.25, -1.28, -1.28, -1.28]),
    ],
)
def test_the_clipped_surrogate_agrees_with_worked_examples(
    advantage: float, dual_clip: float | None, expected: list[float]
) -> None:
    assert surrogate(RATIOS, advantage, dual_clip=dual_clip).tolist() == pytest.approx(expected)


def test_aggregation_agrees_with_worked_examples() -> None:
    ratios = torch.tensor([[0.9, 1.1, 1.4], [1.0, 7.0, 7.0]])
    advantages = torch.tensor([[1.0], [-1.0]]).expand(2, 3)
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    loss = clipped_surrogate(ratios.log(), torch.zeros(2, 3), advantages, mask, **CLIP)
    assert aggregate(loss, mask, "token-mean").item() == pytest.approx(-0.57, abs=1e-6)
    per_sequence = aggregate(loss, mask, "seq-mean-token-mean").item()
    assert per_sequence == pytest.approx(-0.046667, abs=1e-6)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", lambda rows: sum(map(sum, rows)) / sum(map(len, rows))),
        ("seq-mean-token-mean", lambda rows: sum(sum(r) / len(r) for r in rows) / len(rows)),
        ("seq-mean-token-sum", lambda rows: sum(map(sum, rows)) / len(rows)),
        ("seq-mean-token-sum-norm", lambda rows: sum(sum(r) / 9 for r in rows) / len(rows)),
    ],
)
def test_aggregations_are_those_of_the_equations(
    mode: Aggregation, expected: Callable[[list[list[float]]], float]
) -> None:
    rows = [[0.3, -1.2, 2.0], [0.7], [-0.4, 0.9, 0.1, 3.0]]
    filled = [[*row, *[math.nan] * (5 - len(row))] for row in [*rows, []]]
    loss = torch.tensor(filled, dtype=torch.double)
    mask = ~loss.isnan()
    assert aggregate(loss, mask, mode, longest=9).item() == pytest.approx(expected(rows))
    # Micro-batches get the same scales where they are given the count of the whole minibatch.
    count = scale_count(mask, mode)
    parts = [
        token_scale(mask[part], mode, longest=9, count=count) for part in (slice(0, 1), slice(1, 4))
    ]
    assert torch.equal(torch.cat(parts), token_scale(mask, mode, longest=9))


# Log-probs of four tokens under the behaviour policy alpha, the proximal policy and theta.
ALPHA = torch.tensor([[-1.0, -2.0, -0.5, -3.0]])
PROX = torch.tensor([[-0.9, -1.5, -0.6, -1.0]])
THETA = torch.tensor([[-0.7, -1.6, -0.5, -0.8]])
ADVANTAGES = torch.tensor([[1.0, 1.0, -1.0, -1.0]])
MASK = torch.ones(1, 4, dtype=torch.bool)


def test_the_decoupled_loss_agrees_with_a_worked_example() -> None:
    weights = (PROX - ALPHA).exp().clamp(max=3)
    loss = clipped_surrogate(THETA, PROX, ADVANTAGES, MASK, **CLIP, dual_clip=10.0, weights=weights)
    assert loss[0].tolist() == pytest.approx([-1.349859, -1.491825, 1, 3.664208], abs=1e-5)
    assert aggregate(loss, MASK, "token-mean").item() == pytest.approx(0.455631, abs=1e-6)


def test_the_loss_of_behaviour_ratios_agrees_with_a_worked_example() -> None:
    loss = clipped_surrogate(THETA, ALPHA, ADVANTAGES, MASK, **CLIP, dual_clip=10.0)
    assert loss[0].tolist() == pytest.approx([-1.28, -1.28, 1, 9.025013], abs=1e-5)
    assert aggregate(loss, MASK, "token-mean").item() == pytest.approx(1.866253, abs=1e-6)


def test_clip_bounds_are_relative_to_the_clip_centre() -> None:
    # A stale token is not clipped at its current ratio of 2, which may move by -0.2 to +0.28.
    ratios = torch.tensor([1.5, 2.0, 2.5])
    center = torch.full((3,), 2.0)
    losses = surrogate(ratios, 1.0, clip_center=center).tolist()
    assert losses == pytest.approx([-1.5, -2.0, -2.28])
    assert surrogate(ratios, -1.0, clip_center=center).tolist() == pytest.approx([1.8, 2.0, 2.5])


def test_ratios_beyond_the_clip_bound_have_no_gradient() -> None:
    logprobs = RATIOS.log().requires_grad_()
    ones = torch.ones_like(RATIOS)
    clipped_surrogate(logprobs, torch.zeros_like(RATIOS), ones, ones, **CLIP).sum().backward()
    expected = torch.where(RATIOS < 1.28, -RATIOS, 0.0)
    assert logprobs.grad.tolist() == pytest.approx(expected.tolist())


def test_clip_fraction_is_the_share_of_tokens_without_gradient() -> None:
    ones = torch.ones_like(RATIOS)
    arguments = RATIOS.log(), torch.zeros_like(RATIOS)

    def share(advantages: torch.Tensor, mask: torch.Tensor) -> float:
        return clip_fraction(clipped_tokens(*arguments, advantages, mask, **CLIP), mask)

    assert share(ones, ones) == 3 / 8
    assert share(-ones, ones) == 2 / 8
    assert share(ones, torch.zeros_like(ones)) == 0.0


@pytest.mark.parametrize("dual_clip", [None, 3.0])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_clipped_tokens_are_those_without_gradient(
    advantage: float, dual_clip: float | None
) -> None:
    ratios = torch.tensor([0.1, 0.75, 0.9, 1.0, 1.2, 2.0, 4.0, 12.0])
    logprobs = ratios.log().requires_grad_()
    advantages, ones = torch.full_like(ratios, advantage), torch.ones_like(ratios)
    arguments = (torch.zeros_like(ratios), advantages, ones)
    clipped_surrogate(logprobs, *arguments, **CLIP, dual_clip=dual_clip).sum().backward()
    clipped = clipped_tokens(logprobs.detach(), *arguments, **CLIP, dual_clip=dual_clip)
    assert torch.equal(clipped, logprobs.grad == 0)
    assert clipped.any()


@pytest.mark.parametrize("logprob", [-1.0, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_masked_positions_have_no_influence(logprob: float, poison: float) -> None:
    mask = torch.tensor([[True, False]])
    logprobs = torch.tensor([[-1.0, logprob]], requires_grad=True)
    prox = torch.full((1, 2), -1.0)
    other = torch.tensor([[1.0, poison]])
    loss = clipped_surrogate(logprobs, prox, other, mask, **CLIP, dual_clip=10.0, weights=other)
    sequence_ratio(logprobs, prox, mask).sum().backward()
    assert logprobs.grad.tolist() == [[1.0, 0.0]]
    logprobs.grad = None
    aggregate(loss, mask, "token-mean").backward()
    assert loss[0, 1] == 0.0
    assert logprobs.grad[0, 1] == 0.0
    assert torch.isfinite(logprobs.grad).all()


def test_an_overflowing_ratio_is_clamped_to_a_finite_value() -> None:
    logprobs = torch.tensor([0.0], requires_grad=True)
    old_logprobs = torch.tensor([-1e4])
    loss = clipped_surrogate(logprobs, old_logprobs, torch.tensor([0.0]), torch.ones(1), **CLIP)
    loss.sum().backward()
    assert loss.tolist() == [0.0]
    assert logprobs.grad.tolist() == [0.0]


@pytest.mark.parametrize("mode", list(AGGREGATIONS))
def test_aggregation_without_tokens_is_zero(mode: Aggregation) -> None:
    loss = torch.ones(2, 3, requires_grad=True)
    total = aggregate(loss, torch.zeros(2, 3), mode)
    total.backward()
    assert total.item() == 0.0
    assert loss.grad.abs().sum() == 0.0


def test_sequences_without_tokens_do_not_count() -> None:
    loss, mask = torch.ones(2, 3), torch.tensor([[1, 1, 0], [0, 0, 0]])
    assert aggregate(loss, mask, "seq-mean-token-mean").item() == 1.0


def test_sequence_ratio_is_the_geometric_mean_over_valid_tokens() -> None:
    ratio = sequence_ratio(THETA, ALPHA, torch.tensor([[1, 1, 0, 1]]))
    assert ratio.tolist() == [[pytest.approx(math.exp((0.3 + 0.4 + 2.2) / 3))]]


def test_sequence_ratio_is_clamped_at_ten_nats() -> None:
    ratio = sequence_ratio(torch.zeros(1, 2), torch.full((1, 2), -50.0), torch.ones(1, 2))
    assert ratio.item() == pytest.approx(math.exp(10))


def test_gspo_gradient_is_shared_equally_by_the_tokens_of_a_sequence() -> None:
    old = torch.tensor([[-1.0, -2.0], [-1.0, 0.0]])
    mask = torch.tensor([[1, 1], [1, 0]])
    logprobs = old.clone().requires_grad_()
    s = sequence_ratio(logprobs, old, mask)
    advantages = torch.tensor([[1.0], [-2.0]])
    loss = clipped_surrogate(
        s.log(), torch.zeros_like(s), advantages, mask, clip_low=3e-4, clip_high=4e-4
    )
    aggregate(loss, mask, "seq-mean-token-mean").backward()
    # The derivative of -mean_i(s_i A_i) by a log-prob, at s = 1, is -A_i / (N * tokens_i).
    assert logprobs.grad.tolist() == [[-0.25, -0.25], [1.0, 0.0]]
