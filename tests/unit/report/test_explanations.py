"""Notes of a run's report and of `bapo run`: when they appear, and what they advise."""

from __future__ import annotations

import math
import random
import re
from datetime import UTC, datetime

import pytest

from bapo_core.config import config_from
from bapo_core.types import ESS_DECAY, NEAR_ESS_FRACTION
from services.buffer.api.wire import ForkOrigin, StepView
from services.report.explanations import explain_run


def step_view(step: int, decay: float | None) -> StepView:
    return StepView(
        step=step,
        r_tot=0.5,
        c2=0.25,
        c3=0.5,
        counts={"fresh": 4, "rolled_out": 4, "mixed": 4},
        rollouts=32,
        tokens=320,
        metrics={} if decay is None else {ESS_DECAY: decay},
        bins=[0, 2, 2, 0],
        mean_reward=0.5,
        reward_parts={},
        committed_at=datetime(2026, 1, 1, tzinfo=UTC),
    )


def explain(decays: list[float | None], origin: ForkOrigin | None = None, **sync: int) -> list[str]:
    """Explains a run with these decays of its last steps, after ten steps without any."""
    steps = [step_view(step, decay) for step, decay in enumerate([None] * 10 + decays, 1)]
    return explain_run(steps, config_from({"sync": sync}, where="the test"), origin)


def test_a_delay_that_is_far_off_policy_is_said_with_a_near_one() -> None:
    # The first half of the run, in which the learning rate warms up, does not count.
    (note,) = explain([0.0] * 10 + [0.05] * 15 + [9.0], every=5)
    assert "rollouts of 4 steps ago keep 81.9% of their effective sample size" in note  # exp(-0.2)
    assert "with sync.every=3 the stalest would keep 90.5%" in note  # exp(-0.05 * 2)
    (note,) = explain([0.2], every=2)
    assert "rollouts of 1 step ago keep 81.9%" in note
    assert "with sync.every=1 the stalest would keep 100.0%" in note
    (note,) = explain([0.05], every=2, lag=4)
    assert "rollouts of 5 steps ago keep 77.9%" in note
    assert "with sync.every=1 and sync.lag=2 the stalest would keep 90.5%" in note


@pytest.mark.parametrize(
    ("decays", "sync"),
    [
        ([0.05], {"every": 1}),  # nothing is stale
        ([0.01], {"every": 5}),  # exp(-0.04) = 96%
        ([None, None], {"every": 5}),  # nothing was measured
        ([0.05], {"every": 12}),  # after 11 steps, nothing is as old
    ],
)
def test_a_delay_that_is_near_or_unknown_is_not_mentioned(
    decays: list[float | None], sync: dict[str, int]
) -> None:
    assert explain(decays, **sync) == []


@pytest.mark.parametrize(("rollouts_until", "notes"), [(None, 1), (8, 1), (15, 0)])
def test_rollouts_of_the_run_before_have_no_delay(rollouts_until: int | None, notes: int) -> None:
    """A run on recorded rollouts does not sync: with another `sync.every` it would be the same."""
    origin = ForkOrigin(run="before", step=5, checkpoint=5, rollouts_until=rollouts_until)
    assert len(explain([0.05] * 5, origin, every=5)) == notes


def test_the_remedy_is_the_longest_delay_that_is_near() -> None:
    rng = random.Random(0)
    far = 0
    for _ in range(500):
        decay, every, lag = rng.expovariate(20), rng.randint(1, 6), rng.choice([0, 0, 1, 4])
        notes = explain([decay], every=every, lag=lag)
        share = math.exp(-decay * (every - 1 + lag))
        assert bool(notes) == (share < NEAR_ESS_FRACTION)
        if not notes:
            continue
        far += 1
        advised = {key: int(value) for key, value in re.findall(r"sync\.(\w+)=(\d+)", notes[0])}
        oldest = advised["every"] - 1 + advised.get("lag", lag)
        assert math.exp(-decay * oldest) >= NEAR_ESS_FRACTION > math.exp(-decay * (oldest + 1))
        assert explain([decay], **{"every": every, "lag": lag} | advised) == []
    assert far > 100
