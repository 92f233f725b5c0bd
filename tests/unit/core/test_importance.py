"""Importance weights and mismatch metrics agree with worked examples."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from bapo_core.importance import Level, Mode, mismatch_metrics, truncated_weights, weight_metrics

BEHAVIOR = torch.tensor([[-1.0, -2.0, -0.5, -3.0]], dtype=torch.double)
PROX = torch.tensor([[-0.9, -1.5, -0.6, -1.0]], dtype=torch.double)
MASK = torch.ones(1, 4, dtype=torch.bool)


def test_weights_are_truncated_at_three_by_default() -> None:
    log_ratios = torch.tensor([[-1.2, -0.1, 0, 0.5, math.log(3), 1.5, 25]], dtype=torch.double)
    zeros, mask = torch.zeros_like(log_ratios), torch.ones_like(log_ratios)
    weights = truncated_weights(log_ratios, zeros, mask)
    expected = [0.301194, 0.904837, 1, 1.648721, 3, 3, 3]
    assert weights[0].tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("level", "cap", "expected"),
    [
        ("token", 3.0, [1.105171, 1.648721, 0.904837, 3.0]),
        ("sequence", 100.0, [12.182494] * 4),
        ("sequence", 3.0, [3.0] * 4),
        ("geometric", 3.0, [1.868246] * 4),
    ],
)
def test_weights_of_each_level_agree_with_worked_examples(
    level: Level, cap: float, expected: list[float]
) -> None:
    weights = truncated_weights(PROX, BEHAVIOR, MASK, cap=cap, level=level)
    assert weights[0].tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("truncate", [0.5, 0.5, 1.0, 2.0, 2.0]), ("mask", [0.0, 0.5, 1.0, 2.0, 0.0])],
)
def test_weights_outside_the_bounds_are_truncated_or_masked(
    mode: Mode, expected: list[float]
) -> None:
    ratios = torch.tensor([[0.4, 0.5, 1.0, 2.0, 2.1, math.nan]], dtype=torch.double)
    mask = ~ratios.isnan()
    arguments = (ratios.log(), torch.zeros_like(ratios), mask)
    options: dict[str, Any] = {"floor": 0.5, "cap": 2.0, "mode": mode}
    weights = truncated_weights(*arguments, **options)
    assert weights[0].tolist() == pytest.approx([*expected, 0.0])
    metrics = weight_metrics(*arguments, **options)
    assert metrics["truncated_fraction"] == pytest.approx(0.4)
    squares = sum(weight**2 for weight in expected)
    assert metrics["ess_fraction"] == pytest.approx(sum(expected) ** 2 / (5 * squares))


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_masked_positions_have_weight_zero_and_no_influence(level: Level) -> None:
    padded = torch.nn.functional.pad(PROX, (0, 1), value=math.nan)
    weights = truncated_weights(
        padded,
        torch.nn.functional.pad(BEHAVIOR, (0, 1)),
        torch.tensor([[1, 1, 1, 1, 0]]),
        level=level,
    )
    assert weights[:, :4].equal(truncated_weights(PROX, BEHAVIOR, MASK, level=level))
    assert weights[0, 4] == 0.0


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_weights_are_detached_and_rows_independent(level: Level) -> None:
    prox = torch.cat([PROX, BEHAVIOR]).requires_grad_()
    weights = truncated_weights(prox, BEHAVIOR.expand(2, 4), MASK.expand(2, 4), level=level)
    assert not weights.requires_grad
    assert weights[1].tolist() == [1.0] * 4


def test_metrics_of_identical_policies() -> None:
    assert mismatch_metrics(PROX, PROX, MASK) == {
        "logprob_diff_mean": 0.0,
        "logprob_diff_max": 0.0,
        "mismatch_kl": 0.0,
    }
    assert weight_metrics(PROX, PROX, MASK) == {"ess_fraction": 1.0, "truncated_fraction": 0.0}


def test_metrics_agree_with_a_worked_example() -> None:
    metrics = mismatch_metrics(PROX, BEHAVIOR, MASK) | weight_metrics(PROX, BEHAVIOR, MASK)
    differences = [0.1, 0.5, -0.1, 2.0]
    weights = [math.exp(0.1), math.exp(0.5), math.exp(-0.1), 3.0]
    assert metrics == pytest.approx(
        {
            "logprob_diff_mean": 0.675,
            "logprob_diff_max": 2.0,
            "mismatch_kl": sum(math.exp(d) - d - 1 for d in differences) / 4,
            "ess_fraction": sum(weights) ** 2 / (4 * sum(w * w for w in weights)),
            "truncated_fraction": 0.25,
        }
    )


def test_a_weight_at_the_cap_is_not_truncated() -> None:
    assert weight_metrics(PROX, PROX, MASK, cap=1.0)["truncated_fraction"] == 0.0


def test_metrics_without_tokens_are_neutral() -> None:
    arguments = (PROX, BEHAVIOR, torch.zeros_like(MASK))
    metrics = mismatch_metrics(*arguments) | weight_metrics(*arguments)
    assert metrics["ess_fraction"] == 1.0
    assert sum(metrics.values()) == 1.0
