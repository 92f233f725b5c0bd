"""Tests the release as a whole: names, addresses, rights, hooks, and the connection ConfigMap."""

from __future__ import annotations

import json
import re
from pathlib import Path

import promql_parser
import pytest

from pipelines.settings import TrainerPod
from pipelines.training_job import CA_DIRECTORY
from tests.charts.cases import CASES, EVERYTHING, LONG
from tests.charts.helm import (
    CHART,
    NAMESPACE,
    Case,
    Object,
    container_of,
    of_kind,
    one,
    pod_of,
    render,
    workloads,
)
from tests.charts.network import selects

RUNNING = ("Deployment", "StatefulSet")
ROOT = Path(__file__).parents[2]


# ---- names ---------------------------------------------------------------------------------------


LONGEST = {"StatefulSet": 52, "CronJob": 52, "LeaderWorkerSet": 48}
"""A label of at most 63 characters holds a StatefulSet's name and a hash, and the name of a
CronJob's Job its name and a time. The StatefulSets of a LeaderWorkerSet have its name and the
group's number."""


@pytest.mark.parametrize("case", ["a long name", "a long name, several nodes"])
def test_names_of_the_longest_release_fit(case: str) -> None:
    assert len(LONG) == 53
    for manifest in render(CASES[case]):
        name = manifest["metadata"]["name"]
        assert len(name) <= LONGEST.get(manifest["kind"], 63), name
        labels = {**manifest["metadata"]["labels"], **pod_labels(manifest)}
        assert all(len(value) <= 63 for value in labels.values())


def pod_labels(workload: Object) -> dict[str, str]:
    if workload["kind"] not in RUNNING:
        return {}
    labels: dict[str, str] = pod_of(workload)["metadata"]["labels"]
    return labels


def test_two_long_names_stay_different() -> None:
    names = [
        {manifest["metadata"]["name"] for manifest in render(Case(("dev",), release=release))}
        for release in (LONG, LONG[:-1] + "3")
    ]
    assert not names[0] & names[1]


@pytest.mark.parametrize(
    ("release", "sets", "name"),
    [
        ("bapo", {}, "bapo"),
        ("my-bapo", {}, "my-bapo"),
        ("maths", {}, "maths-bapo"),
        ("maths", {"fullnameOverride": "rl"}, "rl"),
    ],
)
def test_the_prefix_of_names_comes_from_the_release_or_the_override(
    release: str, sets: dict[str, str], name: str
) -> None:
    objects = render(Case(("dev",), sets, release))
    assert one(objects, "Deployment", f"{name}-buffer")


def test_names_are_unique(objects: list[Object]) -> None:
    names = [
        (manifest["kind"], manifest["metadata"]["name"])
        for manifest in objects
        if "helm.sh/hook" not in manifest["metadata"].get("annotations", {})
    ]
    assert len(names) == len(set(names))


def test_everything_is_in_the_namespace_and_labelled(objects: list[Object]) -> None:
    for manifest in objects:
        assert manifest["metadata"]["namespace"] == "ml"
        labels = manifest["metadata"]["labels"]
        assert labels["app.kubernetes.io/name"] == labels["app.kubernetes.io/part-of"] == "bapo"


# ---- Services ------------------------------------------------------------------------------------


def test_services_select_exactly_their_pods(objects: list[Object]) -> None:
    for service in of_kind(objects, "Service"):
        selected = [
            manifest["metadata"]["name"]
            for manifest in workloads(objects)
            if selects(
                {"matchLabels": service["spec"]["selector"]}, pod_of(manifest)["metadata"]["labels"]
            )
        ]
        assert selected == [workload_of(service, objects)]


def workload_of(service: Object, objects: list[Object]) -> str:
    """Returns the name of the workload whose pods a Service selects."""
    name: str = service["metadata"]["name"]
    if of_kind(objects, "LeaderWorkerSet") and name.endswith("-rollout"):
        return name.removesuffix("-rollout") + "-nodes"
    return name


def test_ports_are_named_and_match(objects: list[Object]) -> None:
    for service in of_kind(objects, "Service"):
        name = workload_of(service, objects)
        (workload,) = (
            workload for workload in workloads(objects) if workload["metadata"]["name"] == name
        )
        (container,) = pod_of(workload)["spec"]["containers"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert {port["targetPort"]: port["port"] for port in service["spec"]["ports"]} == ports


def test_workloads_select_their_own_pods(objects: list[Object]) -> None:
    for workload in of_kind(objects, *RUNNING):
        labels = pod_of(workload)["metadata"]["labels"]
        assert selects(workload["spec"]["selector"], labels)


# ---- the connection ConfigMap --------------------------------------------------------------------


def test_the_connection_has_these_settings(everything: list[Object]) -> None:
    data = one(everything, "ConfigMap", "bapo-connection")["data"]
    assert {name: value for name, value in data.items() if name != "BAPO_TRAINER_POD"} == {
        "BAPO_BUFFER_URL": "http://bapo-buffer.ml.svc:8700",
        "BAPO_VERIFIER_URL": "http://bapo-verifier.ml.svc:8701",
        "BAPO_S3_ENDPOINT": "https://s3.example.com",
        "BAPO_S3_BUCKET": "bapo-production",
        "BAPO_RELEASE": "bapo",
        "BAPO_CONNECTION": "bapo-connection",
        "BAPO_TOKEN_SECRET": "our-token",
        "BAPO_TRAINER_TOKEN_KEY": "BAPO_TRAINER_TOKEN",
        "BAPO_REPLICA_HOSTS": ".bapo-rollout.ml.svc",
        "BAPO_S3_SECRET": "bapo-external-s3",
        "BAPO_DASHBOARD_URL": "https://bapo.example.com",
        "BAPO_TRAINER_IMAGE": "registry.example.com/mirror/bapo/trainer:0.3.0",
        "BAPO_TRAINER_SERVICE_ACCOUNT": "bapo-trainer",
        "BAPO_TRAINER_JOB_KIND": "PyTorchJob",
        "BAPO_TRAINER_QUEUE": "gpus",
        "BAPO_TRAINER_PULL_SECRETS": "mirror,other",
        "BAPO_TRAINER_PULL_POLICY": "IfNotPresent",
        "BAPO_S3_REGION": "eu-west-1",
        "BAPO_S3_PATH_STYLE": "always",
        "BAPO_S3_CREDENTIALS": "keys",
        "BAPO_CA_BUNDLE": "authorities",
        "SSL_CERT_FILE": "/etc/bapo/ca/ca.crt",
        "HTTP_PROXY": "http://proxy:3128",
        "HTTPS_PROXY": "http://proxy:3128",
        "NO_PROXY": "localhost,127.0.0.1,.svc,.cluster.local",
        "HF_ENDPOINT": "https://hub.example.com",
    }
    pod = TrainerPod.model_validate_json(data["BAPO_TRAINER_POD"])
    assert (pod.priority_class_name, pod.node_selector) == ("low", {"pool": "gpu"})
    assert pod.tolerations[0]["key"] == "nvidia.com/gpu"
    assert pod.runtime_class_name == "nvidia"
    assert not pod.security_context["readOnlyRootFilesystem"]
    assert pod.security_context["capabilities"] == {"drop": ["ALL"]}


def test_a_release_with_cloud_identities_has_no_keys() -> None:
    identity = {"s3.credentials": "identity", "s3.existingSecret": ""}
    objects = render(Case(("production",), identity))
    data = one(objects, "ConfigMap", "bapo-connection")["data"]
    assert (data["BAPO_S3_CREDENTIALS"], data["BAPO_S3_SECRET"]) == ("identity", "")
    for workload in workloads(objects):
        assert "bapo-s3" not in json.dumps(pod_of(workload)["spec"])


def test_the_root_file_system_of_the_rollouts_can_be_writable() -> None:
    """Some versions of NVIDIA's CDI hook fail with a read-only one."""
    writable = {"rollout.securityContext": {"readOnlyRootFilesystem": False}}
    objects = render(Case(("dev",), writable))
    context = container_of(objects, "StatefulSet", "bapo-rollout")["securityContext"]
    assert context["readOnlyRootFilesystem"] is False
    assert context["capabilities"] == {"drop": ["ALL"]}


def test_user_ids_can_be_left_to_the_cluster(dev: list[Object]) -> None:
    """OpenShift refuses pods that choose them."""
    unset = dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"))
    objects = render(Case(("dev",), {"podSecurityContext": unset}))
    for workload in workloads(objects):
        context = pod_of(workload)["spec"]["securityContext"]
        assert not unset.keys() & context.keys(), workload["metadata"]["name"]
        assert context["runAsNonRoot"] is True
    pod = json.loads(one(objects, "ConfigMap", "bapo-connection")["data"]["BAPO_TRAINER_POD"])
    assert not unset.keys() & pod["podSecurityContext"].keys()


def test_certificates_of_authorities_are_mounted_where_the_variable_says(
    everything: list[Object],
) -> None:
    data = one(everything, "ConfigMap", "bapo-connection")["data"]
    for kind, name in (
        ("Deployment", "bapo-buffer"),
        ("Deployment", "bapo-collector"),
        ("StatefulSet", "bapo-rollout"),
    ):
        spec = pod_of(one(everything, kind, name))["spec"]
        assert {"name": "ca", "configMap": {"name": "authorities"}} in spec["volumes"]
        (mount,) = (
            mount for mount in spec["containers"][0]["volumeMounts"] if mount["name"] == "ca"
        )
        assert data["SSL_CERT_FILE"] == f"{mount['mountPath']}/ca.crt"
        assert mount["mountPath"] == CA_DIRECTORY


@pytest.mark.parametrize("case", CASES)
def test_the_settings_of_the_training_job_are_valid(case: str) -> None:
    data = one(render(CASES[case]), "ConfigMap", connection_of(case))["data"]
    TrainerPod.model_validate_json(data["BAPO_TRAINER_POD"])


def connection_of(case: str) -> str:
    (name,) = (
        manifest["metadata"]["name"]
        for manifest in of_kind(render(CASES[case]), "ConfigMap")
        if manifest["metadata"]["name"].endswith("-connection")
    )
    return str(name)


def test_the_connection_names_objects_that_exist(dev: list[Object]) -> None:
    data = one(dev, "ConfigMap", "bapo-connection")["data"]
    assert data["BAPO_S3_ENDPOINT"] == "http://bapo-s3.ml.svc:8333"
    assert one(dev, "Secret", data["BAPO_TOKEN_SECRET"])
    assert one(dev, "Secret", data["BAPO_S3_SECRET"])
    assert one(dev, "ServiceAccount", data["BAPO_TRAINER_SERVICE_ACCOUNT"])


def test_a_changed_address_restarts_its_readers_and_a_changed_queue_none() -> None:
    def checksums(sets: dict[str, str]) -> set[str]:
        objects = render(Case(("production",), sets))
        readers = [
            one(objects, "Deployment", "bapo-buffer"),
            one(objects, "Deployment", "bapo-collector"),
            one(objects, "StatefulSet", "bapo-rollout"),
        ]
        (checksum,) = {
            pod_of(manifest)["metadata"]["annotations"]["checksum/config"] for manifest in readers
        }
        return {checksum}

    before = checksums({})
    assert checksums({"s3.bucket": "another"}) != before
    assert checksums({"kueue.queue": "another"}) == before


def test_other_addresses_of_replicas_restart_the_collector_and_not_the_api() -> None:
    """The collector calls a replica at no address but those that it read at its start."""

    def annotations(case: Case, name: str) -> dict[str, str]:
        found: dict[str, str] = pod_of(one(render(case), "Deployment", name))["metadata"][
            "annotations"
        ]
        return found

    one_node = Case(("dev",))
    two_nodes = Case(("dev",), {"rollout.nodes": 2, "rollout.pipelineParallelSize": 2})
    for name, restarts in (("bapo-collector", True), ("bapo-buffer", False)):
        changed = annotations(two_nodes, name) != annotations(one_node, name)
        assert changed == restarts, name


# ---- rights --------------------------------------------------------------------------------------


RIGHTS = {
    "bapo-pipeline": {
        ("", "configmaps", "get"),
        *(("kubeflow.org", "pytorchjobs", verb) for verb in ("get", "list", "create", "delete")),
        *(
            ("trainer.kubeflow.org", "trainjobs", verb)
            for verb in ("get", "list", "create", "delete")
        ),
        *(
            ("trainer.kubeflow.org", "trainingruntimes", verb)
            for verb in ("get", "create", "update", "delete")
        ),
        ("", "pods", "list"),
        ("", "pods/log", "get"),
        ("", "events", "list"),
        ("argoproj.io", "workflows", "get"),
    },
    "bapo-reaper": {
        *(("kubeflow.org", "pytorchjobs", verb) for verb in ("get", "list", "delete")),
        *(("trainer.kubeflow.org", "trainjobs", verb) for verb in ("get", "list", "delete")),
        *(("trainer.kubeflow.org", "trainingruntimes", verb) for verb in ("get", "delete")),
        ("", "pods", "list"),
        ("argoproj.io", "workflows", "get"),
    },
}


@pytest.mark.parametrize("name", RIGHTS)
def test_rights_are_exactly_these(production: list[Object], name: str) -> None:
    assert not of_kind(production, "ClusterRole", "ClusterRoleBinding")
    assert {role["metadata"]["name"] for role in of_kind(production, "Role")} == set(RIGHTS)
    granted = {
        (group, resource, verb)
        for rule in one(production, "Role", name)["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert granted == RIGHTS[name]
    binding = one(production, "RoleBinding", name)
    assert binding["roleRef"]["name"] == name
    subjects = [(subject["namespace"], subject["name"]) for subject in binding["subjects"]]
    assert (
        subjects
        == {
            "bapo-pipeline": [("ml", "default-editor"), ("ml", "pipeline-runner")],
            "bapo-reaper": [("ml", "bapo-reaper")],
        }[name]
    )


def test_with_a_queue_a_pipeline_may_read_workloads(everything: list[Object]) -> None:
    rules = one(everything, "Role", "bapo-pipeline")["rules"]
    (rule,) = (rule for rule in rules if rule["apiGroups"] == ["kueue.x-k8s.io"])
    assert (rule["resources"], rule["verbs"]) == (["workloads"], ["get", "list"])


def test_the_scaler_may_change_one_number_and_upgrades_do_not() -> None:
    objects = render(CASES["scaled to zero"])
    assert "replicas" not in one(objects, "StatefulSet", "bapo-rollout")["spec"]
    (rule,) = one(objects, "Role", "bapo-scaler")["rules"]
    assert rule == {
        "apiGroups": ["apps"],
        "resources": ["statefulsets/scale"],
        "resourceNames": ["bapo-rollout"],
        "verbs": ["get", "patch"],
    }
    (container,) = pod_of(one(objects, "Deployment", "bapo-scaler"))["spec"]["containers"]
    assert container["args"] == [
        "--namespace=ml",
        "--statefulset=bapo-rollout",
        "--replicas=4",
        "--idle-minutes=10",
    ]


def test_the_scaler_of_replicas_of_several_nodes_scales_their_leaderworkerset() -> None:
    objects = render(CASES["several nodes, scaled to zero"])
    assert "replicas" not in one(objects, "LeaderWorkerSet", "bapo-nodes")["spec"]
    (rule,) = one(objects, "Role", "bapo-scaler")["rules"]
    assert rule == {
        "apiGroups": ["leaderworkerset.x-k8s.io"],
        "resources": ["leaderworkersets/scale"],
        "resourceNames": ["bapo-nodes"],
        "verbs": ["get", "patch"],
    }
    (container,) = pod_of(one(objects, "Deployment", "bapo-scaler"))["spec"]["containers"]
    assert "--leader-worker-set=bapo-nodes" in container["args"]
    assert not [argument for argument in container["args"] if "statefulset" in argument]


def test_no_service_account_means_no_role(everything: list[Object]) -> None:
    assert not of_kind(render(CASES["least"]), "Role", "RoleBinding", "CronJob")
    binding = one(everything, "RoleBinding", "bapo-pipeline")
    subject = {"kind": "ServiceAccount", "name": "runner", "namespace": NAMESPACE}
    assert binding["subjects"] == [subject]


def test_the_releases_own_jobs_have_a_queue_where_kueue_suspends_those_without(
    everything: list[Object],
) -> None:
    label = "kueue.x-k8s.io/queue-name"
    jobs = [
        one(everything, "Job", "bapo-migrate"),
        one(everything, "CronJob", "bapo-reaper")["spec"]["jobTemplate"],
    ]
    assert [job["metadata"]["labels"][label] for job in jobs] == ["small", "small"]
    assert label not in json.dumps(render(CASES["least"]))


# ---- migrations ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "hook", "secret"),
    [
        ("dev", "post-install,pre-upgrade", "bapo-database"),
        ("production", "pre-install,pre-upgrade", "bapo-external-database"),
        ("own keys", "pre-install,pre-upgrade", "bapo-migrate"),
    ],
)
def test_migrations_run_when_their_database_exists(case: str, hook: str, secret: str) -> None:
    objects = render(CASES[case])
    job = one(objects, "Job", "bapo-migrate")
    annotations = job["metadata"]["annotations"]
    assert annotations["helm.sh/hook"] == hook
    assert annotations["helm.sh/hook-delete-policy"] == "before-hook-creation,hook-succeeded"
    spec = pod_of(job)["spec"]
    variables = {variable["name"]: variable for variable in spec["containers"][0]["env"]}
    assert variables["BAPO_DATABASE_URL"]["valueFrom"]["secretKeyRef"]["name"] == secret
    # Objects of the release may not exist yet.
    assert "serviceAccountName" not in spec
    assert "envFrom" not in spec["containers"][0]


def test_the_secret_of_the_migrations_is_created_before_them() -> None:
    objects = render(CASES["own keys"])
    secret = one(objects, "Secret", "bapo-migrate")
    job = one(objects, "Job", "bapo-migrate")
    weights = [
        int(manifest["metadata"]["annotations"]["helm.sh/hook-weight"])
        for manifest in (secret, job)
    ]
    assert weights[0] < weights[1]
    assert secret["data"] == one(objects, "Secret", "bapo-database")["data"]


def test_migrations_are_limited_in_time_and_retries(production: list[Object]) -> None:
    spec = one(production, "Job", "bapo-migrate")["spec"]
    assert spec["activeDeadlineSeconds"] > 300
    assert spec["backoffLimit"] == 3
    assert spec["ttlSecondsAfterFinished"]


# ---- ingress and monitoring ----------------------------------------------------------------------


def test_ingress_and_route_lead_to_the_buffer_service(
    dev: list[Object], everything: list[Object]
) -> None:
    assert not of_kind(dev, "Ingress", "HTTPRoute", "ServiceMonitor", "PrometheusRule")
    (ingress,) = of_kind(everything, "Ingress")
    (rule,) = ingress["spec"]["rules"]
    (path,) = rule["http"]["paths"]
    assert rule["host"] == "bapo.example.com"
    assert path["backend"]["service"] == {"name": "bapo-buffer", "port": {"name": "http"}}
    (route,) = of_kind(everything, "HTTPRoute")
    assert route["spec"]["rules"][0]["backendRefs"] == [{"name": "bapo-buffer", "port": 8700}]


def test_ingress_and_route_lead_below_the_path_that_the_service_knows() -> None:
    sets = {**EVERYTHING, "buffer.rootPath": "/team/bapo"}
    objects = render(Case(("production",), sets))
    (ingress,), (route,) = of_kind(objects, "Ingress"), of_kind(objects, "HTTPRoute")
    (path,) = ingress["spec"]["rules"][0]["http"]["paths"]
    assert (path["path"], path["pathType"]) == ("/team/bapo", "Prefix")
    (match,) = route["spec"]["rules"][0]["matches"]
    assert match == {"path": {"type": "PathPrefix", "value": "/team/bapo"}}
    (container,) = pod_of(one(objects, "Deployment", "bapo-buffer"))["spec"]["containers"]
    assert {"name": "BAPO_ROOT_PATH", "value": "/team/bapo"} in container["env"]
    connection = one(objects, "ConfigMap", "bapo-connection")["data"]
    assert connection["BAPO_DASHBOARD_URL"] == "https://bapo.example.com/team/bapo"
    assert connection["BAPO_BUFFER_URL"] == "http://bapo-buffer.ml.svc:8700"


def test_prometheus_scrapes_the_services_with_metrics(production: list[Object]) -> None:
    (monitor,) = of_kind(production, "ServiceMonitor")
    scraped = {
        manifest["metadata"]["name"]
        for manifest in of_kind(production, "Service")
        if selects(monitor["spec"]["selector"], manifest["metadata"]["labels"])
    }
    assert scraped == {"bapo-buffer", "bapo-verifier", "bapo-rollout"}


METRIC = re.compile(r"bapo_[a-z_]+")


def defined_metrics() -> set[str]:
    code = "".join(path.read_text() for path in (ROOT / "services").rglob("*.py"))
    return set(re.findall(r'"(bapo_[a-z_]+)"', code))


def test_the_dashboard_shows_metrics_that_exist(production: list[Object]) -> None:
    data = one(production, "ConfigMap", "bapo-dashboard")["data"]
    dashboard = json.loads(data["bapo.json"])
    shown = {
        metric.removesuffix("_total")
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for metric in METRIC.findall(target["expr"])
    }
    assert shown
    assert shown <= defined_metrics()


def test_versions_are_those_of_the_project() -> None:
    chart = (CHART / "Chart.yaml").read_text()
    project = (ROOT / "pyproject.toml").read_text()
    (version,) = re.findall(r'^version = "(.*)"$', project, re.MULTILINE)
    assert f'appVersion: "{version}"' in chart


def test_alerts_are_about_metrics_that_exist_in_the_release(production: list[Object]) -> None:
    (rule,) = of_kind(production, "PrometheusRule")
    alerts = [alert for group in rule["spec"]["groups"] for alert in group["rules"]]
    assert len(alerts) == 6
    for alert in alerts:
        promql_parser.parse(alert["expr"])
        assert set(METRIC.findall(alert["expr"])) <= defined_metrics()
        selectors = alert["expr"].count("bapo_")
        assert alert["expr"].count('{namespace="ml"') == selectors, "it must ignore other releases"
        assert alert["annotations"].keys() == {"summary", "description"}
        assert "{{" not in re.sub(r"{{ (humanizeDuration )?\$\w+(\.\w+)? }}", "", str(alert))
