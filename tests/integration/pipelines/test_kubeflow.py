"""Tests `KubeflowBackend` against a Kubernetes API that checks requests and can misbehave."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from bapo_core.errors import BapoError, ConfigError
from pipelines import backends
from pipelines.backends import JobState, ensure_job, remove_job
from pipelines.cluster import ApiUnavailable, Cluster, RequestRefused
from pipelines.configuration import load_stored_config
from pipelines.kubeflow import KubeflowBackend
from pipelines.pytorchjob import build_pytorchjob
from pipelines.settings import JobKindName
from pipelines.training_job import Owner, Resources, TrainingJob, job_name
from pipelines.trainjob import build_runtime, build_trainjob
from tests.integration.support.fake_kubernetes import FakeKubernetes, Refusal, fake_kubernetes
from tests.unit.pipelines.test_training_job import DEPLOYMENT

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


def job(run: str = "countdown", kind: JobKindName = "PyTorchJob", **options: Any) -> TrainingJob:
    owner = options.pop("owner", None)
    deployment = replace(DEPLOYMENT, job_kind=kind)
    return TrainingJob(run, deployment, Resources(**options), owner=owner)


def phase(backend: KubeflowBackend) -> str:
    state = backend.state(NAME)
    assert state is not None
    return state.phase


def test_a_pytorchjob_arrives_as_it_was_built(
    cluster: FakeKubernetes, backend: KubeflowBackend
) -> None:
    assert backend.state(NAME) is None
    assert backend.create(job(workers=2))
    assert cluster.objects["pytorchjobs"][NAME] == build_pytorchjob(job(workers=2))
    assert phase(backend) == "waiting"


def test_a_trainjob_arrives_with_its_runtime(
    cluster: FakeKubernetes, backend: KubeflowBackend
) -> None:
    asked = job(kind="TrainJob", workers=2)
    # A step that was killed left a runtime of an earlier request.
    cluster.objects["trainingruntimes"][NAME] = build_runtime(job(kind="TrainJob"))
    assert backend.state(NAME) is None
    assert backend.create(asked)
    owner = Owner(NAME, f"uid-of-{NAME}", "trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert cluster.objects["trainingruntimes"][NAME] == build_runtime(asked, owner)
    assert cluster.objects["trainjobs"][NAME] == build_trainjob(asked)
    assert phase(backend) == "waiting"
    assert not backend.create(asked), "it exists"
    backend.delete(NAME)
    assert not cluster.objects["trainjobs"]
    assert not cluster.objects["trainingruntimes"]


def test_a_trainjob_is_removed_when_its_runtime_is(
    cluster: FakeKubernetes, backend: KubeflowBackend
) -> None:
    """A new TrainJob could otherwise refer to a runtime that is about to go."""
    backend.create(job(kind="TrainJob"))
    del cluster.objects["trainjobs"][NAME]
    pod = cluster.pod(NAME, labels=("jobset.sigs.k8s.io/jobset-name",))
    assert phase(backend) == "terminating", "the runtime still exists"
    del cluster.objects["trainingruntimes"][NAME]
    assert phase(backend) == "terminating", "it holds its GPUs until its pods have ended"
    del cluster.objects["pods"][pod]
    assert backend.state(NAME) is None


def test_a_runtime_without_a_job_is_deleted(
    cluster: FakeKubernetes, backend: KubeflowBackend
) -> None:
    cluster.objects["trainingruntimes"][NAME] = build_runtime(job(kind="TrainJob"))
    remove_job(backend, NAME, log=print)
    assert not cluster.objects["trainingruntimes"]


def test_the_status_of_a_trainjob_becomes_its_phase(
    cluster: FakeKubernetes, backend: KubeflowBackend
) -> None:
    backend.create(job(kind="TrainJob"))
    workers = f"{NAME}-node-0"
    cluster.event(workers, "FailedCreate", "exceeded quota: gpus", kind="Job")
    assert _reason(backend) == "FailedCreate: exceeded quota: gpus"
    labels = ("jobset.sigs.k8s.io/jobset-name",)
    pod = cluster.pod(NAME, labels=labels, containerStatuses=[_container(WAITING)])
    assert _reason(backend) == f"{pod}: ImagePullBackOff: no such image"
    status = cluster.objects["trainjobs"][NAME].setdefault("status", {"conditions": []})
    cluster.pod(NAME, labels=labels, phase="Running")
    status["jobsStatus"] = [{"name": "node", "ready": 1}]
    assert phase(backend) == "running"
    status["jobsStatus"] = [{"name": "node", "ready": 0}]
    cluster.objects["pods"][pod]["metadata"]["labels"]["jobset.sigs.k8s.io/restart-attempt"] = "2"
    assert backend.state(NAME) == JobState(
        "restarting", "restart 2", job(kind="TrainJob").spec_hash, restarts=2
    )
    cluster.condition(NAME, "Complete", jobs="trainjobs")
    assert phase(backend) == "succeeded"
    cluster.condition(NAME, "Failed", "FailedJobs", "jobset failed", jobs="trainjobs")
    ended = {"state": {"terminated": {"exitCode": 1, "reason": "Error"}}}
    cluster.pod(NAME, labels=labels, phase="Failed", containerStatuses=[_container(ended)])
    error = '{"level": "error", "message": "no such model"}'
    cluster.logs[pod] = f"{error}\nE1123 torch/distributed failed (exitcode: 1) local_rank: 0\n"
    assert phase(backend) == "failed"
    assert _reason(backend) == f"{pod} exited with 1 (Error): no such model"


def test_an_upgrade_to_another_kind_of_job_keeps_the_healthy_one(
    cluster: FakeKubernetes, backend: KubeflowBackend
) -> None:
    """Two jobs of one run would take it from each other."""
    ensure_job(backend, job(), log=print)
    cluster.condition(NAME, "Running")
    ensure_job(backend, job(kind="TrainJob"), log=print)
    assert not cluster.objects["trainjobs"]
    assert phase(backend) == "running"
    ensure_job(backend, job(kind="TrainJob", workers=2), log=print)
    assert not cluster.objects["pytorchjobs"]
    assert cluster.objects["trainjobs"].keys() == {NAME}


@pytest.mark.parametrize("version", ["v1beta1", "v1beta2"])
@pytest.mark.parametrize("kind", ["PyTorchJob", "TrainJob"])
def test_a_job_that_kueue_suspends_says_why_it_waits(
    cluster: FakeKubernetes, backend: KubeflowBackend, version: str, kind: JobKindName
) -> None:
    cluster.kueue = version
    queued = replace(DEPLOYMENT, queue="gpus", job_kind=kind)
    assert backend.create(TrainingJob("countdown", queued, Resources()))
    assert not backend.is_queued(NAME)
    plural = f"{kind.lower()}s"
    spec = cluster.objects[plural][NAME]["spec"]
    spec.get("runPolicy", spec)["suspend"] = True  # as Kueue's webhook does
    cluster.condition(NAME, "Suspended", "Suspended", "the job is suspended.", jobs=plural)
    message = "couldn't assign flavors to pod set worker: insufficient unused quota"
    cluster.objects["workloads"]["countdown-1"] = {
        "metadata": {"ownerReferences": [{"kind": kind, "name": NAME}]},
        "status": {
            "conditions": [{"type": "QuotaReserved", "status": "False", "message": message}]
        },
    }
    assert backend.is_queued(NAME)
    assert phase(backend) == "waiting"
    assert _reason(backend) == f"Kueue has not admitted it from the queue gpus: {message}"
    conditions = [{"type": kind, "status": "True"} for kind in ("QuotaReserved", "Admitted")]
    cluster.objects["workloads"]["countdown-1"]["status"] = {"conditions": conditions}
    assert "has admitted it from the queue gpus, but has not started it" in _reason(backend)


def test_without_kueue_no_job_is_queued(backend: KubeflowBackend) -> None:
    assert backend.create(job())
    assert not backend.is_queued(NAME)


def test_a_job_that_exists_is_adopted(cluster: FakeKubernetes, backend: KubeflowBackend) -> None:
    ensure_job(backend, job(), log=print)
    cluster.condition(NAME, "Running")
    ensure_job(backend, job(), log=print)
    assert cluster.objects["pytorchjobs"][NAME]["spec"] == build_pytorchjob(job())["spec"]
    assert not [request for request in cluster.requests if request.startswith("DELETE")]


def test_a_job_of_other_resources_or_another_workflow_is_replaced(
    cluster: FakeKubernetes, backend: KubeflowBackend
) -> None:
    """Deleting the old workflow would delete the job with it."""
    old = job(owner=Owner("bapo-1", "u-1"))
    ensure_job(backend, old, log=print)
    cluster.condition(NAME, "Running")
    new = job(owner=Owner("bapo-2", "u-2"))
    ensure_job(backend, new, log=print)
    assert cluster.objects["pytorchjobs"][NAME] == build_pytorchjob(new)
    ensure_job(backend, job(workers=3), log=print)
    assert cluster.objects["pytorchjobs"][NAME] == build_pytorchjob(job(workers=3))


def test_a_new_job_waits_until_the_old_one_of_its_name_is_deleted(
    cluster: FakeKubernetes, backend: KubeflowBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    ensure_job(backend, job(), log=print)
    cluster.objects["pytorchjobs"][NAME]["metadata"]["deletionTimestamp"] = "2026-11-21T18:00:00Z"
    state = backend.state(NAME)
    assert state is not None
    assert state.phase == "terminating"
    cluster.finalizer = True

    def finish_deletion(_: float) -> None:
        cluster.objects["pytorchjobs"].pop(NAME, None)

    monkeypatch.setattr(backends.time, "sleep", finish_deletion)
    ensure_job(backend, job(), log=print)
    assert "deletionTimestamp" not in cluster.objects["pytorchjobs"][NAME]["metadata"]


@pytest.mark.parametrize("end", ["Failed", "Succeeded"])
def test_a_job_that_has_finished_is_replaced(
    cluster: FakeKubernetes, backend: KubeflowBackend, end: str
) -> None:
    ensure_job(backend, job(), log=print)
    cluster.condition(NAME, end)
    ensure_job(backend, job(workers=2), log=print)
    assert cluster.objects["pytorchjobs"][NAME] == build_pytorchjob(job(workers=2))


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


def state_of(backend: KubeflowBackend) -> JobState:
    state = backend.state(NAME)
    assert state is not None
    return state


@pytest.mark.parametrize(
    "reason", ["CreateContainerConfigError", "ErrImagePull", "InvalidImageName"]
)
def test_a_container_that_cannot_be_created_blocks_a_job(
    cluster: FakeKubernetes, backend: KubeflowBackend, reason: str
) -> None:
    backend.create(job())
    for waiting, is_blocked in (("ContainerCreating", False), (reason, True)):
        status = {"state": {"waiting": {"reason": waiting, "message": 'secret "t" not found'}}}
        cluster.pod(NAME, containerStatuses=[_container(status)])
        assert state_of(backend).blocked == is_blocked
    assert _reason(backend) == f'{NAME}-worker-0: {reason}: secret "t" not found'


def test_the_pods_that_replaced_others_are_the_restarts_of_a_pytorchjob(
    cluster: FakeKubernetes, backend: KubeflowBackend
) -> None:
    """The operator deletes the pod that has ended within a second."""
    backend.create(job(workers=2))
    cluster.condition(NAME, "Running")
    for number in (0, 1):
        cluster.pod(NAME, number, phase="Running")
    assert state_of(backend).restarts == 0
    killed = {"state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}
    cluster.pod(NAME, 1, containerStatuses=[_container(killed)])
    assert state_of(backend).restarts == 0
    cluster.condition(NAME, "Restarting", "PyTorchJobRestarting", "Worker replica(s) failed.")
    cluster.pod(NAME, 1, uid="u-2")
    assert state_of(backend).restarts == 1
    assert state_of(backend).phase == "restarting"
    assert _reason(backend) == f"{NAME}-worker-1 exited with 137 (OOMKilled)"
    cluster.pod(NAME, 1, uid="u-3", phase="Running")
    cluster.condition(NAME, "Running")
    assert (state_of(backend).phase, state_of(backend).restarts) == ("running", 2)


def test_the_reason_of_a_restart_that_nobody_saw_is_the_operators_warning(
    cluster: FakeKubernetes, backend: KubeflowBackend
) -> None:
    backend.create(job())
    cluster.event(NAME, "Error", "Error pod bapo-countdown-worker-0 exitCode: 143", age_s=60)
    cluster.event(NAME, "OOMKilled", "Error pod bapo-countdown-worker-0 exitCode: 137")
    cluster.event(NAME, "PyTorchJobRestarting", "Worker replica(s) failed.", age_s=-2)
    cluster.condition(NAME, "Restarting", "PyTorchJobRestarting", "Worker replica(s) failed.")
    assert _reason(backend) == "OOMKilled: Error pod bapo-countdown-worker-0 exitCode: 137"


def test_a_new_job_does_not_wait_for_what_its_namesake_waited_for(
    cluster: FakeKubernetes, backend: KubeflowBackend
) -> None:
    backend.create(job())
    cluster.event(NAME, "PyTorchJobRestarting", "1 Worker replica(s) failed", age_s=60)
    assert _reason(backend) == ""
    cluster.event(NAME, "FailedCreatePod", "exceeded quota")
    assert _reason(backend) == "FailedCreatePod: exceeded quota"


@pytest.mark.parametrize("kind", ["PyTorchJob", "TrainJob"])
def test_the_job_of_another_workflow_is_left_alone(
    cluster: FakeKubernetes, backend: KubeflowBackend, kind: JobKindName
) -> None:
    own = replace(job(kind=kind, owner=Owner("bapo-1", "u-1")), workflow="team/bapo-1")
    backend.create(own)
    assert state_of(backend).workflow == "team/bapo-1"
    backend.delete(NAME, "team/bapo-2")
    remove_job(backend, NAME, "team/bapo-2", log=print)
    assert state_of(backend).workflow == "team/bapo-1"
    plural = f"{kind.lower()}s"
    if kind == "TrainJob":
        # A step that was killed before it created the TrainJob leaves a runtime.
        trainjob = cluster.objects["trainjobs"].pop(NAME)
        backend.delete(NAME, "team/bapo-2")
        assert cluster.objects["trainingruntimes"]
        cluster.objects["trainjobs"][NAME] = trainjob
    del cluster.objects[plural][NAME]["metadata"]["annotations"]
    assert state_of(backend).workflow == "team/bapo-1", "a job of an earlier version has an owner"
    backend.delete(NAME, "team/bapo-2")
    assert NAME in cluster.objects[plural]
    remove_job(backend, NAME, "team/bapo-1", log=print)
    assert NAME not in cluster.objects[plural]


def test_a_job_that_has_replaced_another_one_meanwhile_is_not_deleted(
    cluster: FakeKubernetes, backend: KubeflowBackend
) -> None:
    backend.create(job())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend._cluster, "get", lambda *_: {"metadata": {"uid": "an earlier one"}})
        backend.delete(NAME)
    assert NAME in cluster.objects["pytorchjobs"]


def test_a_runtime_that_somebody_else_changes_meanwhile_is_put_again(
    cluster: FakeKubernetes, backend: KubeflowBackend
) -> None:
    cluster.refusals = [Refusal(409, "the object has been modified", method="PUT")]
    cluster.objects["trainingruntimes"][NAME] = build_runtime(job(kind="TrainJob"))
    assert backend.create(job(kind="TrainJob", workers=2))
    assert not cluster.refusals
    assert cluster.objects["trainingruntimes"][NAME]["metadata"]["ownerReferences"]


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


def test_jobs_are_removed_without_the_right_to_read_logs_and_events(
    cluster: FakeKubernetes, backend: KubeflowBackend
) -> None:
    """The reaper's account has no such right."""
    cluster.forbidden = ("/log", "/events")
    backend.create(job())
    assert state_of(backend).phase == "waiting"
    cluster.condition(NAME, "Failed", "PyTorchJobFailed", "PyTorchJob countdown is failed")
    ended = {"state": {"terminated": {"exitCode": 1, "reason": "Error"}}}
    cluster.pod(NAME, phase="Failed", containerStatuses=[_container(ended)])
    assert _reason(backend) == f"{NAME}-worker-0 exited with 1 (Error)"
    assert {request.rpartition("/")[2] for request in cluster.requests} >= {"log", "events"}
    remove_job(backend, NAME, log=print)
    assert backend.state(NAME) is None


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
    remove_job(backend, NAME, log=print)
    assert backend.state(NAME) is None
    remove_job(backend, NAME, log=print)  # a job that does not exist counts as removed
    backend.create(job())
    cluster.finalizer = True
    lines: list[str] = []
    with pytest.raises(BapoError, match=f"{NAME} was deleted but still exists"):
        remove_job(backend, NAME, log=lines.append)
    assert lines == [f"waiting until job {NAME}, which is waiting, is deleted"]


def test_only_our_own_jobs_are_listed(cluster: FakeKubernetes, backend: KubeflowBackend) -> None:
    backend.create(job())
    backend.create(job("other"))
    stranger = build_pytorchjob(job("stranger"))
    stranger["metadata"]["labels"] = {"app.kubernetes.io/name": "another-project"}
    cluster.objects["pytorchjobs"]["stranger"] = stranger
    cousin = TrainingJob("countdown", replace(DEPLOYMENT, release="other-release"), Resources())
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
    backend.create(job(owner=Owner("bapo-1", "u-1")))
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
    cluster.objects["pytorchjobs"][NAME] = build_pytorchjob(job())
    cluster.refusals = [Refusal(500, "connection to etcd lost", method="POST")]
    cluster.requests.clear()
    ensure_job(backend, job(), log=print)
    assert not [request for request in cluster.requests if request.startswith("DELETE")]


def test_an_api_that_stays_unavailable_fails_the_call(
    cluster: FakeKubernetes, backend: KubeflowBackend
) -> None:
    cluster.refusals = [Refusal(503, "no leader")] * 100
    with pytest.raises(ApiUnavailable, match="could not read bapo-countdown for 1 s"):
        backend.create(job())


def test_an_api_that_is_away_for_longer_is_said_and_called_again(
    cluster: FakeKubernetes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pipelines.cluster.SAY_EVERY_S", 0.1)
    backend = KubeflowBackend("team", "bapo", cluster.configuration(), retry_for_s=60.0)
    cluster.refusals = [Refusal(503, "no leader")] * 3
    assert backend.create(job())
    messages = [record.getMessage() for record in caplog.records]
    assert any(
        "the Kubernetes API could not read bapo-countdown for 0 s" in message
        and message.endswith("it is tried again for up to 60 s")
        for message in messages
    ), messages


@pytest.mark.timeout(20)
def test_an_api_that_never_answers_fails_the_call(
    cluster: FakeKubernetes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelines.cluster.REQUEST_TIMEOUT_S", 0.2)
    backend = KubeflowBackend("team", "bapo", cluster.configuration(), retry_for_s=0.3)
    cluster.refusals = [Refusal(500, "", delay_s=60)] * 100
    with pytest.raises(ApiUnavailable, match="check that the control plane is healthy"):
        backend.create(job())  # the test's time-out is far below the server's delay


@pytest.mark.parametrize(
    ("refusal", "remedy"),
    [
        (Refusal(403, "pods is forbidden", method="POST"), "bind the chart's pipeline role"),
        (
            Refusal(403, "exceeded quota: team", method="POST"),
            "a quota is used up: free some of it, or request less",
        ),
        (Refusal(401, "Unauthorized", method="POST"), "token is not accepted"),
        (
            Refusal(422, "spec.elasticPolicy: unknown", method="POST"),
            "has the operators' versions",
        ),
    ],
)
def test_a_refusal_names_the_remedy(
    cluster: FakeKubernetes, backend: KubeflowBackend, refusal: Refusal, remedy: str
) -> None:
    cluster.refusals = [refusal]
    with pytest.raises(BapoError, match=remedy) as caught:
        backend.create(job())
    assert refusal.message in str(caught.value)


@pytest.mark.parametrize("kind", ["PyTorchJob", "TrainJob"])
def test_a_missing_operator_is_named(
    cluster: FakeKubernetes, backend: KubeflowBackend, kind: JobKindName
) -> None:
    installed = {"PyTorchJob": "trainer.kubeflow.org", "TrainJob": "kubeflow.org"}
    cluster.operators = (installed[kind],)
    assert backend.jobs() == {}
    with pytest.raises(
        BapoError, match=r"is the operator of the chart's trainer\.jobKind installed"
    ):
        backend.create(job(kind=kind))


def test_a_programming_error_is_not_retried(
    backend: KubeflowBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise TypeError("no such argument")

    monkeypatch.setattr(
        backend._cluster.training.custom_api, "create_namespaced_custom_object", broken
    )
    with pytest.raises(RuntimeError, match="no such argument"):
        backend.create(job())


def test_only_jobs_that_succeeded_or_failed_have_finished() -> None:
    assert not JobState("waiting").finished
    assert not JobState("running").finished
    assert not JobState("restarting").finished
    assert not JobState("terminating").finished
    assert JobState("succeeded").finished
    assert JobState("failed").finished


# ---- configurations in ConfigMaps ---------------------------------------------------------------


def load_config_map(cluster: FakeKubernetes, name: str) -> str | None:
    unused: Any = None
    connect = partial(Cluster, "team", cluster.configuration(), retry_for_s=1.0)
    return load_stored_config(name, unused, unused, connect)


def store_config_map(cluster: FakeKubernetes, **data: str) -> None:
    texts = {key.replace("_", "."): text for key, text in data.items()}
    cluster.objects["configmaps"]["mine"] = {"metadata": {"name": "mine"}, "data": texts}


def test_a_stored_configuration_may_be_a_config_map(cluster: FakeKubernetes) -> None:
    store_config_map(cluster, a_yaml="steps: 3\n")
    assert load_config_map(cluster, "configmap:mine") == "steps: 3\n"
    assert load_config_map(cluster, "configmap:mine/a.yaml") == "steps: 3\n"
    store_config_map(cluster, a_yaml="steps: 3\n", b_yaml="steps: 4\n")
    assert load_config_map(cluster, "configmap:mine/b.yaml") == "steps: 4\n"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("configmap:other", "no ConfigMap 'other' in the namespace team; `kubectl create configm"),
        ("configmap:", "no ConfigMap '' in the namespace team"),
        ("configmap:mine", "the ConfigMap mine has the keys a.yaml, b.yaml; give one of them: con"),
        ("configmap:mine/c", "the ConfigMap mine has the keys a.yaml, b.yaml; give one of them"),
    ],
)
def test_a_config_map_that_names_no_configuration_is_refused(
    cluster: FakeKubernetes, name: str, message: str
) -> None:
    store_config_map(cluster, a_yaml="steps: 3\n", b_yaml="steps: 4\n")
    with pytest.raises(ConfigError, match=f"stored_config: .*{message}"):
        load_config_map(cluster, name)


def test_a_config_map_that_may_not_be_read_names_the_role(cluster: FakeKubernetes) -> None:
    cluster.refusals = [Refusal(403, "configmaps is forbidden")]
    with pytest.raises(RequestRefused, match=r"configmaps is forbidden; bind the chart's pipeline"):
        load_config_map(cluster, "configmap:mine")
