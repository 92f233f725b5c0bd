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
from pipelines.pytorchjob import (
    MAX_NAME_LENGTH,
    SPEC_HASH_LABEL,
    Deployment,
    Owner,
    Resources,
    build_job,
    job_name,
)
from pipelines.settings import DeploymentSettings, TrainerPod

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
    ca_bundle="authorities",
    pod=TrainerPod(
        priority_class_name="batch",
        node_selector={"gpu": "h200"},
        tolerations=({"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},),
        affinity={"nodeAffinity": {}},
        runtime_class_name="nvidia",
        scheduler_name="kai",
        pod_annotations={"k8s.v1.cni.cncf.io/networks": "rdma"},
        pod_labels={"team": "rl"},
        extra_env=({"name": "NCCL_DEBUG", "value": "WARN"},),
        extra_volumes=({"name": "cache", "emptyDir": {}},),
        extra_volume_mounts=({"name": "cache", "mountPath": "/cache"},),
        extra_resources={"rdma/ib": "1"},
        gpu_resource="nvidia.com/mig-1g.10gb",
        cpu_limit=True,
        scratch_size="1Gi",
    ),
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
    kinds = {kind for volume in spec["volumes"] for kind in volume if kind != "name"}
    assert kinds <= {"emptyDir", "configMap"}
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
    assert worker["template"]["metadata"]["labels"]["sidecar.istio.io/inject"] == "false"
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
        "NCCL_DEBUG",
    }


def test_the_job_follows_the_settings_of_the_release() -> None:
    job, spec = JOBS["full"], pod_of(JOBS["full"])["spec"]
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
    assert job["spec"]["runPolicy"]["suspend"] is False, "Kueue's webhook suspends it"
    assert job["metadata"]["ownerReferences"][0]["uid"] == "1234-5678"
    assert spec["priorityClassName"] == "batch"
    assert spec["nodeSelector"] == {"gpu": "h200"}
    assert spec["tolerations"][0]["key"] == "nvidia.com/gpu"
    assert spec["imagePullSecrets"] == [{"name": "pull"}]
    assert spec["affinity"] == {"nodeAffinity": {}}
    assert (spec["runtimeClassName"], spec["schedulerName"]) == ("nvidia", "kai")
    metadata = pod_of(job)["metadata"]
    assert metadata["annotations"] == {"k8s.v1.cni.cncf.io/networks": "rdma"}
    assert metadata["labels"]["team"] == "rl"
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert volumes["ca"]["configMap"] == {"name": "authorities"}
    assert volumes["scratch"]["emptyDir"] == {"sizeLimit": "1Gi"}
    (container,) = spec["containers"]
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert (mounts["/cache"], mounts["/etc/bapo/ca"]) == ("cache", "ca")
    limits = container["resources"]["limits"]
    assert limits == {
        "cpu": "4",
        "memory": "32Gi",
        "rdma/ib": "1",
        "nvidia.com/mig-1g.10gb": "1",
    }
    default = pod_of(JOBS["cpu"])["spec"]
    optional = {
        *("nodeSelector", "tolerations", "imagePullSecrets", "priorityClassName"),
        *("affinity", "runtimeClassName", "schedulerName"),
    }
    assert not optional & set(default)


def test_an_upgrade_of_the_release_does_not_replace_a_healthy_job() -> None:
    """`ensure_job` replaces a job with another digest, and so would end the training."""

    def digest(job: dict[str, Any]) -> str:
        value: str = job["metadata"]["labels"][SPEC_HASH_LABEL]
        return value

    asked = Resources(workers=2)
    before = digest(build_job("countdown", DEPLOYMENT, asked))
    upgraded = replace(FULL, image="registry.example/bapo/trainer:0.3.0", pull_policy="Always")
    assert digest(build_job("countdown", upgraded, asked)) == before
    assert digest(build_job("countdown", DEPLOYMENT, Resources(workers=3))) != before
    assert digest(build_job("countdown", DEPLOYMENT, asked, processes=2)) != before
    assert digest(build_job("countdown", DEPLOYMENT, asked, owner=Owner("w", "1"))) != before


def test_a_release_with_cloud_identities_has_no_secret_of_keys() -> None:
    job = build_job("countdown", replace(DEPLOYMENT, s3_secret=""), Resources())
    assert pod_of(job)["spec"]["containers"][0]["envFrom"] == [
        {"configMapRef": {"name": "bapo-connection"}},
        {"secretRef": {"name": "bapo-token"}},
    ]


def test_security_contexts_can_be_replaced() -> None:
    """OpenShift chooses the user ids; some versions of NVIDIA's hook need a writable root."""
    pod = TrainerPod.model_validate(
        {"podSecurityContext": {"runAsNonRoot": True}, "securityContext": {"privileged": False}}
    )
    spec = pod_of(build_job("countdown", replace(DEPLOYMENT, pod=pod), Resources()))["spec"]
    assert spec["securityContext"] == {"runAsNonRoot": True}
    assert spec["containers"][0]["securityContext"] == {"privileged": False}


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
    for name in ("TRAINER_PULL_SECRETS", "TRAINER_PULL_POLICY", "TRAINER_QUEUE", "TRAINER_POD"):
        connection.setenv(f"BAPO_{name}", "")
    connection.setenv("BAPO_CA_BUNDLE", "")
    assert Deployment.from_settings(DeploymentSettings.load(), "team") == DEPLOYMENT


def test_a_deployment_is_read_from_the_connection_configmap(
    connection: pytest.MonkeyPatch,
) -> None:
    connection.setenv("BAPO_TRAINER_PULL_SECRETS", "pull")
    connection.setenv("BAPO_TRAINER_QUEUE", "gpus")
    connection.setenv("BAPO_CA_BUNDLE", "authorities")
    connection.setenv("BAPO_TRAINER_POD", FULL.pod.model_dump_json(by_alias=True))
    assert Deployment.from_settings(DeploymentSettings.load(), "team") == FULL
    connection.setenv("BAPO_TRAINER_PULL_SECRETS", "pull,other")
    assert DeploymentSettings.load().trainer_pull_secrets == ("pull", "other")


@pytest.mark.parametrize("name", sorted(set(CONNECTION) - {"BAPO_S3_SECRET"}))
def test_a_missing_variable_names_the_connection_configmap(
    connection: pytest.MonkeyPatch, name: str
) -> None:
    connection.delenv(name)
    with pytest.raises(ConfigError, match=f"{name} is not set: .*<release>-connection"):
        DeploymentSettings.load()


@pytest.mark.parametrize("value", ["[", "[]", "gpu=h200", '{"nodeSelectors": {}}'])
def test_an_invalid_variable_names_the_connection_configmap(
    connection: pytest.MonkeyPatch, value: str
) -> None:
    connection.setenv("BAPO_TRAINER_POD", value)
    with pytest.raises(ConfigError, match=r"BAPO_TRAINER_POD.*: .*<release>-connection"):
        DeploymentSettings.load()
