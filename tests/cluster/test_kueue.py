"""Tests queues of Kueue on a cluster that has it: admission, waiting for quota, preemption, and
settings of Kueue itself.

`make test-cluster-all` runs them. Kueue must manage PyTorchJobs (its configuration's
`integrations.frameworks`). TrainJobs are not tried: Kueue 0.14 does not start those of Kubeflow
Trainer 2.3 (docs/decisions/0006-kubernetes.md). The tests change Kueue's configuration, and restore
it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import yaml

from tests.cluster.argo import StepFailed
from tests.cluster.conftest import Release
from tests.cluster.kubectl import helm, kubectl, wait_until
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


@contextmanager
def kueue_settings(**changes: Any) -> Iterator[None]:
    """Restarts Kueue with other settings, and with its own at the end.

    changes: settings of its configuration, at its first level.
    """
    (source,) = (
        volume["configMap"]["name"]
        for volume in _kueue("deployment")["spec"]["template"]["spec"]["volumes"]
        if "configMap" in volume
    )
    data = _kueue("configmap", source)["data"]
    ((key, text),) = data.items()
    _configure_kueue(source, {key: yaml.safe_dump(yaml.safe_load(text) | changes)})
    try:
        yield
    finally:
        _configure_kueue(source, data)


def _kueue(kind: str, *names: str) -> Any:
    """Returns an object of Kueue's; without a name, the only one of its kind."""
    found = json.loads(kubectl("get", kind, *names, "-n", "kueue-system", "-o", "json"))
    return found if names else found["items"][0]


def _configure_kueue(config_map: str, data: dict[str, str]) -> None:
    deployment = f"deployment/{_kueue('deployment')['metadata']['name']}"
    change = json.dumps({"data": data})
    for command in (
        ("patch", "configmap", config_map, "--type=merge", "-p", change),
        ("rollout", "restart", deployment),
        ("rollout", "status", deployment, "--timeout=120s"),
    ):
        kubectl(*command, "-n", "kueue-system")
    # The webhooks of the pod before may be called until it is gone.
    wait_until(
        lambda: (
            len(json.loads(kubectl("get", "pods", "-n", "kueue-system", "-o", "json"))["items"])
            == 1
        ),
        "the end of Kueue's former pod",
        WAIT_S,
    )


def occupy(release: Release) -> None:
    """Fills the queue with a Job that does nothing."""
    container = {
        "name": "idle",
        "image": f"{release.registry}/bapo/service:0.3.0",
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


def test_a_kueue_that_does_not_manage_pytorchjobs_is_recognised(
    release: Release, no_run: None, queue: str
) -> None:
    """From 0.19 on, Kueue's defaults leave PyTorchJobs out: the quota would be ignored."""
    release.upgrade(f"kueue.queue={queue}")
    with kueue_settings(integrations={"frameworks": ["batch/job"]}):
        run = pipeline(release, "unmanaged")
        with pytest.raises(StepFailed, match="Kueue does not manage job bapo-unmanaged: add"):
            run.execute()
    assert not release.jobs()
    assert release.client("unmanaged").run_state().status == "stopped"


NO_PODS = {"integrations": {"frameworks": ["batch/job", "kubeflow.org/pytorchjob"]}}
"""Settings of a Kueue that does not manage pods."""


def elsewhere(namespace: str) -> dict[str, Any]:
    """Returns settings of a Kueue that manages what has no queue in other namespaces alone."""
    own = {
        "key": "kubernetes.io/metadata.name",
        "operator": "NotIn",
        "values": ["kube-system", "kueue-system", namespace],
    }
    return {"managedJobsNamespaceSelector": {"matchExpressions": [own]}}


@pytest.mark.parametrize("pods", [True, False])
def test_a_release_works_where_kueue_suspends_what_has_no_queue(
    release: Release, no_run: None, queue: str, pods: bool
) -> None:
    """The hooks and the reaper are Jobs, of which none may wait for a queue that it does not have.

    pods: whether Kueue manages pods too. The release's, and those of the pipeline's steps, have no
    queue, so their namespace must be excepted then.
    """
    settings = elsewhere(release.namespace.name) if pods else NO_PODS
    own = f"kueue.ownJobsQueue={queue}"
    release.upgrade(own)
    with kueue_settings(manageJobsWithoutQueueName=True, **settings):
        release.upgrade(own, f"verifier.podAnnotations.managed={'pods' if pods else 'jobs'}")
        assert "all checks passed" in helm("test", "bapo", "-n", release.namespace.name, "--logs")
        reap = f"reap-{pods}".lower()
        release.namespace.kubectl("create", "job", reap, "--from=cronjob/bapo-reaper")
        finished = ["wait", "--for=condition=complete", f"job/{reap}", f"--timeout={WAIT_S}s"]
        release.namespace.kubectl(*finished)
        workloads = release.namespace.names("workloads.kueue.x-k8s.io")
        assert any(reap in name for name in workloads), "Kueue did not manage the reaper"

        release.upgrade(own, f"kueue.queue={queue}")
        name = f"managed-{pods}".lower()
        run = pipeline(release, name, steps=3)
        run.execute()
        assert release.client(name).run_state().status == "finished", run.logs
        assert "Kueue does not manage" not in run.logs["train"]
