"""Tests replicas of several nodes with the real controller of LeaderWorkerSets, and vLLM on CPUs.

`make test-cluster-all` runs them. The cluster's nodes may be fewer than the replica's.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.conftest import Release
from tests.cluster.kubectl import kubectl, wait_until
from tests.cluster.test_cluster import WAIT_S, pipeline, wait_for_first_step

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

LEADER, WORKER = "bapo-nodes-0", "bapo-nodes-0-1"


@pytest.fixture
def two_nodes(release: Release) -> Iterator[Release]:
    """Makes the release's replica one of two pods."""
    installed = kubectl("get", "crd", "-o", "name")
    assert "leaderworkersets.leaderworkerset.x-k8s.io" in installed, (
        "install LeaderWorkerSet 0.7 or later first"
    )
    release.upgrade("rollout.nodes=2", "rollout.tensorParallelSize=2", wait=False)
    wait_until(lambda: uids(release).keys() == {LEADER, WORKER}, "the two pods", WAIT_S)
    yield release
    release.upgrade()


def uids(release: Release) -> dict[str, str]:
    """Returns the uids of the pods of rollout replicas by name."""
    label = "app.kubernetes.io/component=rollout"
    found = {}
    for name in release.namespace.names("pods", label):
        pod = release.namespace.get("pod", name)
        if pod is not None and "deletionTimestamp" not in pod["metadata"]:
            found[name] = pod["metadata"]["uid"]
    return found


def test_two_nodes_serve_a_run_and_outlive_the_loss_of_a_pod(
    two_nodes: Release, no_run: None
) -> None:
    run = pipeline(two_nodes, "nodes")
    thread = run.start()
    wait_for_first_step(two_nodes, run)
    client = two_nodes.client("nodes")
    (replica,) = client.replicas()
    assert (replica.name, replica.state) == (LEADER, "serving"), "workers are no replicas"
    before = uids(two_nodes)
    two_nodes.namespace.kubectl("delete", "pod", WORKER, "--wait=false")

    def is_replaced() -> bool:
        now = uids(two_nodes)
        return now.keys() == before.keys() and not set(now.values()) & set(before.values())

    wait_until(is_replaced, "the whole group to be made anew", WAIT_S, run.log)
    thread.join(WAIT_S)
    assert not thread.is_alive(), run.log()
    assert client.run_state().status == "finished", run.logs
