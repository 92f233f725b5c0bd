"""Tests the scaling of the rollout replicas by the runs of a real buffer service."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from pipelines.scaling import RolloutScaler
from services.stack.stack import Endpoints
from tests.integration.driver import Driver, small_config, stop_open_runs

IDLE_S = 600.0


@dataclass
class OneStatefulSet:
    """A StatefulSet, and a clock that the test moves."""

    desired: int = 2
    now: float = 0.0
    log: list[str] = field(default_factory=list)

    def replicas(self, name: str) -> int:
        assert name == "bapo-rollout"
        return self.desired

    def scale(self, name: str, replicas: int) -> None:
        assert name == "bapo-rollout"
        self.desired = replicas


@pytest.fixture
def cluster() -> OneStatefulSet:
    return OneStatefulSet()


def test_replicas_start_for_a_run_and_end_some_time_after_the_last_one(
    stack: Endpoints, cluster: OneStatefulSet
) -> None:
    stop_open_runs(stack.buffer_url, stack.token)
    driver = Driver(stack, small_config("scaled"))
    driver.client.stop()
    scaler = RolloutScaler(
        driver.client,
        cluster,
        "bapo-rollout",
        2,
        IDLE_S,
        cluster.log.append,
        clock=lambda: cluster.now,
    )
    scaler.step()
    assert cluster.desired == 2, "a run may have ended just before the scaler started"
    cluster.now += IDLE_S
    scaler.step()
    assert cluster.desired == 0
    driver.client.take_turn(reopen=True)
    scaler.step()
    assert cluster.desired == 2
    driver.client.stop()
    cluster.now += IDLE_S / 2
    scaler.step()
    assert cluster.desired == 2, "the next run may follow soon"
    cluster.now += IDLE_S / 2
    scaler.step()
    assert cluster.desired == 0
    assert cluster.log == [
        "bapo-rollout is scaled to 0 replicas, because no run needs them",
        "bapo-rollout is scaled to 2 replicas, for run scaled",
        "bapo-rollout is scaled to 0 replicas, because no run needs them",
    ]
