"""The trainer's jobs on Kubernetes, against an API that checks what it is sent and misbehaves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from bapo_core.errors import BapoError
from pipelines import backends
from pipelines.backends import JobState, ensure, remove
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
    return KubeflowBackend("team", "bapo", cluster.configuration(), give_up_s=1.0)


@pytest.fixture(autouse=True)
def _no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(backends, "GONE_WITHIN_S", 0.2)


def job(run: str = "countdown", **resources: Any) -> dict[str, Any]:
    return build_job(run, DEPLOYMENT, Resources(**resources))


def test_a_job_arrives_as_it_was_built(cluster: FakeKubernetes, backend: KubeflowBackend) -> None:
    assert backend.state(NAME) is None
    assert backend.create(job(workers=2))
    assert cluster.objects["pytorchjobs"][NAME] == job(workers=2)
    state = backend.state(NAME)
    assert state is not None
    assert state.phase == "waiting"


def test_a_job_that_is_there_is_taken_over(
    cluster: FakeKubernetes, backend: KubeflowBackend
) -> None:
    ensure(backend, job())
    cluster.condition(NAME, "Running")
    ensure(backend, job())
    assert cluster.objects["pytorchjobs"][NAME]["spec"] == job()["spec"]
    assert not [request for request in cluster.requests if request.startswith("DELETE")]


def test_a_job_of_other_resources_or_another_workflow_is_replaced(
    cluster: FakeKubernetes, backend: KubeflowBackend
) -> None:
    """The old workflow would take it along when it is deleted."""
    old = build_job("countdown", DEPLOYMENT, Resources(), owner=Owner("bapo-1", "u-1"))
    ensure(backend, old)
    cluster.condition(NAME, "Running")
    new = build_job("countdown", DEPLOYMENT, Resources(), owner=Owner("bapo-2", "u-2"))
    ensure(backend, new)
    assert cluster.objects["pytorchjobs"][NAME] == new
    ensure(backend, job(workers=3))
    assert cluster.objects["pytorchjobs"][NAME] == job(workers=3)


def test_a_job_that_is_being_deleted_is_waited_for(
    cluster: FakeKubernetes, backend: KubeflowBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    ensure(backend, job())
    cluster.objects["pytorchjobs"][NAME]["metadata"]["deletionTimestamp"] = "2026-11-21T18:00:00Z"
    state = backend.state(NAME)
    assert state is not None
    assert state.phase == "ending"
    cluster.finalizer = True

    def gone(_: float) -> None:
        cluster.objects["pytorchjobs"].pop(NAME, None)

    monkeypatch.setattr(backends.time, "sleep", gone)
    ensure(backend, job())
    assert "deletionTimestamp" not in cluster.objects["pytorchjobs"][NAME]["metadata"]


@pytest.mark.parametrize("end", ["Failed", "Succeeded"])
def test_a_job_that_is_over_is_replaced(
    cluster: FakeKubernetes, backend: KubeflowBackend, end: str
) -> None:
    ensure(backend, job())
    cluster.condition(NAME, end)
    ensure(backend, job(workers=2))
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
def test_how_a_job_is(
    cluster: FakeKubernetes, backend: KubeflowBackend, kind: str, phase: str
) -> None:
    backend.create(job())
    cluster.condition(NAME, "Created")
    if kind != "Created":
        cluster.condition(NAME, "Running")
        cluster.condition(NAME, kind, "Because", "of something")
    state = backend.state(NAME)
    assert state is not None
    assert state.phase == phase


def test_why_a_job_waits(cluster: FakeKubernetes, backend: KubeflowBackend) -> None:
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
    assert "finds no node: 0/3 nodes are available: 3 Insufficient" in _reason(backend)


def test_why_a_job_failed(cluster: FakeKubernetes, backend: KubeflowBackend) -> None:
    backend.create(job())
    cluster.condition(NAME, "Failed", "PyTorchJobFailed", "PyTorchJob countdown is failed")
    assert _reason(backend) == (
        "PyTorchJobFailed: PyTorchJob countdown is failed; its pods are gone"
    )
    ended = {"state": {"terminated": {"exitCode": 1, "reason": "Error"}}}
    pod = cluster.pod(NAME, phase="Failed", containerStatuses=[_container(ended)])
    cluster.logs[pod] = '{"level": "error", "message": "model.path: no such model"}\n'
    reason = _reason(backend)
    assert reason.startswith(f"{NAME}-worker-0 ended with 1 (Error)")
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


def test_deleting_is_waited_for(cluster: FakeKubernetes, backend: KubeflowBackend) -> None:
    backend.create(job())
    remove(backend, NAME)
    assert backend.state(NAME) is None
    remove(backend, NAME)  # nothing there is nothing wrong
    backend.create(job())
    cluster.finalizer = True
    with pytest.raises(BapoError, match=f"{NAME} was deleted but is still there"):
        remove(backend, NAME)


def test_only_our_own_jobs_are_listed(cluster: FakeKubernetes, backend: KubeflowBackend) -> None:
    backend.create(job())
    backend.create(job("other"))
    stranger = job("stranger")
    stranger["metadata"]["labels"] = {"app.kubernetes.io/name": "somebody-elses"}
    cluster.objects["pytorchjobs"]["stranger"] = stranger
    cousin = build_job("countdown", replace(DEPLOYMENT, release="other-release"), Resources())
    assert backend.create(cousin), "it has another name"
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


def test_a_job_whose_pipeline_is_over_or_gone_is_abandoned(
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
    ("changes", "ending"),
    [
        ({"status": {"phase": "Running"}}, False),
        ({"spec": {"activeDeadlineSeconds": 0}}, True),
        ({"spec": {"shutdown": "Terminate"}}, True),
        ({"status": {"phase": "Failed"}}, True),
    ],
)
def test_a_drained_node_is_no_cancellation(
    cluster: FakeKubernetes, backend: KubeflowBackend, changes: dict[str, Any], ending: bool
) -> None:
    cluster.objects["workflows"]["w"] = {"metadata": {"name": "w", "uid": "u"}, **changes}
    assert backend.is_ending("w") is ending
    assert backend.is_ending("not-there")


@pytest.mark.parametrize("status", [429, 500, 503])
def test_what_may_pass_is_repeated(
    cluster: FakeKubernetes, backend: KubeflowBackend, status: int
) -> None:
    cluster.refusals = [Refusal(status, "later"), Refusal(status, "later")]
    assert backend.create(job())
    assert NAME in cluster.objects["pytorchjobs"]


def test_a_creation_whose_answer_was_lost_is_taken_over(
    cluster: FakeKubernetes, backend: KubeflowBackend
) -> None:
    """The server has done it and then failed: the second try finds the job there."""
    cluster.objects["pytorchjobs"][NAME] = job()
    cluster.refusals = [Refusal(500, "connection to etcd lost")]
    ensure(backend, job())


def test_an_api_that_stays_away_is_given_up(
    cluster: FakeKubernetes, backend: KubeflowBackend
) -> None:
    cluster.refusals = [Refusal(503, "no leader")] * 100
    with pytest.raises(ApiUnavailable, match="could not create bapo-countdown for 1 s"):
        backend.create(job())


@pytest.mark.timeout(50)
def test_an_api_that_says_nothing_is_given_up(
    cluster: FakeKubernetes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelines.kubeflow.REQUEST_S", 0.2)
    backend = KubeflowBackend("team", "bapo", cluster.configuration(), give_up_s=0.3)
    cluster.refusals = [Refusal(500, "", silent_s=60)] * 100
    with pytest.raises(ApiUnavailable, match="see whether the control plane is well"):
        backend.create(job())  # the test's own time limit is far below a minute's silence


@pytest.mark.parametrize(
    ("refusal", "words"),
    [
        (Refusal(403, "pods is forbidden"), "bind the chart's pipeline role"),
        (Refusal(403, "exceeded quota: team"), "a quota is used up: free some of it"),
        (Refusal(401, "Unauthorized"), "token is not accepted"),
        (Refusal(422, "spec.elasticPolicy: unknown"), "is the training operator 1.9"),
    ],
)
def test_a_refusal_says_what_to_do(
    cluster: FakeKubernetes, backend: KubeflowBackend, refusal: Refusal, words: str
) -> None:
    cluster.refusals = [refusal]
    with pytest.raises(BapoError, match=words) as caught:
        backend.create(job())
    assert refusal.message in str(caught.value)


def test_a_missing_operator_is_named(cluster: FakeKubernetes, backend: KubeflowBackend) -> None:
    cluster.operator = False
    with pytest.raises(BapoError, match="is the Kubeflow training operator installed"):
        backend.create(job())


def test_a_mistake_of_ours_is_not_taken_for_an_outage(
    backend: KubeflowBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise TypeError("no such argument")

    monkeypatch.setattr(backend._client.custom_api, "create_namespaced_custom_object", broken)
    with pytest.raises(RuntimeError, match="no such argument"):
        backend.create(job())


def test_nothing_is_over_while_it_lasts() -> None:
    assert [JobState(phase).over for phase in ("waiting", "running", "restarting")] == [False] * 3  # type: ignore[arg-type]
