"""Tests the pods of the chart: security, resources, probes, images and scheduling."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.common.settings import Settings, variables
from services.rollout.run_watcher import MODULES
from services.rollout.settings import WorkerNodeSettings
from tests.charts.cases import CASES
from tests.charts.helm import (
    Object,
    container_of,
    containers,
    env,
    of_kind,
    one,
    pod_of,
    render,
    workloads,
)
from tests.charts.restricted import violations

LONG_RUNNING = ("Deployment", "StatefulSet", "LeaderWorkerSet")
ROOT = Path(__file__).parents[2]


def pods(objects: list[Object]) -> list[tuple[str, Any]]:
    return [
        (manifest["metadata"]["name"], pod_of(manifest)["spec"]) for manifest in workloads(objects)
    ]


# ---- security ------------------------------------------------------------------------------------


def test_every_pod_is_restricted(objects: list[Object]) -> None:
    assert {name: violations(spec) for name, spec in pods(objects)} == {
        name: [] for name, _ in pods(objects)
    }


def test_root_file_systems_are_read_only(objects: list[Object]) -> None:
    for name, container in containers(objects):
        assert container["securityContext"]["readOnlyRootFilesystem"] is True, name
        mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert "/tmp" in mounts, name


def test_only_what_calls_kubernetes_has_a_token_for_it(objects: list[Object]) -> None:
    for name, spec in pods(objects):
        calls = name.endswith(("-reaper", "-scaler"))
        assert spec["automountServiceAccountToken"] is calls, name
    for account in of_kind(objects, "ServiceAccount"):
        assert account["automountServiceAccountToken"] is False


def test_pods_run_as_the_users_of_their_images(dev: list[Object]) -> None:
    users = {name: spec["securityContext"]["runAsUser"] for name, spec in pods(dev)}
    assert users.pop("bapo-postgres") == 999
    assert set(users.values()) == {10001}


@pytest.mark.parametrize(
    ("level", "change", "problem"),
    [
        ("pod", {"hostNetwork": True}, "hostNetwork"),
        ("pod", {"volumes": [{"name": "a", "hostPath": {"path": "/"}}]}, "volume hostPath"),
        ("pod", {"securityContext": {"runAsNonRoot": True}}, "seccompProfile"),
        ("container", {"runAsUser": 0}, "runAsUser 0"),
        ("container", {"privileged": True}, "privileged"),
        ("container", {"allowPrivilegeEscalation": None}, "allowPrivilegeEscalation"),
        ("container", {"capabilities": {}}, "capabilities not dropped"),
    ],
)
def test_violations_of_the_standard_are_found(
    dev: list[Object], level: str, change: dict[str, Any], problem: str
) -> None:
    original = pod_of(one(dev, "Deployment", "bapo-buffer"))["spec"]
    (container,) = original["containers"]
    if level == "pod":
        spec = {**original, **change}
    else:
        context = {**container["securityContext"], **change}
        spec = {**original, "containers": [{**container, "securityContext": context}]}
    assert [violation for violation in violations(spec) if problem in violation]


# ---- resources and probes ------------------------------------------------------------------------


def test_every_container_has_requests_and_a_memory_limit(objects: list[Object]) -> None:
    for name, container in containers(objects):
        resources = container["resources"]
        assert {"cpu", "memory"} <= resources["requests"].keys(), name
        assert "memory" in resources["limits"], name


def test_pods_take_what_a_cluster_demands_of_them() -> None:
    objects = render(CASES["own pods"])
    services = ("bapo-buffer", "bapo-verifier", "bapo-rollout", "bapo-collector")
    for workload in of_kind(objects, "Deployment", "StatefulSet"):
        spec = pod_of(workload)["spec"]
        assert workload["metadata"]["name"] in services
        assert (spec["runtimeClassName"], spec["schedulerName"]) == ("gvisor", "own")
        assert {"name": "cache", "emptyDir": {"sizeLimit": "1Gi"}} in spec["volumes"]
        for container in spec["containers"]:
            assert {"name": "cache", "mountPath": "/cache"} in container["volumeMounts"]
            assert {"name": "TZ", "value": "UTC"} in container["env"]
    images = {name: container["image"] for name, container in containers(objects)}
    digest = f"registry.example.com/bapo/service@sha256:{'a' * 64}"
    assert digest in images.values(), images
    keys = [
        variable["valueFrom"]["secretKeyRef"]["key"]
        for _, container in containers(objects)
        for variable in container["env"]
        if variable["name"] == "BAPO_DATABASE_URL"
    ]
    assert keys == ["uri", "uri"], "of the buffer service and of the migration"
    assert one(objects, "ConfigMap", "bapo-notes")


def test_every_empty_dir_has_a_size_limit(objects: list[Object]) -> None:
    for name, spec in pods(objects):
        for volume in spec["volumes"]:
            assert volume.get("emptyDir", {"sizeLimit": 1}).get("sizeLimit"), (name, volume)


def test_long_running_pods_are_probed(objects: list[Object]) -> None:
    for name, container in containers(workloads(objects, *LONG_RUNNING)):
        if "scaler" in name:
            assert "ports" not in container, "its process ends when it fails; there is no server"
            continue
        ports = {port["name"] for port in container["ports"]}
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            (action,) = container[probe].keys() & {"httpGet", "tcpSocket", "exec"}
            assert action == "exec" or container[probe][action]["port"] in ports, name
            assert "initialDelaySeconds" not in container[probe], name


def test_probes_use_these_routes(production: list[Object]) -> None:
    routes = {
        name.rpartition("-")[2]: [
            container[probe]["httpGet"]["path"]
            for probe in ("startupProbe", "livenessProbe", "readinessProbe")
        ]
        for name, container in containers(workloads(production, *LONG_RUNNING))
    }
    assert routes == {
        "buffer": ["/health", "/health", "/readyz"],
        "verifier": ["/health", "/health", "/readyz"],
        "rollout": ["/health", "/health", "/readyz"],
        "collector": ["/health", "/health", "/health"],
    }


def test_large_models_may_load_for_45_minutes(production: list[Object]) -> None:
    rollout = container_of(production, "StatefulSet", "bapo-rollout")
    probe = rollout["startupProbe"]
    assert (probe["periodSeconds"], probe["failureThreshold"]) == (10, 270)
    assert env(rollout)["BAPO_VLLM_START_WITHIN_S"] == "2700"


def test_pods_have_time_to_drain(production: list[Object]) -> None:
    """The verifier drains for 30 s after the preStop hook, when requests no longer arrive."""
    spec = pod_of(one(production, "Deployment", "bapo-verifier"))["spec"]
    waits = spec["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert spec["terminationGracePeriodSeconds"] >= 30 + waits
    rollout = pod_of(one(production, "StatefulSet", "bapo-rollout"))["spec"]
    assert rollout["terminationGracePeriodSeconds"] == 60


def test_the_memory_limit_of_verifiers_covers_their_workers(objects: list[Object]) -> None:
    """Checks the formula of values.yaml."""
    container = container_of(objects, "Deployment", verifier_name(objects))
    settings = env(container)
    workers, memory_mb = (
        int(settings[f"BAPO_VERIFIER_{key}"] or 0) for key in ("WORKERS", "MEMORY_MB")
    )
    needed = (workers + 1) * 256 + workers * memory_mb + 512
    assert mebibytes(container["resources"]["limits"]["memory"]) >= needed


def verifier_name(objects: list[Object]) -> str:
    (name,) = (
        manifest["metadata"]["name"]
        for manifest in of_kind(objects, "Deployment")
        if manifest["metadata"]["labels"]["app.kubernetes.io/component"] == "verifier"
    )
    return str(name)


def mebibytes(quantity: str) -> int:
    return int(quantity[:-2]) * {"Mi": 1, "Gi": 1024}[quantity[-2:]]


# ---- images and processes ------------------------------------------------------------------------


def test_images_have_versions(objects: list[Object]) -> None:
    for name, container in containers(objects):
        assert re.search(r":[A-Za-z0-9_][\w.-]*$", container["image"]), name
        assert not container["image"].endswith(":latest"), name


def test_a_mirror_serves_every_image(everything: list[Object]) -> None:
    for name, container in containers(everything):
        assert container["image"].startswith("registry.example.com/mirror/"), name
    for name, spec in pods(everything):
        assert spec["imagePullSecrets"] == [{"name": "mirror"}, {"name": "other"}], name


def test_commands_are_modules_of_the_project(dev: list[Object]) -> None:
    modules = set()
    for _, container in containers(dev):
        match container.get("command", []):
            case ["python", "-m", module, *arguments]:
                modules.add(module)
                assert set(arguments) <= {*MODULES, "pipeline", "reap"}
    assert len(modules) == 5
    assert all(importlib.util.find_spec(module) for module in modules)


def test_every_variable_is_one_of_the_settings(everything: list[Object]) -> None:
    for folder in ("services", "pipelines"):
        for path in (ROOT / folder).rglob("settings.py"):
            importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    defined = {name for settings in subclasses(Settings) for name, _ in variables(settings)}
    used = {name for _, container in containers(everything) for name in env(container)}
    used |= one(everything, "ConfigMap", "bapo-connection")["data"].keys()
    assert {name for name in used if name.startswith("BAPO_")} - defined == set()


def subclasses(settings: type[Settings]) -> Iterator[type[Settings]]:
    for subclass in settings.__subclasses__():
        yield subclass
        yield from subclasses(subclass)


def test_service_links_are_off(objects: list[Object]) -> None:
    """A Service "bapo" would set BAPO_PORT to something like tcp://10.0.0.1:80."""
    assert all(spec["enableServiceLinks"] is False for _, spec in pods(objects))


# ---- rollouts ------------------------------------------------------------------------------------


def test_gpus_are_added_to_requests_and_limits(production: list[Object]) -> None:
    resources = container_of(production, "StatefulSet", "bapo-rollout")["resources"]
    assert resources == {
        "requests": {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": 2},
        "limits": {"memory": "128Gi", "nvidia.com/gpu": 2},
    }


def test_pods_without_gpus_request_none(dev: list[Object]) -> None:
    rollout = container_of(dev, "StatefulSet", "bapo-rollout")
    assert rollout["resources"]["limits"].keys() == {"memory"}
    assert "BAPO_VLLM_ARGS" not in env(rollout)


def test_arguments_of_vllm_survive_the_shell(everything: list[Object]) -> None:
    import shlex

    arguments = env(container_of(everything, "StatefulSet", "bapo-rollout"))["BAPO_VLLM_ARGS"]
    assert shlex.split(arguments or "") == [
        "--tensor-parallel-size",
        "2",
        "--gpu-memory-utilization=0.85",
        '--override={"a b": "it\'s"}',
    ]


def test_a_replica_advertises_the_name_of_its_pod(dev: list[Object]) -> None:
    rollout = container_of(dev, "StatefulSet", "bapo-rollout")
    names = list(env(rollout))
    assert names.index("BAPO_REPLICA") < names.index("BAPO_ADVERTISE")
    assert env(rollout)["BAPO_ADVERTISE"] == "http://$(BAPO_REPLICA).bapo-rollout.ml.svc:8702"
    service = one(dev, "Service", "bapo-rollout")["spec"]
    assert service["clusterIP"] == "None"
    assert service["publishNotReadyAddresses"] is True
    spec = one(dev, "StatefulSet", "bapo-rollout")["spec"]
    assert (spec["serviceName"], spec["podManagementPolicy"]) == ("bapo-rollout", "Parallel")


def test_scratch_is_a_volume_or_the_nodes_disk(dev: list[Object], production: list[Object]) -> None:
    def volumes(objects: list[Object]) -> set[str]:
        spec = pod_of(one(objects, "StatefulSet", "bapo-rollout"))["spec"]
        return {manifest["name"] for manifest in spec["volumes"]}

    assert volumes(dev) == {"tmp", "shm", "scratch"}
    assert volumes(production) == {"tmp", "shm"}
    (claim,) = one(production, "StatefulSet", "bapo-rollout")["spec"]["volumeClaimTemplates"]
    assert claim["metadata"]["name"] == "scratch"
    assert claim["spec"]["resources"]["requests"]["storage"] == "500Gi"


def test_a_replica_of_several_nodes_is_a_group_of_a_leader_and_workers(
    production: list[Object],
) -> None:
    objects = render(CASES["several nodes"])
    assert "bapo-rollout" not in {m["metadata"]["name"] for m in of_kind(objects, "StatefulSet")}
    spec = one(objects, "LeaderWorkerSet", "bapo-nodes")["spec"]
    assert (spec["replicas"], spec["leaderWorkerTemplate"]["size"]) == (4, 3)
    assert spec["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupOnPodRestart"
    leader = container_of(objects, "LeaderWorkerSet", "bapo-nodes")
    worker = container_of(objects, "LeaderWorkerSet", "bapo-nodes-workers")
    alone = container_of(production, "StatefulSet", "bapo-rollout")
    assert leader["command"] == alone["command"]
    assert worker["command"] == ["python", "-m", "services.rollout.worker_node"]
    assert leader["resources"] == worker["resources"] == alone["resources"]
    assert leader["image"] == worker["image"]


def test_a_leader_knows_its_workers_by_the_names_of_their_pods() -> None:
    objects = render(CASES["several nodes"])
    leader = env(container_of(objects, "LeaderWorkerSet", "bapo-nodes"))
    names = list(leader)
    assert names.index("BAPO_REPLICA") < names.index("BAPO_VLLM_NODES")
    # The LeaderWorkerSet's controller creates the Service "bapo-nodes".
    assert leader["BAPO_ADVERTISE"] == "http://$(BAPO_REPLICA).bapo-nodes.ml.svc:8702"
    assert leader["BAPO_VLLM_NODES"] == (
        "http://$(BAPO_REPLICA)-1.bapo-nodes.ml.svc:8702,"
        "http://$(BAPO_REPLICA)-2.bapo-nodes.ml.svc:8702"
    )
    assert leader["BAPO_VLLM_ARGS"] == "--tensor-parallel-size 2 --pipeline-parallel-size 3"


def test_a_worker_is_told_what_to_run_by_its_leader() -> None:
    worker = container_of(render(CASES["several nodes"]), "LeaderWorkerSet", "bapo-nodes-workers")
    own = {name for name in env(worker) if name.startswith("BAPO_")}
    assert own == {"BAPO_HOST", "BAPO_HOST_NAMES", "BAPO_PORT", "BAPO_SCRATCH", "BAPO_TOKEN"}
    known = {name for name, _ in variables(WorkerNodeSettings)}
    assert own <= known
    routes = {worker[probe]["httpGet"]["path"] for probe in ("livenessProbe", "readinessProbe")}
    assert routes == {"/health"}, "a worker of an idle release is ready"


def test_there_is_one_collector_at_a_time(objects: list[Object]) -> None:
    (collector,) = (
        manifest
        for manifest in of_kind(objects, "Deployment")
        if manifest["metadata"]["labels"]["app.kubernetes.io/component"] == "collector"
    )
    assert collector["spec"]["replicas"] == 1
    assert collector["spec"]["strategy"] == {"type": "Recreate"}


# ---- where and how many --------------------------------------------------------------------------


def test_kueue_admits_rollouts_and_training_jobs(
    dev: list[Object], everything: list[Object]
) -> None:
    label = "kueue.x-k8s.io/queue-name"
    labels = one(everything, "StatefulSet", "bapo-rollout")["metadata"]["labels"]
    assert labels[label] == "gpus"
    assert one(everything, "ConfigMap", "bapo-connection")["data"]["BAPO_TRAINER_QUEUE"] == "gpus"
    assert label not in one(dev, "StatefulSet", "bapo-rollout")["metadata"]["labels"]


def test_an_autoscaler_owns_the_number_of_replicas(
    production: list[Object], everything: list[Object]
) -> None:
    assert one(production, "Deployment", "bapo-buffer")["spec"]["replicas"] == 3
    assert "replicas" not in one(everything, "Deployment", "bapo-buffer")["spec"]
    for name in ("bapo-buffer", "bapo-verifier"):
        target = one(everything, "HorizontalPodAutoscaler", name)["spec"]["scaleTargetRef"]
        assert target == {"apiVersion": "apps/v1", "kind": "Deployment", "name": name}


def test_disruption_budgets_may_be_zero(everything: list[Object]) -> None:
    budgets = {
        manifest["metadata"]["name"]: manifest["spec"]["maxUnavailable"]
        for manifest in of_kind(everything, "PodDisruptionBudget")
    }
    assert budgets == {"bapo-buffer": "20%", "bapo-verifier": 0}


def test_replicas_spread_where_possible(production: list[Object]) -> None:
    for name in ("bapo-buffer", "bapo-verifier"):
        deployment = one(production, "Deployment", name)
        spread = pod_of(deployment)["spec"]["topologySpreadConstraints"]
        assert [constraint["whenUnsatisfiable"] for constraint in spread] == ["ScheduleAnyway"] * 2
        for constraint in spread:
            assert constraint["labelSelector"] == deployment["spec"]["selector"]


def test_pods_follow_the_scheduling_values(everything: list[Object]) -> None:
    spec = pod_of(one(everything, "Deployment", "bapo-buffer"))["spec"]
    assert (spec["priorityClassName"], spec["nodeSelector"]) == ("high", {"pool": "cpu"})
    for kind, name in (("Job", "bapo-migrate"), ("Pod", "bapo-test")):
        assert pod_of(one(everything, kind, name))["spec"]["nodeSelector"] == {"pool": "cpu"}
    rollout = pod_of(one(everything, "StatefulSet", "bapo-rollout"))["spec"]
    assert rollout["tolerations"] == [{"key": "gpu", "operator": "Exists"}]


def test_no_sidecars_are_injected(objects: list[Object]) -> None:
    for workload in workloads(objects):
        assert pod_of(workload)["metadata"]["labels"]["sidecar.istio.io/inject"] == "false"


def test_labels_of_users_do_not_replace_those_of_the_chart(everything: list[Object]) -> None:
    labels = pod_of(one(everything, "Deployment", "bapo-buffer"))["metadata"]["labels"]
    assert labels["team"] == "rl"
    assert labels["app.kubernetes.io/component"] == "buffer"


def test_pods_that_read_certificates_have_them() -> None:
    """A client would not start with the variable alone. libpq reads the file that a URL names."""
    objects = render(CASES["everything"])
    connection = one(objects, "ConfigMap", "bapo-connection")["data"]
    assert connection["SSL_CERT_FILE"].startswith("/etc/bapo/ca/")
    for name, container in containers(objects):
        sources = [
            source.get("configMapRef", {}).get("name") for source in container.get("envFrom", [])
        ]
        mounted = [mount["mountPath"] for mount in container.get("volumeMounts", [])]
        if "bapo-connection" in sources or name == "Job/bapo-migrate":
            assert "/etc/bapo/ca" in mounted, name
