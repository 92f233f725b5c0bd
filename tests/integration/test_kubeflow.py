"""Tests `KubeflowBackend` against a Kubernetes API that checks requests and can misbehave."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from bapo_core.errors import BapoError
from pipelines import backends
from pipelines.backends import JobState, ensure_job, remove_job
from pipelines.kubeflow import ApiUnavailable, KubeflowBackend
from pipelines.pytorchjob import Owner, Resources, build_job, job_name
from tests.integration.fake_kubernetes import FakeKubernetes, Refusal, fake_kubernetes
from tests.unit.pipelines.test_pytorchjob import DEPLOYMENT

NAME = job_name("bapo", "countdown")
WAITING = {"state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}}


@pytest.fixture
def cluster() -> Iterator[FakeKubernetes]:
    with fake_kubernetes(namespace="team") as fake:
        yield fake


@pytest.fixture
def backend(cluster: FakeKubernetes) -> KubeflowBackend:
    return KubeflowBackend("team", "bapo", cluster.configuration(), retry_for_s=1.0)


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "POLL_INTERVAL_S", 0.01)
    monkeypatch.setattr(backends, "DELETE_TIMEOUT_S", 0.2)


def job(run: str = "countdown", **resources: Any) -> dict[str, Any]:
    return build_job(run, DEPLOYMENT, Resources(**resources))


def test_a_job_arrives_as_it_was_built(cluster: FakeKubernetes, backend: KubeflowBackend) -> None:
    assert backend.state(NAME) is None
    assert backend.create(job(workers=2))
    assert cluster.objects["pytorchjobs"][NAME] == job(workers=2)
    state = backend.state(NAME)
    assert state is not None
    assert state.phase == "waiting"


@pytest.mark.parametrize("version", ["v1beta1", "v1beta2"])
def test_a_job_that_kueue_suspends_says_why_it_waits(
    cluster: FakeKubernetes, backend: KubeflowBackend, version: str
) -> None:
    cluster.kueue = version
    queued = build_job("countdown", replace(DEPLOYMENT, queue="gpus"), Resources())
    assert backend.create(queued)
    assert not backend.is_queued(NAME)
    stored = cluster.objects["pytorchjobs"][NAME]
    stored["spec"]["runPolicy"]["suspend"] = True  # as Kueue's webhook does
    cluster.condition(NAME, "Suspended", "PyTorchJobSuspended", "PyTorchJob is suspended.")
    message = "couldn't assign flavors to pod set worker: insufficient unused quota"
    cluster.objects["workloads"]["pytorchjob-countdown-1"] = {
        "metadata": {"ownerReferences": [{"kind": "PyTorchJob", "name": NAME}]},
        "status": {
            "conditions": [{"type": "QuotaReserved", "status": "False", "message": message}]
        },
    }
    assert backend.is_queued(NAME)
    state = backend.state(NAME)
    assert state is not None
    assert (state.phase, state.reason) == (
        "waiting",
        f"Kueue has not admitted it from the queue gpus: {message}",
    )


def test_without_kueue_no_job_is_queued(backend: KubeflowBackend) -> None:
    assert backend.create(job())
    assert not backend.is_queued(NAME)


def test_a_job_that_exists_is_adopted(cluster: FakeKubernetes, backend: KubeflowBackend) -> None:
    ensure_job(backend, job())
    cluster.condition(NAME, "Running")
    ensure_job(backend, job())
    assert cluster.objects["pytorchjobs"][NAME]["spec"] == job()["spec"]
    assert not [request for request in cluster.requests if request.startswith("DELETE")]


def test_a_job_of_other_resources_or_another_workflow_is_replaced(
    cluster: FakeKubernetes, backend: KubeflowBackend
) -> None:
    """Deleting the old workflow would delete the job with it."""
    old = build_job("countdown", DEPLOYMENT, Resources(), owner=Owner("bapo-1", "u-1"))
    ensure_job(backend, old)
    cluster.condition(NAME, "Running")
    new = build_job("countdown", DEPLOYMENT, Resources(), owner=Owner("bapo-2", "u-2"))
    ensure_job(backend, new)
    assert cluster.objects["pytorchjobs"][NAME] == new
    ensure_job(backend, job(workers=3))
    assert cluster.objects["pytorchjobs"][NAME] == job(workers=3)


def test_a_new_job_waits_until_the_old_one_of_its_name_is_deleted(
    cluster: FakeKubernetes, backend: KubeflowBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    ensure_job(backend, job())
    cluster.objects["pytorchjobs"][NAME]["metadata"]["deletionTimestamp"] = "2026-11-21T18:00:00Z"
    state = backend.state(NAME)
    assert state is not None
    assert state.phase == "terminating"
    cluster.finalizer = True

    def finish_deletion(_: float) -> None:
        cluster.objects["pytorchjobs"].pop(NAME, None)

    monkeypatch.setattr(backends.time, "sleep", finish_deletion)
    ensure_job(backend, job())
    assert "deletionTimestamp" not in cluster.objects["pytorchjobs"][NAME]["metadata"]


@pytest.mark.parametrize("end", ["Failed", "Succeeded"])
def test_a_job_that_has_finished_is_replaced(
    cluster: FakeKubernetes, backend: KubeflowBackend, end: str
) -> None:
    ensure_job(backend, job())
    cluster.condition(NAME, end)
    ensure_job(backend, job(workers=2))
    assert cluster.objects["pytorchjobs"][NAME] == job(workers=2)


@pytest.mark.parametrize(
    ("kind", "phase"),
    [
        ("Created", "waiting"),
        ("Running", "running"),
        ("Restarting", "restarting"),
        ("Succeeded", "succeeded"),
        ("Failed", "failed"),
    ],
)
def test_conditions_of_a_job_become_its_phase(
    cluster: FakeKubernetes, backend: KubeflowBackend, kind: str, phase: str
) -> None:
    backend.create(job())
    cluster.condition(NAME, "Created")
    if kind != "Created":
        cluster.condition(NAME, "Running")
        cluster.condition(NAME, kind, "SomeReason", "some message")
    state = backend.state(NAME)
    assert state is not None
    assert state.phase == phase


def test_the_reason_of_a_waiting_job_is_the_most_specific_one(
    cluster: FakeKubernetes, backend: KubeflowBackend
) -> None:
    backend.create(job())
    cluster.event(NAME, "FailedCreatePod", "exceeded quota: gpus, requested: nvidia.com/gpu=8")
    assert _reason(backend) == (
        "FailedCreatePod: exceeded quota: gpus, requested: nvidia.com/gpu=8"
    )
    cluster.pod(NAME, containerStatuses=[_container(WAITING)])
    assert _reason(backend) == f"{NAME}-worker-0: ImagePullBackOff: no such image"
    unscheduled = {
        "type": "PodScheduled",
        "status": "False",
        "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
    }
    cluster.pod(NAME, conditions=[unscheduled])
    assert "has no node: 0/3 nodes are available: 3 Insufficient" in _reason(backend)


def test_the_reason_of_a_failed_job_has_the_last_line_of_its_log(
    cluster: FakeKubernetes, backend: KubeflowBackend
) -> None:
    backend.create(job())
    cluster.condition(NAME, "Failed", "PyTorchJobFailed", "PyTorchJob countdown is failed")
    assert _reason(backend) == (
        "PyTorchJobFailed: PyTorchJob countdown is failed; its pods were deleted"
    )
    ended = {"state": {"terminated": {"exitCode": 1, "reason": "Error"}}}
    pod = cluster.pod(NAME, phase="Failed", containerStatuses=[_container(ended)])
    cluster.logs[pod] = '{"level": "error", "message": "model.path: no such model"}\n'
    reason = _reason(backend)
    assert reason.startswith(f"{NAME}-worker-0 exited with 1 (Error)")
    assert "no such model" in reason
    cluster.pod(NAME, phase="Failed", reason="Evicted", message="low on memory")
    assert _reason(backend) == f"{NAME}-worker-0: Evicted: low on memory"


def _reason(backend: KubeflowBackend) -> str:
    state = backend.state(NAME)
    assert state is not None
    return state.reason


def _container(status: dict[str, Any]) -> dict[str, Any]:
    counts = {"ready": False, "restartCount": 0, "image": "i", "imageID": "i"}
    return {"name": "pytorch", **counts, **status}


def test_removing_a_job_waits_for_its_end(
    cluster: FakeKubernetes, backend: KubeflowBackend
) -> None:
    backend.create(job())
    remove_job(backend, NAME)
    assert backend.state(NAME) is None
    remove_job(backend, NAME)  # a job that does not exist counts as removed
    backend.create(job())
    cluster.finalizer = True
    with pytest.raises(BapoError, match=f"{NAME} was deleted but still exists"):
        remove_job(backend, NAME)


def test_only_our_own_jobs_are_listed(cluster: FakeKubernetes, backend: KubeflowBackend) -> None:
    backend.create(job())
    backend.create(job("other"))
    stranger = job("stranger")
    stranger["metadata"]["labels"] = {"app.kubernetes.io/name": "another-project"}
    cluster.objects["pytorchjobs"]["stranger"] = stranger
    cousin = build_job("countdown", replace(DEPLOYMENT, release="other-release"), Resources())
    assert backend.create(cousin), "the release is part of its name"
    assert backend.jobs() == {NAME: "countdown", "bapo-other": "other"}


def test_a_job_belongs_to_its_workflow(cluster: FakeKubernetes, backend: KubeflowBackend) -> None:
    assert backend.owner("") is None
    assert backend.owner("bapo-x7") is None
    cluster.objects["workflows"]["bapo-x7"] = {"metadata": {"name": "bapo-x7", "uid": "u-1"}}
    owner = backend.owner("bapo-x7")
    assert owner is not None
    assert owner.uid == "u-1"
    cluster.refusals = [Refusal(403, "workflows is forbidden")]
    assert backend.owner("bapo-x7") is None


def test_a_job_whose_workflow_has_finished_or_was_deleted_is_abandoned(
    cluster: FakeKubernetes, backend: KubeflowBackend
) -> None:
    backend.create(build_job("countdown", DEPLOYMENT, Resources(), owner=Owner("bapo-1", "u-1")))
    workflow = {"metadata": {"name": "bapo-1", "uid": "u-1"}, "status": {"phase": "Running"}}
    cluster.objects["workflows"]["bapo-1"] = workflow
    assert not backend.abandoned(NAME)
    workflow["status"] = {"phase": "Failed"}
    assert backend.abandoned(NAME)
    del cluster.objects["workflows"]["bapo-1"]
    assert backend.abandoned(NAME)


@pytest.mark.parametrize(
    ("changes", "terminating"),
    [
        ({"status": {"phase": "Running"}}, False),
        ({"spec": {"activeDeadlineSeconds": 0}}, True),
        ({"spec": {"shutdown": "Terminate"}}, True),
        ({"status": {"phase": "Failed"}}, True),
    ],
)
def test_a_drained_node_is_no_cancellation(
    cluster: FakeKubernetes, backend: KubeflowBackend, changes: dict[str, Any], terminating: bool
) -> None:
    cluster.objects["workflows"]["w"] = {"metadata": {"name": "w", "uid": "u"}, **changes}
    assert backend.is_terminating("w") is terminating
    assert backend.is_terminating("not-there")


@pytest.mark.parametrize("status", [429, 500, 503])
def test_transient_errors_are_retried(
    cluster: FakeKubernetes, backend: KubeflowBackend, status: int
) -> None:
    cluster.refusals = [Refusal(status, "later"), Refusal(status, "later")]
    assert backend.create(job())
    assert NAME in cluster.objects["pytorchjobs"]


def test_a_job_whose_creation_was_reported_as_an_error_is_adopted(
    cluster: FakeKubernetes, backend: KubeflowBackend
) -> None:
    """The server creates the job and then fails, so the retry finds that the job exists."""
    cluster.objects["pytorchjobs"][NAME] = job()
    cluster.refusals = [Refusal(500, "connection to etcd lost")]
    cluster.requests.clear()
    ensure_job(backend, job())
    assert not [request for request in cluster.requests if request.startswith("DELETE")]


def test_an_api_that_stays_unavailable_fails_the_call(
    cluster: FakeKubernetes, backend: KubeflowBackend
) -> None:
    cluster.refusals = [Refusal(503, "no leader")] * 100
    with pytest.raises(ApiUnavailable, match="could not create bapo-countdown for 1 s"):
        backend.create(job())


@pytest.mark.timeout(20)
def test_an_api_that_never_answers_fails_the_call(
    cluster: FakeKubernetes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelines.kubeflow.REQUEST_TIMEOUT_S", 0.2)
    backend = KubeflowBackend("team", "bapo", cluster.configuration(), retry_for_s=0.3)
    cluster.refusals = [Refusal(500, "", delay_s=60)] * 100
    with pytest.raises(ApiUnavailable, match="check that the control plane is healthy"):
        backend.create(job())  # the test's time-out is far below the server's delay


@pytest.mark.parametrize(
    ("refusal", "remedy"),
    [
        (Refusal(403, "pods is forbidden"), "bind the chart's pipeline role"),
        (
            Refusal(403, "exceeded quota: team"),
            "a quota is used up: free some of it, or request less",
        ),
        (Refusal(401, "Unauthorized"), "token is not accepted"),
        (Refusal(422, "spec.elasticPolicy: unknown"), "is the training operator 1.9"),
    ],
)
def test_a_refusal_names_the_remedy(
    cluster: FakeKubernetes, backend: KubeflowBackend, refusal: Refusal, remedy: str
) -> None:
    cluster.refusals = [refusal]
    with pytest.raises(BapoError, match=remedy) as caught:
        backend.create(job())
    assert refusal.message in str(caught.value)


def test_a_missing_operator_is_named(cluster: FakeKubernetes, backend: KubeflowBackend) -> None:
    cluster.operator = False
    with pytest.raises(BapoError, match="is the Kubeflow training operator installed"):
        backend.create(job())


def test_a_programming_error_is_not_retried(
    backend: KubeflowBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise TypeError("no such argument")

    monkeypatch.setattr(backend._client.custom_api, "create_namespaced_custom_object", broken)
    with pytest.raises(RuntimeError, match="no such argument"):
        backend.create(job())


def test_only_jobs_that_succeeded_or_failed_have_finished() -> None:
    assert not JobState("waiting").finished
    assert not JobState("running").finished
    assert not JobState("restarting").finished
    assert not JobState("terminating").finished
    assert JobState("succeeded").finished
    assert JobState("failed").finished
