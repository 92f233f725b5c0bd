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
from pipelines.pytorchjob import build_pytorchjob
from pipelines.settings import DeploymentSettings, TrainerPod
from pipelines.training_job import (
    MAX_NAME_LENGTH,
    RENDEZVOUS_PORT,
    Deployment,
    Owner,
    Resources,
    TrainingJob,
    job_name,
)
from pipelines.trainjob import build_runtime, build_trainjob

DEPLOYMENT = Deployment(
    namespace="team",
    release="bapo",
    connection="bapo-connection",
    token_secret="bapo-token",
    s3_secret="bapo-s3",
    image="registry.example/bapo/trainer:0.3.0",
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
ASKED = {
    "cpu": TrainingJob("countdown", DEPLOYMENT, Resources(gpus=0), processes=2),
    "gpus": TrainingJob("countdown", DEPLOYMENT, Resources(workers=2, gpus=8, cpu="64")),
    "full": TrainingJob("countdown", FULL, Resources(), owner=Owner("bapo-x7", "1234-5678")),
}
JOBS = {name: build_pytorchjob(job) for name, job in ASKED.items()}
RUNTIMES = {name: build_runtime(job) for name, job in ASKED.items()}
VERSIONS = [f"1.{minor}" for minor in range(31, 37)]


def pod_of(job: dict[str, Any]) -> dict[str, Any]:
    """Returns the pods' template of a PyTorchJob or of a TrainingRuntime."""
    if job["kind"] == "PyTorchJob":
        template: dict[str, Any] = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
    else:
        (workers,) = job["spec"]["template"]["spec"]["replicatedJobs"]
        template = workers["template"]["spec"]["template"]
    return template


ALL_PODS = [pod_of(job) for job in (*JOBS.values(), *RUNTIMES.values())]
POD_NAMES = [f"{kind}-{name}" for kind in ("pytorchjob", "trainjob") for name in ASKED]


@pytest.mark.parametrize("name", JOBS)
def test_the_operators_types_have_every_key_of_the_manifest(name: str) -> None:
    """Deserialization drops a key that the type does not have, without an error."""
    client = ApiClient()
    model = client.deserialize(
        SimpleNamespace(data=json.dumps(JOBS[name])), "KubeflowOrgV1PyTorchJob"
    )
    assert client.sanitize_for_serialization(model) == JOBS[name]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("template", ALL_PODS, ids=POD_NAMES)
def test_the_schemas_of_kubernetes_accept_the_pods(template: dict[str, Any], version: str) -> None:
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "worker", **template["metadata"]},
        "spec": template["spec"],
    }
    kubernetes_validate.validate(pod, version, strict=True)


@pytest.mark.parametrize("template", ALL_PODS, ids=POD_NAMES)
def test_pods_are_restricted(template: dict[str, Any]) -> None:
    """Checks the profile "restricted" of the Pod Security Standards."""
    spec = template["spec"]
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


@pytest.mark.parametrize("name", ASKED)
def test_a_trainjob_refers_to_a_runtime_with_the_same_pods(name: str) -> None:
    job, runtime = build_trainjob(ASKED[name]), RUNTIMES[name]
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert job["spec"]["runtimeRef"]["kind"] == runtime["kind"]
    assert job["metadata"] == JOBS[name]["metadata"]
    assert "kueue.x-k8s.io/queue-name" not in runtime["metadata"]["labels"], "it runs nothing"
    workers = ASKED[name].resources.workers
    assert job["spec"]["trainer"]["numNodes"] == runtime["spec"]["mlPolicy"]["numNodes"] == workers
    (container,) = pod_of(runtime)["spec"]["containers"]
    (reference,) = pod_of(JOBS[name])["spec"]["containers"]
    changed = {key for key in reference if container[key] != reference[key]}
    assert changed == {"name", "env"}
    assert container["name"] == "node", "Kubeflow Trainer looks for it"
    own = {variable["name"] for variable in container["env"] if variable not in reference["env"]}
    assert all(variable.startswith("PET_") for variable in own)


def test_exit_codes_below_128_fail_a_trainjob_and_others_restart_all_workers() -> None:
    jobset = RUNTIMES["gpus"]["spec"]["template"]["spec"]
    (workers,) = jobset["replicatedJobs"]
    job = workers["template"]["spec"]
    assert job["backoffLimit"] == 0, "no worker restarts alone"
    assert job["template"]["spec"]["restartPolicy"] == "Never"
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob"
    assert rule["onExitCodes"]["values"] == list(range(1, 128))
    policy = jobset["failurePolicy"]
    assert policy["maxRestarts"] == JOBS["gpus"]["spec"]["runPolicy"]["backoffLimit"]
    (fatal,) = policy["rules"]
    assert (fatal["action"], fatal["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])


def test_torchrun_finds_the_first_worker_of_a_trainjob(monkeypatch: pytest.MonkeyPatch) -> None:
    (container,) = pod_of(RUNTIMES["gpus"])["spec"]["containers"]
    # The second group is what Kubeflow Trainer adds.
    for variable in container["env"]:
        monkeypatch.setenv(variable["name"], variable.get("value", "a key of a Secret"))
    for name, value in {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "8",
        "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": "bapo-countdown-node-0-0.bapo-countdown",
        "PET_MASTER_PORT": "29400",
    }.items():
        monkeypatch.setenv(name, value)
    arguments = parse_args([*container["args"], "-m", "services.trainer.loop"])
    assert (arguments.nnodes, arguments.rdzv_backend) == ("2", "c10d")
    host = "bapo-countdown-node-0-0.bapo-countdown"
    assert arguments.rdzv_endpoint == f"{host}:{RENDEZVOUS_PORT}"
    assert arguments.rdzv_conf == "join_timeout=3600,read_timeout=600"
    assert (int(arguments.max_restarts), int(arguments.nproc_per_node)) == (0, 8)


def test_the_job_refers_to_secrets_and_contains_none() -> None:
    container = pod_of(JOBS["full"])["spec"]["containers"][0]
    assert container["envFrom"] == [
        {"configMapRef": {"name": "bapo-connection"}},
        {"secretRef": {"name": "bapo-s3"}},
    ]
    # The Secret has the tokens of other processes, too.
    reference = {"name": "bapo-token", "key": "BAPO_TRAINER_TOKEN"}
    token = {"name": "BAPO_TOKEN", "valueFrom": {"secretKeyRef": reference}}
    assert token in container["env"]
    assert {variable["name"] for variable in container["env"]} == {
        "BAPO_TOKEN",
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

    def digest(deployment: Deployment, resources: Resources, **options: Any) -> str:
        return TrainingJob("countdown", deployment, resources, **options).spec_hash

    asked = Resources(workers=2)
    before = digest(DEPLOYMENT, asked)
    upgraded = replace(FULL, image="registry.example/bapo/trainer:0.3.0", pull_policy="Always")
    assert digest(upgraded, asked) == before
    assert digest(DEPLOYMENT, Resources(workers=3)) != before
    assert digest(DEPLOYMENT, asked, processes=2) != before
    assert digest(DEPLOYMENT, asked, owner=Owner("w", "1")) != before


def test_a_release_with_cloud_identities_has_no_secret_of_keys() -> None:
    job = build_pytorchjob(TrainingJob("countdown", replace(DEPLOYMENT, s3_secret=""), Resources()))
    assert pod_of(job)["spec"]["containers"][0]["envFrom"] == [
        {"configMapRef": {"name": "bapo-connection"}},
    ]


def test_security_contexts_can_be_replaced() -> None:
    """OpenShift chooses the user ids; some versions of NVIDIA's hook need a writable root."""
    pod = TrainerPod.model_validate(
        {"podSecurityContext": {"runAsNonRoot": True}, "securityContext": {"privileged": False}}
    )
    job = TrainingJob("countdown", replace(DEPLOYMENT, pod=pod), Resources())
    spec = pod_of(build_pytorchjob(job))["spec"]
    assert spec["securityContext"] == {"runAsNonRoot": True}
    assert spec["containers"][0]["securityContext"] == {"privileged": False}


def test_gpus_are_requested_and_limited() -> None:
    resources = pod_of(JOBS["gpus"])["spec"]["containers"][0]["resources"]
    assert resources["requests"]["nvidia.com/gpu"] == resources["limits"]["nvidia.com/gpu"] == "8"
    assert "nvidia.com/gpu" not in str(JOBS["cpu"])


def test_the_processes_of_a_pod_share_its_cores() -> None:
    (container,) = pod_of(JOBS["gpus"])["spec"]["containers"]
    variables = {variable["name"]: variable.get("value") for variable in container["env"]}
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
    # Kubernetes gives a pod of a TrainJob's Job five random characters.
    assert len(f"{name}-node-0-100-abcde") <= 63


def test_long_names_stay_different() -> None:
    assert job_name("bapo", "a" * 60 + "-1") != job_name("bapo", "a" * 60 + "-2")
    assert job_name("r" * 53, "one") != job_name("r" * 53, "other")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Resources(workers=0), "at least one worker"),
        (lambda: Resources(gpus=-1), "0 GPUs for a run on CPUs"),
        (lambda: Resources(cpu="many"), "give 4 or 500m"),
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
    "BAPO_TRAINER_IMAGE": "registry.example/bapo/trainer:0.3.0",
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
