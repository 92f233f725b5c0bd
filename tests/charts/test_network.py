"""Tests that the network policies allow these flows and no others."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from pipelines.pytorchjob import build_pytorchjob
from pipelines.settings import DeploymentSettings
from pipelines.training_job import Deployment, Resources, TrainingJob
from tests.charts.cases import CASES, FROM_INGRESS
from tests.charts.helm import NAMESPACE, Case, Object, of_kind, one, pod_of, render, workloads
from tests.charts.network import Address, End, Flow, Pod, allowed

COMPONENTS = ("buffer", "migrate", "verifier", "rollout", "collector", "trainer", "reaper", "test")
BUNDLED = ("postgres", "s3")
PORTS = (22, 53, 80, 443, 3128, 5432, 6432, 8080, 8333, 8443)
PORTS += (8700, 8701, 8702, 8703, 9000, 9333, 23456, 50000)
TRAINER_PORTS = [port for port in PORTS if port >= 1024]
ASSIGNED_PORTS = [port for port in PORTS if 32768 <= port <= 60999]
"""Ports that Linux assigns by default. The rendezvous of trainers is not among them."""


def release_pod(component: str, objects: list[Object]) -> Pod:
    """Returns a component's pod with the chart's labels, or the training job's pod with those that
    the pipeline gives it."""
    for workload in workloads(objects):
        labels = pod_of(workload)["metadata"]["labels"]
        if labels["app.kubernetes.io/component"] == component:
            return Pod(labels)
    assert component == "trainer"
    connection = one(objects, "ConfigMap", "bapo-connection")["data"]
    with pytest.MonkeyPatch.context() as environment:
        for name, value in connection.items():
            environment.setenv(name, value)
        deployment = Deployment.from_settings(DeploymentSettings.load(), NAMESPACE)
    job = build_pytorchjob(TrainingJob("countdown", deployment, Resources()))
    worker = job["spec"]["pytorchReplicaSpecs"]["Worker"]
    return Pod(worker["template"]["metadata"]["labels"])


OTHERS: dict[str, End] = {
    "pipeline": Pod({"app.kubernetes.io/part-of": "bapo"}),
    "stranger": Pod({"app": "stranger"}),
    "elsewhere": Pod({"app.kubernetes.io/part-of": "bapo"}, namespace="elsewhere"),
    "another release": Pod(
        {
            "app.kubernetes.io/name": "bapo",
            "app.kubernetes.io/instance": "other",
            "app.kubernetes.io/component": "verifier",
            "app.kubernetes.io/part-of": "bapo",
        }
    ),
    "prometheus": Pod({"app": "prometheus"}, namespace="monitoring"),
    "ingress": Pod({"app": "ingress"}, namespace="ingress"),
    "dns": Pod({"k8s-app": "kube-dns"}, namespace="kube-system"),
    "internet": Address("93.184.216.34"),
    "internet by IPv6": Address("2606:2800:21f:cb07:6820:80da:af6b:8b2c"),
}
INTERNET = ("internet", "internet by IPv6")


def flows(objects: list[Object], components: tuple[str, ...]) -> Iterator[tuple[str, str, int]]:
    """Yields every flow that is allowed from or to a pod of the release, except for DNS."""
    release = {component: release_pod(component, objects) for component in components}
    ends: dict[str, End] = {**release, **OTHERS}
    for source, destination in ((a, b) for a in ends for b in ends if a in release or b in release):
        for port in PORTS:
            if port != 53 and allowed(objects, Flow(ends[source], ends[destination], port)):
                yield source, destination, port


TO_SERVICES = {
    *(
        (source, "buffer", 8700)
        for source in ("rollout", "collector", "trainer", "reaper", "test", "pipeline")
    ),
    *((source, "verifier", 8701) for source in ("collector", "test")),
    ("collector", "rollout", 8702),
    *(("trainer", "trainer", port) for port in TRAINER_PORTS),
    *(("reaper", internet, 443) for internet in INTERNET),  # where the Kubernetes API is
}
NO_SECRET = {"database.existingSecret": ""}
TO_BUNDLED = {
    *((source, "postgres", 5432) for source in ("buffer", "migrate")),
    *((source, "s3", 8333) for source in ("buffer", "rollout", "collector", "trainer", "pipeline")),
}
S3_CLIENTS = ("buffer", "rollout", "collector", "trainer")


def to_outside(sources: tuple[str, ...], port: int) -> set[tuple[str, str, int]]:
    """Returns the flows to all addresses of the internet, of either family."""
    return {(source, internet, port) for source in sources for internet in INTERNET}


TO_OUTSIDE = to_outside(("buffer", "migrate"), 5432) | to_outside(S3_CLIENTS, 443)
DIRECT_WEIGHTS = {
    ("trainer", "rollout", 8702),
    *(
        (*ends, port)
        for ends in (("trainer", "rollout"), ("rollout", "trainer"))
        for port in ASSIGNED_PORTS
    ),
}
METRICS = {
    ("prometheus", *destination)
    for destination in (("buffer", 8700), ("verifier", 8701), ("rollout", 8702))
}


def test_flows_with_everything_bundled(dev: list[Object]) -> None:
    assert set(flows(dev, COMPONENTS + BUNDLED)) == TO_SERVICES | TO_BUNDLED


def test_flows_to_an_external_database_and_object_store(production: list[Object]) -> None:
    assert set(flows(production, COMPONENTS)) == TO_SERVICES | TO_OUTSIDE | METRICS


def test_flows_from_an_ingress_and_between_trainers_and_rollouts(everything: list[Object]) -> None:
    ingress = {("ingress", "buffer", 8700)}
    proxy = to_outside(S3_CLIENTS, 3128)
    expected = TO_SERVICES | TO_OUTSIDE | METRICS | ingress | DIRECT_WEIGHTS | proxy
    assert set(flows(everything, COMPONENTS)) == expected


@pytest.mark.parametrize(
    ("values", "database", "s3"),
    [
        ({"s3.endpoint": "http://minio:9000"}, 5432, 9000),
        ({"s3.endpoint": "http://minio"}, 5432, 80),
        ({"s3.endpoint": "https://s3.example.com:8443"}, 5432, 8443),
        ({"s3.endpoint": "http://minio", "networkPolicy.externalS3.port": 9000}, 5432, 9000),
        ({"database.url": "postgresql://a:b@db:6432/bapo?x=y:1", **NO_SECRET}, 6432, 443),
        ({"database.url": "postgresql://a:b@db/bapo", **NO_SECRET}, 5432, 443),
        ({"database.url": "postgresql://a:b%40/%3Ac@db:6432/bapo", **NO_SECRET}, 6432, 443),
        ({"database.url": "postgresql://a:b/c@db:6432/bapo", **NO_SECRET}, 6432, 443),
        ({"database.url": "postgresql://a:b@[fd00::5]:6432/bapo", **NO_SECRET}, 6432, 443),
        ({"database.url": "postgresql://a:b@[fd00::5]/bapo", **NO_SECRET}, 5432, 443),
        ({"database.url": "postgresql://db:6432\n", **NO_SECRET}, 6432, 443),
    ],
)
def test_the_ports_outside_are_those_of_the_addresses(
    values: dict[str, Any], database: int, s3: int
) -> None:
    objects = render(Case(("production",), values))
    outside = {flow for flow in flows(objects, COMPONENTS) if flow[1] in INTERNET}
    assert outside == (
        to_outside(("buffer", "migrate"), database)
        | to_outside(S3_CLIENTS, s3)
        | to_outside(("reaper",), 443)
    )


METADATA = ("169.254.170.23", "fd00:ec2::23", "169.254.169.254")
"""Where AWS gives pods their identity: EKS Pod Identity, and the metadata of the machine."""


@pytest.mark.parametrize("credentials", ["keys", "identity"])
def test_pods_with_an_identity_alone_reach_where_the_cloud_gives_it(credentials: str) -> None:
    values = {"networkPolicy.externalS3.to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}
    if credentials == "identity":
        values |= {"s3.credentials": "identity", "s3.existingSecret": ""}
    objects = render(Case(("production",), values))
    reaching = {
        component
        for component in COMPONENTS
        for address in METADATA
        if allowed(objects, Flow(release_pod(component, objects), Address(address), 80))
    }
    assert reaching == (set(S3_CLIENTS) if credentials == "identity" else set())


def test_pods_of_replicas_of_several_nodes_reach_each_other() -> None:
    among = {("rollout", "rollout", port) for port in TRAINER_PORTS}
    expected = TO_SERVICES | TO_OUTSIDE | METRICS | among
    assert set(flows(render(CASES["several nodes"]), COMPONENTS)) == expected


def test_flows_of_the_scaler() -> None:
    objects = render(CASES["scaled to zero"])
    scaler = {flow for flow in flows(objects, (*COMPONENTS, "scaler")) if "scaler" in flow}
    assert scaler == {("scaler", "buffer", 8700)} | to_outside(("scaler",), 443)


def test_air_gapped_reaches_named_namespaces_and_no_address() -> None:
    objects = render(CASES["air-gapped"])
    may = partial(allowed, objects)
    storage, databases = Pod({}, namespace="storage"), Pod({}, namespace="databases")
    assert {flow for flow in flows(objects, COMPONENTS) if flow[1] in INTERNET} == set()
    assert may(Flow(release_pod("rollout", objects), storage, 9000))
    assert may(Flow(release_pod("migrate", objects), databases, 5432))
    assert not may(Flow(release_pod("rollout", objects), databases, 5432))
    assert not may(Flow(release_pod("buffer", objects), storage, 5432))


@pytest.mark.parametrize("protocol", ["UDP", "TCP"])
def test_only_pods_with_egress_may_use_dns(dev: list[Object], protocol: str) -> None:
    using_dns = {
        component
        for component in COMPONENTS + BUNDLED
        if allowed(dev, Flow(release_pod(component, dev), OTHERS["dns"], 53, protocol))
    }
    assert using_dns == {*COMPONENTS} - {"verifier"}
    assert not allowed(dev, Flow(release_pod("buffer", dev), OTHERS["internet"], 53, protocol))


def test_network_policies_can_be_disabled() -> None:
    objects = render(CASES["least"])
    assert not of_kind(objects, "NetworkPolicy")


def test_policies_are_no_hooks(production: list[Object]) -> None:
    """So those of the installed release apply to the migrations before an upgrade."""
    for policy in of_kind(production, "NetworkPolicy"):
        assert "annotations" not in policy["metadata"]


def test_peers_with_both_selectors_need_both() -> None:
    """Tests the evaluator of this module with a peer as users write it."""
    peer = {
        "namespaceSelector": FROM_INGRESS[0]["namespaceSelector"],
        "podSelector": {"matchLabels": {"app": "controller"}},
    }
    objects = render(Case(("dev",), {"networkPolicy.ingressFrom": [peer]}))
    buffer = release_pod("buffer", objects)
    controller = Pod({"app": "controller"}, namespace="ingress")
    assert allowed(objects, Flow(controller, buffer, 8700))
    assert not allowed(objects, Flow(Pod({}, namespace="ingress"), buffer, 8700))
    assert not allowed(objects, Flow(Pod({"app": "controller"}), buffer, 8700))
