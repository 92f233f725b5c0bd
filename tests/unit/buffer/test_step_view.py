"""The accuracy of a step is that of its fresh groups, whatever r_tot is."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from services.buffer.api.wire import StepView


@pytest.mark.parametrize(
    ("bins", "accuracy"), [([2, 0, 1], 1 / 3), ([0, 0, 0], 0.0), ([0, 0, 4], 1.0)]
)
def test_the_accuracy_is_that_of_the_fresh_groups(bins: list[int], accuracy: float) -> None:
    view = StepView(
        step=1,
        r_tot=0.9,
        c2=0.0,
        c3=1.0,
        counts={},
        rollouts=0,
        tokens=0,
        metrics={},
        bins=bins,
        mean_reward=0.0,
        reward_parts={},
        committed_at=datetime.now(UTC),
    )
    assert view.accuracy == pytest.approx(accuracy)
    assert "accuracy" not in view.model_dump()
