"""Who may speak to whom: exactly this, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from pipelines.pytorchjob import Deployment, Resources, build_job
from pipelines.settings import DeploymentSettings
from tests.charts.cases import CASES, FROM_INGRESS
from tests.charts.helm import NAMESPACE, Case, Object, of_kind, one, pod_of, render
from tests.charts.network import Address, End, Flow, Pod, allowed

OURS = ("buffer", "migrate", "verifier", "rollout", "collector", "trainer", "test")
BUNDLED = ("postgres", "s3")
PORTS = (22, 53, 443, 5432, 8080, 8333, 8700, 8701, 8702, 8703, 9333, 23456, 50000)
TRAINER_PORTS = [port for port in PORTS if port >= 1024]


def release_pod(component: str, objects: list[Object]) -> Pod:
    """Returns a component's pod with the chart's labels, or the training job's pod with those that
    the pipeline gives it."""
    for workload in of_kind(objects, "Deployment", "StatefulSet", "Job", "Pod"):
        labels = pod_of(workload)["metadata"]["labels"]
        if labels["app.kubernetes.io/component"] == component:
            return Pod(labels)
    assert component == "trainer"
    connection = one(objects, "ConfigMap", "bapo-connection")["data"]
    with pytest.MonkeyPatch.context() as environment:
        for name, value in connection.items():
            environment.setenv(name, value)
        deployment = Deployment.from_settings(DeploymentSettings.load(), NAMESPACE)
    job = build_job("countdown", deployment, Resources())
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
}


def flows(objects: list[Object], components: tuple[str, ...]) -> Iterator[tuple[str, str, int]]:
    """Everything that is let through, if one of ours sends or receives it. DNS apart."""
    own = {each: release_pod(each, objects) for each in components}
    ends: dict[str, End] = {**own, **OTHERS}
    for source, destination in ((a, b) for a in ends for b in ends if a in own or b in own):
        for port in PORTS:
            if port != 53 and allowed(objects, Flow(ends[source], ends[destination], port)):
                yield source, destination, port


TO_SERVICES = {
    *((each, "buffer", 8700) for each in ("rollout", "collector", "trainer", "test", "pipeline")),
    *((each, "verifier", 8701) for each in ("collector", "test")),
    ("collector", "rollout", 8702),
    *(("trainer", "trainer", port) for port in TRAINER_PORTS),
}
TO_BUNDLED = {
    *((each, "postgres", 5432) for each in ("buffer", "migrate")),
    *((each, "s3", 8333) for each in ("buffer", "rollout", "collector", "trainer", "pipeline")),
}
TO_OUTSIDE = {
    *((each, "internet", 5432) for each in ("buffer", "migrate")),
    *((each, "internet", 443) for each in ("buffer", "rollout", "collector", "trainer")),
}
DIRECT_WEIGHTS = {
    (*ends, port)
    for ends in (("trainer", "rollout"), ("rollout", "trainer"))
    for port in TRAINER_PORTS
}
METRICS = {
    ("prometheus", *each) for each in (("buffer", 8700), ("verifier", 8701), ("rollout", 8702))
}


def test_everything_bundled(dev: list[Object]) -> None:
    assert set(flows(dev, OURS + BUNDLED)) == TO_SERVICES | TO_BUNDLED


def test_database_and_object_store_outside(production: list[Object]) -> None:
    assert set(flows(production, OURS)) == TO_SERVICES | TO_OUTSIDE | METRICS


def test_from_outside_through_an_ingress(everything: list[Object]) -> None:
    ingress = {("ingress", "buffer", 8700)}
    expected = TO_SERVICES | TO_OUTSIDE | METRICS | ingress | DIRECT_WEIGHTS
    assert set(flows(everything, OURS)) == expected


def test_air_gapped_reaches_named_namespaces_and_no_address() -> None:
    objects = render(CASES["air-gapped"])
    may = partial(allowed, objects)
    storage, databases = Pod({}, namespace="storage"), Pod({}, namespace="databases")
    assert {each for each in flows(objects, OURS) if each[1] == "internet"} == set()
    assert may(Flow(release_pod("rollout", objects), storage, 9000))
    assert may(Flow(release_pod("migrate", objects), databases, 5432))
    assert not may(Flow(release_pod("rollout", objects), databases, 5432))
    assert not may(Flow(release_pod("buffer", objects), storage, 5432))


@pytest.mark.parametrize("protocol", ["UDP", "TCP"])
def test_names_are_looked_up_by_those_that_call_somebody(dev: list[Object], protocol: str) -> None:
    ask = {
        each
        for each in OURS + BUNDLED
        if allowed(dev, Flow(release_pod(each, dev), OTHERS["dns"], 53, protocol))
    }
    assert ask == {"buffer", "migrate", "rollout", "collector", "trainer", "test"}
    assert not allowed(dev, Flow(release_pod("buffer", dev), OTHERS["internet"], 53, protocol))


def test_without_policies_everything_passes() -> None:
    objects = render(CASES["least"])
    assert not of_kind(objects, "NetworkPolicy")


def test_a_policy_selects_the_migrations_before_an_upgrade(production: list[Object]) -> None:
    """They are objects of the release and no hooks, so that those of the last one are in force."""
    for policy in of_kind(production, "NetworkPolicy"):
        assert "annotations" not in policy["metadata"]


def test_peers_with_both_selectors_need_both() -> None:
    """What the evaluator itself does with the peers that people write."""
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
