"""Tests what the API server and the operators of a real cluster make of the chart and of training
jobs.

No image of the project is needed, so these tests also run in CI (`make test-admission`). They
create the namespace `bapo-admission`, in which pods must be restricted ones, and delete it.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import yaml
from kubernetes import client as kubernetes_client
from kubernetes import config as kubernetes_config

from pipelines.backends import ensure_job, remove_job
from pipelines.cluster import RequestRefused
from pipelines.kubeflow import KubeflowBackend
from pipelines.settings import DeploymentSettings, JobKindName
from pipelines.training_job import RUN_LABEL, Deployment, Resources, TrainingJob
from tests.charts.cases import CASES, DEV
from tests.charts.helm import Object, of_kind, one, render
from tests.cluster.kubectl import Namespace, kubectl, wait_until

pytestmark = pytest.mark.cluster

NAME = "bapo-admission"
RUNNER, STRANGER = "pipeline-runner", "stranger"
KINDS = ("PyTorchJob", "TrainJob")
WAIT_S = 120.0
OPTIONAL = ("monitoring.coreos.com", "gateway.networking.k8s.io", "leaderworkerset.x-k8s.io")
"""Groups of the API that a cluster may lack; `make test-crds` validates objects of these."""
SMALL = Resources(gpus=0, cpu="100m", memory="64Mi")


@pytest.fixture(scope="module")
def namespace() -> Iterator[Namespace]:
    kubectl("delete", "namespace", NAME, "--ignore-not-found", "--wait", "--timeout=120s")
    kubectl("create", "namespace", NAME)
    kubectl("label", "namespace", NAME, "pod-security.kubernetes.io/enforce=restricted")
    kubectl("label", "namespace", NAME, "pod-security.kubernetes.io/warn=restricted")
    created = Namespace(NAME)
    for account in (RUNNER, STRANGER):
        created.kubectl("create", "serviceaccount", account)
    rights = moved(of_kind(render(DEV), "Role", "RoleBinding", "ServiceAccount"))
    created.apply(*rights)
    yield created
    kubectl("delete", "namespace", NAME, "--wait=false")


@pytest.fixture(autouse=True)
def nothing_left(namespace: Namespace) -> Iterator[None]:
    """Fails if a test leaves a job, or a part of one."""
    yield
    kinds = "pytorchjobs,trainjobs,trainingruntimes,jobsets,jobs,pods"
    wait_until(lambda: not namespace.names(kinds), "deletion", WAIT_S)


def moved(objects: list[Object]) -> list[Object]:
    """Returns objects of the chart as objects of the tests' namespace."""
    text = json.dumps(objects).replace('"namespace": "ml"', f'"namespace": "{NAME}"')
    found: list[Object] = json.loads(text)
    return found


@pytest.mark.parametrize("case", CASES)
def test_the_api_server_admits_what_the_chart_renders(case: str, namespace: Namespace) -> None:
    served = kubectl("api-resources", "-o", "name")
    known = [
        manifest
        for manifest in moved(render(CASES[case]))
        if (group := manifest["apiVersion"].partition("/")[0]) not in OPTIONAL or group in served
        # The pod of `helm test` needs its service account, which is only tried as well.
        if manifest["kind"] != "Pod"
    ]
    assert len(known) > 15
    done = subprocess.run(
        ["kubectl", "apply", "-n", namespace.name, "--dry-run=server", "-f", "-"],
        input=yaml.safe_dump_all(known),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "the API server warns"
    assert len(done.stdout.splitlines()) == len(known)


def configuration(account: str) -> kubernetes_client.Configuration:
    """Returns a connection to the cluster with the rights of a service account."""
    admin = kubernetes_client.Configuration()
    kubernetes_config.load_kube_config(client_configuration=admin)
    own = kubernetes_client.Configuration()
    own.host, own.ssl_ca_cert = admin.host, admin.ssl_ca_cert
    token = kubectl("-n", NAME, "create", "token", account).strip()
    own.api_key = {"authorization": f"Bearer {token}"}
    return own


@pytest.fixture(scope="module")
def backend(namespace: Namespace) -> KubeflowBackend:
    """Returns the backend with the rights that the chart gives to a pipeline."""
    return KubeflowBackend(namespace.name, "bapo", configuration(RUNNER))


@pytest.fixture(scope="module")
def deployment(namespace: Namespace) -> Deployment:
    """Returns what a pipeline knows of a release, with images that no node has."""
    connection = one(render(DEV), "ConfigMap", "bapo-connection")["data"]
    with pytest.MonkeyPatch.context() as environment:
        for name, value in connection.items():
            environment.setenv(name, value)
        settings = DeploymentSettings.load()
    found = Deployment.from_settings(settings, namespace.name)
    return replace(found, image="localhost/bapo/absent:1", pull_policy="Never")


def make_job(deployment: Deployment, kind: JobKindName, run: str, workers: int = 1) -> TrainingJob:
    resources = replace(SMALL, workers=workers)
    return TrainingJob(run, replace(deployment, job_kind=kind), resources)


def wait_for_reason(backend: KubeflowBackend, job: TrainingJob, text: str) -> str:
    def reason() -> str:
        state = backend.state(job.name)
        assert state is not None
        return state.reason if state.phase == "waiting" and text in state.reason else ""

    found: str = wait_until(reason, text, WAIT_S, lambda: str(backend.state(job.name)))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_whose_image_is_missing_says_so_and_leaves_nothing(
    kind: JobKindName, namespace: Namespace, backend: KubeflowBackend, deployment: Deployment
) -> None:
    job = make_job(deployment, kind, f"absent-{kind.lower()}", workers=2)
    assert backend.create(job)
    assert not backend.create(job)
    reason = wait_for_reason(backend, job, "ErrImageNeverPull")
    assert job.name in reason
    assert "localhost/bapo/absent:1" in reason
    assert backend.jobs() == {job.name: job.run}
    pods = namespace.names("pods", f"{RUN_LABEL}={job.run}")
    assert len(pods) == 2
    remove_job(backend, job.name, log=print)
    assert backend.state(job.name) is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_that_a_quota_refuses_says_so(
    kind: JobKindName, namespace: Namespace, backend: KubeflowBackend, deployment: Deployment
) -> None:
    namespace.kubectl("create", "quota", "none", "--hard=pods=0")
    try:
        wait_until(
            lambda: (namespace.get("quota", "none") or {}).get("status", {}).get("hard"),
            "the quota",
            WAIT_S,
        )
        job = make_job(deployment, kind, f"quota-{kind.lower()}")
        backend.create(job)
        assert "exceeded quota: none" in wait_for_reason(backend, job, "exceeded quota")
    finally:
        namespace.kubectl("delete", "quota", "none")
    remove_job(backend, job.name, log=print)


@pytest.mark.parametrize("kind", KINDS)
def test_the_operators_take_the_longest_name(
    kind: JobKindName, namespace: Namespace, backend: KubeflowBackend, deployment: Deployment
) -> None:
    job = make_job(
        deployment, kind, "a-run-with-a-name-that-is-as-long-as-its-pattern-lets-it-be-123"
    )
    assert len(job.run) == 63
    backend.create(job)
    wait_for_reason(backend, job, "ErrImageNeverPull")
    remove_job(backend, job.name, log=print)


def test_a_job_is_adopted_unless_another_one_is_asked_for(
    namespace: Namespace, backend: KubeflowBackend, deployment: Deployment
) -> None:
    def uid() -> Any:
        found = namespace.get("pytorchjob", job.name)
        assert found is not None
        return found["metadata"]["uid"]

    job = make_job(deployment, "PyTorchJob", "adopted")
    ensure_job(backend, job, log=print)
    first = uid()
    ensure_job(backend, job, log=print)
    ensure_job(backend, make_job(deployment, "TrainJob", "adopted"), log=print)
    assert uid() == first
    assert not namespace.names("trainjobs,trainingruntimes")
    ensure_job(backend, make_job(deployment, "PyTorchJob", "adopted", workers=2), log=print)
    assert uid() != first
    remove_job(backend, job.name, log=print)


@pytest.mark.parametrize("kind", KINDS)
def test_an_account_without_rights_is_told_which_are_missing(
    kind: JobKindName, namespace: Namespace, deployment: Deployment
) -> None:
    backend = KubeflowBackend(namespace.name, "bapo", configuration(STRANGER))
    with pytest.raises(RequestRefused, match=f"serviceaccount:{NAME}:{STRANGER}.* cannot") as error:
        backend.create(make_job(deployment, kind, "forbidden"))
    assert error.value.status == 403
    assert "pipeline.serviceAccounts" in str(error.value)
