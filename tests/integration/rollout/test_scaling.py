"""Tests the scaling of the rollout replicas by the runs of a real buffer service."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from pipelines.cluster import Cluster
from pipelines.scaling import LEADER_WORKER_SETS, STATEFUL_SETS, RolloutScaler, Workload
from services.stack.stack import Endpoints
from tests.integration.support.driver import Driver, small_config, stop_open_runs
from tests.integration.support.fake_kubernetes import fake_kubernetes

IDLE_S = 600.0


@dataclass
class OneStatefulSet:
    """A StatefulSet, and a clock that the test moves."""

    desired: int = 2
    now: float = 0.0
    log: list[str] = field(default_factory=list)

    def replicas(self, kind: Workload, name: str) -> int:
        assert (kind, name) == (STATEFUL_SETS, "bapo-rollout")
        return self.desired

    def scale(self, kind: Workload, name: str, replicas: int) -> None:
        assert (kind, name) == (STATEFUL_SETS, "bapo-rollout")
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
        STATEFUL_SETS,
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


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        (STATEFUL_SETS, "/apis/apps/v1/namespaces/team/statefulsets/bapo/scale"),
        (
            LEADER_WORKER_SETS,
            "/apis/leaderworkerset.x-k8s.io/v1/namespaces/team/leaderworkersets/bapo/scale",
        ),
    ],
)
def test_workloads_of_both_kinds_are_scaled_by_their_subresource(kind: Workload, path: str) -> None:
    with fake_kubernetes(namespace="team") as kubernetes:
        kubernetes.objects[kind[2]]["bapo"] = {
            "metadata": {"name": "bapo"},
            "spec": {"replicas": 2},
        }
        cluster = Cluster("team", kubernetes.configuration())
        for desired in (2, 0, 3):
            cluster.scale(kind, "bapo", desired)
            assert cluster.replicas(kind, "bapo") == desired
        assert set(kubernetes.requests) == {f"GET {path}", f"PATCH {path}"}
