"""The manifest of the trainer's job: what the operator, Kubernetes and torchrun want of it."""

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

from bapo_core.errors import BapoError
from pipelines.localjobs import injected_variables
from pipelines.pytorchjob import LONGEST_NAME, Deployment, Owner, Resources, build_job, job_name

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
def test_the_operators_own_types_have_every_key(name: str) -> None:
    """What a type does not know is lost on the way through it."""
    client = ApiClient()
    model = client.deserialize(
        SimpleNamespace(data=json.dumps(JOBS[name])), "KubeflowOrgV1PyTorchJob"
    )
    assert client.sanitize_for_serialization(model) == JOBS[name]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", JOBS)
def test_kubernetes_takes_the_pods(name: str, version: str) -> None:
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
    """Pod Security Standards, profile "restricted"."""
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
def test_torchrun_understands_the_command_under_the_operators_variables(
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


def test_what_the_operator_looks_for() -> None:
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


def test_secrets_are_named_never_told() -> None:
    container = pod_of(JOBS["full"])["spec"]["containers"][0]
    assert container["envFrom"] == [
        {"configMapRef": {"name": "bapo-connection"}},
        {"secretRef": {"name": "bapo-token"}},
        {"secretRef": {"name": "bapo-s3"}},
    ]
    assert {each["name"] for each in container["env"]} == {
        "BAPO_RUN",
        "BAPO_SCRATCH",
        "HOME",
        "OMP_NUM_THREADS",
    }


def test_what_the_release_asks_for_is_in_the_job() -> None:
    job, spec = JOBS["full"], pod_of(JOBS["full"])["spec"]
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
    assert job["spec"]["runPolicy"]["suspend"] is True
    assert job["metadata"]["ownerReferences"][0]["uid"] == "1234-5678"
    assert spec["priorityClassName"] == "batch"
    assert spec["nodeSelector"] == {"gpu": "h200"}
    assert spec["tolerations"][0]["key"] == "nvidia.com/gpu"
    assert spec["imagePullSecrets"] == [{"name": "pull"}]
    bare = pod_of(JOBS["cpu"])["spec"]
    assert not {"nodeSelector", "tolerations", "imagePullSecrets", "priorityClassName"} & set(bare)


def test_gpus_are_asked_for_and_limited() -> None:
    resources = pod_of(JOBS["gpus"])["spec"]["containers"][0]["resources"]
    assert resources["requests"]["nvidia.com/gpu"] == resources["limits"]["nvidia.com/gpu"] == "8"
    assert "nvidia.com/gpu" not in str(JOBS["cpu"])


def test_threads_share_the_cores() -> None:
    threads = {
        each["name"]: each["value"] for each in pod_of(JOBS["gpus"])["spec"]["containers"][0]["env"]
    }
    assert threads["OMP_NUM_THREADS"] == "8", "64 cores, 8 processes"


@given(
    release=st.from_regex(r"[a-z0-9]([a-z0-9-]{0,51}[a-z0-9])?", fullmatch=True),
    run=st.from_regex(r"[a-z][a-z0-9-]{0,62}", fullmatch=True),
)
def test_names_are_short_and_dns_labels(release: str, run: str) -> None:
    name = job_name(release, run)
    assert len(name) <= LONGEST_NAME
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name)
    assert name == job_name(release, run)


def test_long_names_stay_different() -> None:
    assert job_name("bapo", "a" * 60 + "-1") != job_name("bapo", "a" * 60 + "-2")
    assert job_name("r" * 53, "one") != job_name("r" * 53, "other")


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: Resources(workers=0), "at least one worker"),
        (lambda: Resources(gpus=-1), "0 GPUs for a run on CPUs"),
        (lambda: build_job("x", DEPLOYMENT, Resources(cpu="many")), "give 4 or 500m"),
        (lambda: Deployment.from_environment({}, "team"), "BAPO_RELEASE is not set"),
        (
            lambda: Deployment.from_environment(
                dict.fromkeys(
                    (
                        "BAPO_RELEASE",
                        "BAPO_CONNECTION",
                        "BAPO_TOKEN_SECRET",
                        "BAPO_S3_SECRET",
                        "BAPO_TRAINER_IMAGE",
                        "BAPO_TRAINER_SERVICE_ACCOUNT",
                    ),
                    "x",
                )
                | {"BAPO_TRAINER_TOLERATIONS": "["},
                "team",
            ),
            "BAPO_TRAINER_TOLERATIONS in the connection ConfigMap is not JSON",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_words(build: Any, words: str) -> None:
    with pytest.raises(BapoError, match=words):
        build()
