"""The accuracy of a step is that of its fresh groups, whatever r_tot is."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from services.buffer.api.wire import StepView


def step_view(**changes: Any) -> StepView:
    values: dict[str, Any] = {
        "step": 1,
        "r_tot": 0.9,
        "c2": 0.0,
        "c3": 1.0,
        "counts": {},
        "rollouts": 0,
        "tokens": 0,
        "metrics": {},
        "bins": [],
        "mean_reward": 0.0,
        "reward_parts": {},
        "committed_at": datetime.now(UTC),
    }
    return StepView(**values | changes)


@pytest.mark.parametrize(
    ("counts", "trained"),
    [
        ({"fresh": 0, "replayed": 0, "reevaluated": 0, "rolled_out": 8}, False),
        ({"fresh": 0, "replayed": 2, "reevaluated": 0, "rolled_out": 8}, True),
        ({"fresh": 1}, True),
    ],
)
def test_a_step_trained_if_its_batch_had_a_group(counts: dict[str, int], trained: bool) -> None:
    assert step_view(counts=counts).trained == trained


@pytest.mark.parametrize(
    ("bins", "accuracy"), [([2, 0, 1], 1 / 3), ([0, 0, 0], 0.0), ([0, 0, 4], 1.0)]
)
def test_the_accuracy_is_that_of_the_fresh_groups(bins: list[int], accuracy: float) -> None:
    view = step_view(bins=bins)
    assert view.accuracy == pytest.approx(accuracy)
    assert "accuracy" not in view.model_dump()
