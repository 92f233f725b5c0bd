"""Tests the training job's manifest against the operator, Kubernetes and torchrun."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import kubernetes_validate
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kubeflow.training.api_client import ApiClient
from torch.distributed.run import parse_args

from bapo_core.errors import BapoError, ConfigError
from pipelines.local_jobs import injected_variables
from pipelines.pytorchjob import MAX_NAME_LENGTH, Deployment, Owner, Resources, build_job, job_name
from pipelines.settings import DeploymentSettings

DEPLOYMENT = Deployment(
    namespace="team",
    release="bapo",
    connection="bapo-connection",
    token_secret="bapo-token",
    s3_secret="bapo-s3",
    image="registry.example/bapo/trainer:0.2.0",
    service_account="bapo-trainer",
)
FULL = replace(
    DEPLOYMENT,
    pull_secrets=("pull",),
    queue="gpus",
    priority_class="batch",
    node_selector={"gpu": "h200"},
    tolerations=({"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},),
)
JOBS = {
    "cpu": build_job("countdown", DEPLOYMENT, Resources(gpus=0), processes=2),
    "gpus": build_job("countdown", DEPLOYMENT, Resources(workers=2, gpus=8, cpu="64")),
    "full": build_job("countdown", FULL, Resources(), owner=Owner("bapo-x7", "1234-5678")),
}
VERSIONS = [f"1.{minor}" for minor in range(31, 37)]


def pod_of(job: dict[str, Any]) -> dict[str, Any]:
    template: dict[str, Any] = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
    return template


@pytest.mark.parametrize("name", JOBS)
def test_the_operators_types_have_every_key_of_the_manifest(name: str) -> None:
    """Deserialization drops a key that the type does not have, without an error."""
    client = ApiClient()
    model = client.deserialize(
        SimpleNamespace(data=json.dumps(JOBS[name])), "KubeflowOrgV1PyTorchJob"
    )
    assert client.sanitize_for_serialization(model) == JOBS[name]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", JOBS)
def test_the_schemas_of_kubernetes_accept_the_pods(name: str, version: str) -> None:
    template = pod_of(JOBS[name])
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "worker", **template["metadata"]},
        "spec": template["spec"],
    }
    kubernetes_validate.validate(pod, version, strict=True)


@pytest.mark.parametrize("name", JOBS)
def test_pods_are_restricted(name: str) -> None:
    """Checks the profile "restricted" of the Pod Security Standards."""
    spec = pod_of(JOBS[name])["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] > 0
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert {kind for volume in spec["volumes"] for kind in volume if kind != "name"} == {"emptyDir"}
    assert not {"hostNetwork", "hostPID", "hostIPC", "initContainers"} & spec.keys()
    for container in spec["containers"]:
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert context["readOnlyRootFilesystem"] is True
        assert "hostPort" not in container["ports"][0]
        assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
        assert "memory" in container["resources"]["limits"]


@pytest.mark.parametrize("name", JOBS)
def test_torchrun_parses_the_command_with_the_operators_variables(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = JOBS[name]
    workers = job["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"]
    for variable, value in injected_variables(job, "worker-0:23456").items():
        monkeypatch.setenv(variable, value)
    container = pod_of(job)["spec"]["containers"][0]
    arguments = parse_args([*container["args"], "-m", "services.trainer.loop"])
    assert arguments.nnodes == f"{workers}:{workers}"
    assert arguments.rdzv_backend == "c10d"
    assert arguments.rdzv_endpoint == "worker-0:23456"
    assert int(arguments.max_restarts) == 0
    assert arguments.rdzv_conf == "join_timeout=3600,read_timeout=600"
    assert int(arguments.nproc_per_node) == {"cpu": 2, "gpus": 8, "full": 1}[name]


def test_the_job_has_what_the_operator_looks_for() -> None:
    job = JOBS["gpus"]
    assert list(job["spec"]["pytorchReplicaSpecs"]) == ["Worker"], (
        "a Master needs an init container"
    )
    worker = job["spec"]["pytorchReplicaSpecs"]["Worker"]
    assert worker["restartPolicy"] == "ExitCode"
    container = worker["template"]["spec"]["containers"][0]
    assert container["name"] == "pytorch"
    assert container["ports"] == [{"name": "pytorchjob-port", "containerPort": 23456}]
    assert worker["template"]["metadata"]["annotations"] == {"sidecar.istio.io/inject": "false"}
    policy = job["spec"]["elasticPolicy"]
    assert policy["minReplicas"] == policy["maxReplicas"] == worker["replicas"] == 2
    assert job["spec"]["runPolicy"]["cleanPodPolicy"] == "Running"


def test_the_job_refers_to_secrets_and_contains_none() -> None:
    container = pod_of(JOBS["full"])["spec"]["containers"][0]
    assert container["envFrom"] == [
        {"configMapRef": {"name": "bapo-connection"}},
        {"secretRef": {"name": "bapo-token"}},
        {"secretRef": {"name": "bapo-s3"}},
    ]
    assert {variable["name"] for variable in container["env"]} == {
        "BAPO_RUN",
        "BAPO_SCRATCH",
        "HOME",
        "OMP_NUM_THREADS",
    }


def test_the_job_follows_the_settings_of_the_release() -> None:
    job, spec = JOBS["full"], pod_of(JOBS["full"])["spec"]
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
    assert job["spec"]["runPolicy"]["suspend"] is True
    assert job["metadata"]["ownerReferences"][0]["uid"] == "1234-5678"
    assert spec["priorityClassName"] == "batch"
    assert spec["nodeSelector"] == {"gpu": "h200"}
    assert spec["tolerations"][0]["key"] == "nvidia.com/gpu"
    assert spec["imagePullSecrets"] == [{"name": "pull"}]
    default = pod_of(JOBS["cpu"])["spec"]
    optional = {"nodeSelector", "tolerations", "imagePullSecrets", "priorityClassName"}
    assert not optional & set(default)


def test_gpus_are_requested_and_limited() -> None:
    resources = pod_of(JOBS["gpus"])["spec"]["containers"][0]["resources"]
    assert resources["requests"]["nvidia.com/gpu"] == resources["limits"]["nvidia.com/gpu"] == "8"
    assert "nvidia.com/gpu" not in str(JOBS["cpu"])


def test_the_processes_of_a_pod_share_its_cores() -> None:
    (container,) = pod_of(JOBS["gpus"])["spec"]["containers"]
    variables = {variable["name"]: variable["value"] for variable in container["env"]}
    assert variables["OMP_NUM_THREADS"] == "8", "64 cores, 8 processes"


@given(
    release=st.from_regex(r"[a-z0-9]([a-z0-9-]{0,51}[a-z0-9])?", fullmatch=True),
    run=st.from_regex(r"[a-z][a-z0-9-]{0,62}", fullmatch=True),
)
def test_names_are_short_and_dns_labels(release: str, run: str) -> None:
    name = job_name(release, run)
    assert len(name) <= MAX_NAME_LENGTH
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name)
    assert name == job_name(release, run)


def test_long_names_stay_different() -> None:
    assert job_name("bapo", "a" * 60 + "-1") != job_name("bapo", "a" * 60 + "-2")
    assert job_name("r" * 53, "one") != job_name("r" * 53, "other")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Resources(workers=0), "at least one worker"),
        (lambda: Resources(gpus=-1), "0 GPUs for a run on CPUs"),
        (lambda: Resources(cpu="many"), "give 4 or 500m"),
        (lambda: build_job("x", DEPLOYMENT, Resources(cpu="many")), "give 4 or 500m"),
        (lambda: Resources(memory="8gb"), "'8gb' is no amount of memory"),
    ],
)
def test_impossible_resources_are_refused(build: Any, message: str) -> None:
    with pytest.raises(BapoError, match=message):
        build()


CONNECTION = {
    "BAPO_RELEASE": "bapo",
    "BAPO_CONNECTION": "bapo-connection",
    "BAPO_TOKEN_SECRET": "bapo-token",
    "BAPO_S3_SECRET": "bapo-s3",
    "BAPO_TRAINER_IMAGE": "registry.example/bapo/trainer:0.2.0",
    "BAPO_TRAINER_SERVICE_ACCOUNT": "bapo-trainer",
}


@pytest.fixture
def connection(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Sets the variables that the connection ConfigMap must have."""
    for name, value in CONNECTION.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_a_deployment_has_defaults_for_what_the_chart_leaves_empty(
    connection: pytest.MonkeyPatch,
) -> None:
    assert Deployment.from_settings(DeploymentSettings.load(), "team") == DEPLOYMENT
    for name in ("PULL_SECRETS", "PULL_POLICY", "QUEUE", "NODE_SELECTOR", "TOLERATIONS"):
        connection.setenv(f"BAPO_TRAINER_{name}", "")
    assert Deployment.from_settings(DeploymentSettings.load(), "team") == DEPLOYMENT


def test_a_deployment_is_read_from_the_connection_configmap(
    connection: pytest.MonkeyPatch,
) -> None:
    connection.setenv("BAPO_TRAINER_PULL_SECRETS", "pull")
    connection.setenv("BAPO_TRAINER_QUEUE", "gpus")
    connection.setenv("BAPO_TRAINER_PRIORITY_CLASS", "batch")
    connection.setenv("BAPO_TRAINER_NODE_SELECTOR", json.dumps(dict(FULL.node_selector)))
    connection.setenv("BAPO_TRAINER_TOLERATIONS", json.dumps(FULL.tolerations))
    assert Deployment.from_settings(DeploymentSettings.load(), "team") == FULL
    connection.setenv("BAPO_TRAINER_PULL_SECRETS", "pull,other")
    assert DeploymentSettings.load().trainer_pull_secrets == ("pull", "other")


@pytest.mark.parametrize("name", CONNECTION)
def test_a_missing_variable_names_the_connection_configmap(
    connection: pytest.MonkeyPatch, name: str
) -> None:
    connection.delenv(name)
    with pytest.raises(ConfigError, match=f"{name} is not set: .*<release>-connection"):
        DeploymentSettings.load()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("BAPO_TRAINER_TOLERATIONS", "["),
        ("BAPO_TRAINER_TOLERATIONS", "{}"),
        ("BAPO_TRAINER_NODE_SELECTOR", "gpu=h200"),
    ],
)
def test_an_invalid_variable_names_the_connection_configmap(
    connection: pytest.MonkeyPatch, name: str, value: str
) -> None:
    connection.setenv(name, value)
    with pytest.raises(ConfigError, match=f"{name}.*: .*<release>-connection"):
        DeploymentSettings.load()
