"""Tests queues of Kueue on a cluster that has it: admission, waiting for quota, preemption.

`make test-cluster-all` runs them. Kueue must manage PyTorchJobs (its configuration's
`integrations.frameworks`). TrainJobs are not tried: Kueue 0.14 does not start those of Kubeflow
Trainer 2.3 (docs/decisions/0006-kubernetes.md).
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.cluster.conftest import Release
from tests.cluster.kubectl import kubectl, wait_until
from tests.cluster.test_cluster import WAIT_S, pipeline, wait_for_first_step

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

QUEUE = "bapo-test"
QUOTA_CPUS = 1


@pytest.fixture(scope="module")
def queue(release: Release) -> Iterator[str]:
    """Creates a queue of one core in the release's namespace."""
    installed = kubectl("get", "crd", "-o", "name")
    assert "clusterqueues.kueue.x-k8s.io" in installed, "install Kueue 0.14 or later first"
    covered = ["cpu", "memory"]
    resources = [
        {"name": "cpu", "nominalQuota": str(QUOTA_CPUS)},
        {"name": "memory", "nominalQuota": "64Gi"},
    ]
    groups = [{"coveredResources": covered, "flavors": [{"name": QUEUE, "resources": resources}]}]
    version = "kueue.x-k8s.io/v1beta1"
    objects = [
        {"apiVersion": version, "kind": "ResourceFlavor", "metadata": {"name": QUEUE}},
        {
            "apiVersion": version,
            "kind": "ClusterQueue",
            "metadata": {"name": QUEUE},
            "spec": {"namespaceSelector": {}, "resourceGroups": groups},
        },
        {
            "apiVersion": version,
            "kind": "LocalQueue",
            "metadata": {"name": QUEUE, "namespace": release.namespace.name},
            "spec": {"clusterQueue": QUEUE},
        },
    ]
    kubectl(
        "apply", "-f", "-", stdin=json.dumps({"kind": "List", "apiVersion": "v1", "items": objects})
    )
    yield QUEUE
    release.upgrade()
    for kind in ("clusterqueue", "resourceflavor"):
        kubectl("delete", kind, QUEUE, "--wait=false")


def occupy(release: Release) -> None:
    """Fills the queue with a Job that does nothing."""
    container = {
        "name": "idle",
        "image": f"{release.registry}/bapo/service:0.2.0",
        "command": ["sleep", "3600"],
        "resources": {"requests": {"cpu": str(QUOTA_CPUS), "memory": "64Mi"}},
    }
    pod = {"containers": [container], "restartPolicy": "Never", "terminationGracePeriodSeconds": 0}
    release.namespace.create(
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": "occupant", "labels": {"kueue.x-k8s.io/queue-name": QUEUE}},
            "spec": {"suspend": True, "template": {"spec": pod}},
        }
    )

    def is_admitted() -> bool:
        job = release.namespace.get("job", "occupant")
        return job is not None and not job["spec"]["suspend"]

    wait_until(is_admitted, "the admission of the Job", WAIT_S)


def test_a_job_waits_for_quota_is_preempted_and_resumes(
    release: Release, no_run: None, queue: str
) -> None:
    release.upgrade(f"kueue.queue={queue}")
    occupy(release)
    name = "queued"
    run = pipeline(release, name, steps=12)
    thread = run.start()
    line = f"Kueue has not admitted it from the queue {queue}: couldn't assign flavors"
    wait_until(lambda: line in run.log(), "what Kueue says in the step's log", WAIT_S, run.log)
    assert not release.namespace.names("pods", f"bapo/run={name}")

    release.namespace.kubectl("delete", "job", "occupant")
    wait_for_first_step(release, run)

    def set_policy(policy: str) -> None:
        change = json.dumps({"spec": {"stopPolicy": policy}})
        kubectl("patch", "clusterqueue", queue, "--type=merge", "-p", change)

    set_policy("HoldAndDrain")  # evicts what was admitted, as preemption does
    preempted = f"job bapo-{name} is waiting: Kueue has not admitted it"
    wait_until(
        lambda: not release.namespace.names("pods", f"bapo/run={name}"), "preemption", WAIT_S
    )
    wait_until(lambda: run.log().count(preempted) >= 2, "a word of it", WAIT_S, run.log)
    set_policy("None")
    thread.join(2 * WAIT_S)
    assert not thread.is_alive(), run.log()
    assert release.client(name).run_state().status == "finished", run.logs
