"""Tests that invalid values are refused with the remedy, and that all values are documented."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs.generate import chart
from tests.charts.cases import DATABASE_URL, FROM_INGRESS, SEVERAL_NODES
from tests.charts.cluster import LEADER_WORKER_SETS, cluster
from tests.charts.helm import CHART, NAMESPACE, Case, HelmError, render, run

# (values, part of the message)
BY_SCHEMA = [
    ({"verifier.workers": 0}, "workers"),
    ({"verifier.workers": "two"}, "workers"),
    ({"verifier.memoryMb": 1.5}, "memoryMb"),
    ({"verifier.deadlineSeconds": 0}, "deadlineSeconds"),
    ({"buffer.replicas": -1}, "replicas"),
    ({"buffer.replica": 3}, "replica"),
    ({"buffer.rootPath": "team"}, "rootPath"),
    ({"buffer.rootPath": "/team/"}, "rootPath"),
    ({"buffer.podDisruptionBudget.maxUnavailable": "some"}, "maxUnavailable"),
    ({"buffer.podDisruptionBudget.maxUnavailable": None}, "maxUnavailable"),
    ({"buffer.resources.limits": None}, "limits"),
    ({"buffer.replicas": None}, "replicas"),
    ({"buffer.resources.limits.memory": "lots"}, "memory"),
    ({"buffer.autoscaling.targetCPU": 101}, "targetCPU"),
    ({"collector.replicas": 2}, "replicas"),
    ({"rollout.gpus": 0.5}, "gpus"),
    ({"rollout.nodes": 0}, "nodes"),
    ({"rollout.pipelineParallelSize": 0}, "pipelineParallelSize"),
    ({"rollout.gpuResource": "gpu"}, "gpuResource"),
    ({"rollout.tensorParallelSize": 0}, "tensorParallelSize"),
    ({"rollout.vllmArgs": "--a --b"}, "vllmArgs"),
    ({"rollout.extraEnv": {"A": "b"}}, "extraEnv"),
    ({"rollout.scratch.size": "big"}, "size"),
    ({"image.pullPolicy": "Sometimes"}, "pullPolicy"),
    ({"image.service": "Bapo/Service"}, "service"),
    ({"image.pullSecrets": [{"name": "a"}]}, "pullSecrets"),
    ({"s3.endpoint": "s3.example.com"}, "endpoint"),
    *(
        ({key: address}, key.rpartition(".")[2])
        for key in ("s3.endpoint", "proxy.http", "proxy.https", "hub.endpoint")
        for address in ("https://user:password@example.com", "https://token@example.com:3128")
    ),
    ({"s3.bucket": "x"}, "bucket"),
    ({"database.existingSecret": "Not_A_Name"}, "existingSecret"),
    ({"fullnameOverride": "9lives"}, "fullnameOverride"),
    ({"networkPolicy.externalS3.port": 70000}, "port"),
    ({"networkPolicy.ingressFrom": [{}]}, "ingressFrom"),
    ({"pipeline.serviceAccounts": ["runner"]}, "serviceAccounts"),
    # A step reads the release's Secrets, so pipelines run in the release's namespace.
    ({"pipeline.serviceAccounts": [{"name": "runner", "namespace": "other"}]}, "namespace"),
    ({"monitoring.serviceMonitor.interval": "often"}, "interval"),
    ({"nonsense": True}, "nonsense"),
]
BY_TEMPLATE = [
    (
        {"database.existingSecret": ""},
        "database: no Postgres is configured. Set database.existingSecret",
    ),
    ({"database.url": DATABASE_URL}, "database: 2 of database.existingSecret, database.url"),
    ({"database.bundled.enabled": True}, "database: 2 of database.existingSecret, database.url"),
    (
        {"database.existingSecret": "", "database.url": "mysql://a:b@c/d"},
        "database.url: it must have the form postgresql://user:password@host:port/database",
    ),
    ({"s3.endpoint": ""}, "s3: no object store is configured. Set s3.endpoint"),
    ({"s3.bundled.enabled": True}, "s3: s3.bundled.enabled is true, and the bundled server"),
    ({"s3.accessKey": "a", "s3.secretKey": "b"}, "s3: both s3.existingSecret and s3.accessKey or"),
    ({"s3.existingSecret": ""}, "s3: the keys of https://s3.example.com are missing"),
    ({"s3.existingSecret": "", "s3.accessKey": "a"}, "s3: the keys of"),
    ({"image.tag": "latest"}, "image.tag: latest is not a fixed version"),
    ({"s3.bundled.image": "chrislusf/seaweedfs"}, "s3.bundled.image: chrislusf/seaweedfs has no"),
    ({"database.bundled.image": "host:5000/postgres"}, "host:5000/postgres has no fixed version"),
    ({"database.bundled.image": "postgres:latest"}, "postgres:latest has no fixed version"),
    (
        {"rollout.tensorParallelSize": 4},
        "rollout.tensorParallelSize x rollout.pipelineParallelSize is 4, but a replica has 2 GPU",
    ),
    ({"rollout.vllmArgs": ["--tensor-parallel-size=2"]}, "use rollout.tensorParallelSize"),
    ({"rollout.gpus": 8}, "is 2, but a replica has 8 GPUs (rollout.gpus x rollout.nodes), so that"),
    (
        {"rollout.nodes": 2},
        "is 2, but a replica has 4 GPUs (rollout.gpus x rollout.nodes), so that",
    ),
    (
        {**SEVERAL_NODES, "rollout.pipelineParallelSize": 4},
        "is 8, but a replica has 6 GPU(s) (rollout.gpus x rollout.nodes); raise rollout.gpus or",
    ),
    (
        {**SEVERAL_NODES, "rollout.gpus": 0, "rollout.nodes": 4},
        "is 6, which 4 pods cannot share equally (rollout.nodes); set rollout.pipelineParallelSize",
    ),
    (
        {**SEVERAL_NODES, "rollout.vllmArgs": ["--data-parallel-size=2"]},
        "rollout.vllmArgs: --data-parallel-size copies the model, and with rollout.nodes 3 one",
    ),
    (
        {**SEVERAL_NODES, "rollout.scratch.persistent": True},
        "rollout.scratch.persistent: the pods of a LeaderWorkerSet have no volumes of their own",
    ),
    ({"rollout.vllmArgs": ["--nnodes=2"]}, "the chart sets --nnodes=2 itself; use rollout.nodes"),
    (
        {"rollout.vllmArgs": ["--pipeline-parallel-size", "2"]},
        "the chart sets --pipeline-parallel-size itself; use rollout.pipelineParallelSize",
    ),
    (
        {"image.registry": ""},
        "image.registry: it is empty, and images of these names on Docker Hub",
    ),
    ({"s3.credentials": "identity"}, "s3: s3.credentials is identity, so pods use the cloud"),
    (
        {"rollout.extraEnv": [{"name": "BAPO_PORT", "value": "1"}]},
        "rollout.extraEnv: the chart sets variables that begin with BAPO_ itself; remove BAPO_PORT",
    ),
    (
        {"trainer.extraEnv": [{"name": "BAPO_RUN", "value": "other"}]},
        "trainer.extraEnv: the chart sets variables that begin with BAPO_ itself; remove BAPO_RUN",
    ),
    (
        {"verifier.extraEnv": [{"name": "BAPO_TOKEN", "value": "x"}]},
        "verifier.extraEnv: the chart sets variables that begin with BAPO_ itself; remove BAPO_T",
    ),
    (
        {"rollout.scaleToZero.enabled": True, "rollout.queue": "gpus"},
        "rollout.scaleToZero: Kueue refuses changes of the number of pods of rollout.queue",
    ),
    (
        {"rollout.scaleToZero.enabled": True, "rollout.replicas": 0},
        "rollout.replicas: it is 0, so scaleToZero would never start a pod; set at least 1",
    ),
    (
        {"verifier.autoscaling.maxReplicas": 2},
        "verifier.autoscaling: minReplicas is 3, and maxReplicas only 2; raise maxReplicas",
    ),
    (
        {"ingress.enabled": True, "networkPolicy.ingressFrom": FROM_INGRESS},
        "ingress.host: it is empty",
    ),
    (
        {"ingress.enabled": True, "ingress.host": "a.example.com"},
        "networkPolicy.ingressFrom: it is empty, so no request from outside",
    ),
    *(
        (
            {
                "database.existingSecret": "",
                "database.url": f"postgresql://app:{password}@db:6432/bapo",
            },
            "database.url: it has more than one @; in user and password, write @ as %40",
        )
        for password in ("p@ss", "p@ss/w", "p@ss/w@rd")
    ),
    (
        {"ingress.host": "b.example.com/bapo"},
        "ingress.host: b.example.com/bapo is more than a host name; set the path below it as "
        "buffer.rootPath",
    ),
    (
        {"httpRoute.hostnames": ["https://b.example.com"]},
        "httpRoute.hostnames: https://b.example.com is more than a host name",
    ),
    *(
        ({"buffer.rootPath": path}, f"buffer.rootPath: {path} cannot be told apart")
        for path in ("/v1", "/docs/bapo", "/a/..", "/openapi.json")
    ),
    (
        {"httpRoute.enabled": True, "networkPolicy.ingressFrom": FROM_INGRESS},
        "httpRoute: set both httpRoute.parentRefs (your gateway)",
    ),
    (
        {"networkPolicy.metricsFrom": []},
        "networkPolicy.metricsFrom: it is empty, so Prometheus could not scrape",
    ),
]


@pytest.mark.parametrize(("sets", "message"), BY_SCHEMA, ids=str)
def test_the_schema_names_the_value_that_it_refuses(
    sets: dict[str, Any], message: str, version: str
) -> None:
    refusal = refused(Case(("production",), sets), version)
    assert "the specifications of the schema" in refusal
    assert message in refusal


@pytest.mark.parametrize(("sets", "message"), BY_TEMPLATE, ids=str)
def test_the_template_refuses_combinations_with_the_remedy(
    sets: dict[str, Any], message: str
) -> None:
    assert message in refused(Case(("production",), sets))


@pytest.mark.parametrize("release", ["1bapo", "my.bapo"])
def test_releases_whose_services_kubernetes_would_refuse_are_refused(release: str) -> None:
    message = f"names would begin with {release}, which Kubernetes refuses for Services"
    assert message in refused(Case(("production",), release=release))
    assert render(Case(("production",), {"fullnameOverride": "bapo"}, release))


def test_the_defaults_alone_are_refused_with_what_to_set(version: str) -> None:
    refusal = refused(Case(), version)
    assert "database: no Postgres is configured. Set database.existingSecret" in refusal
    assert "s3: no object store is configured. Set s3.endpoint" in refusal


@pytest.mark.parametrize("url", ["mysql://a:pass-word-1@c/d", "postgresql://a:x@/pass-word-1@c/d"])
def test_messages_contain_no_password(url: str) -> None:
    sets = {"database.existingSecret": "", "database.url": url}
    assert "pass-word-1" not in refused(Case(("production",), sets))


def refused(case: Case, version: str = "4.1") -> str:
    with pytest.raises(HelmError) as error:
        render(case, version)
    return str(error.value)


# ---- documentation -------------------------------------------------------------------------------


def leaves(node: dict[str, Any], prefix: str = "") -> set[str]:
    paths = set()
    for key, value in node.items():
        paths |= leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}"}
    return paths


def test_the_schema_knows_every_value() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())

    definitions = schema["definitions"]

    def compare(values: dict[str, Any], schema: dict[str, Any], path: str) -> None:
        reference = schema.get("$ref", "").removeprefix("#/definitions/")
        schema = definitions[reference] if reference else schema
        properties = schema.get("properties", {})
        if not properties or reference == "resources":
            return  # users add keys of their own
        assert schema["additionalProperties"] is False, path
        assert set(values) == set(properties) - {"global"}, path
        for key, value in values.items():
            if isinstance(value, dict):
                compare(value, properties[key], f"{path}.{key}")

    compare(values, schema, "values")


def test_the_readme_is_current() -> None:
    """`make docs` updates it."""
    assert (CHART / "README.md").read_text() == chart.render()


def test_every_value_is_in_the_readme() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    documented = set(re.findall(r"^\| `([\w.]+)`", (CHART / "README.md").read_text(), re.MULTILINE))
    missing = {
        path
        for path in leaves(values)
        if not any(
            path == documented_path or path.startswith(f"{documented_path}.")
            for documented_path in documented
        )
    }
    assert missing == set()


@pytest.mark.parametrize("release", ["bapo", "maths"])
def test_the_notes_contain_the_next_commands(release: str, version: str, tmp_path: Path) -> None:
    text = notes(version, release, Case(("dev",)), tmp_path)
    name = "bapo" if release == "bapo" else "maths-bapo"
    assert f"helm test {release} --namespace ml" in text
    assert f"service/{name}-buffer 8700" in text
    assert f"get secret {name}-token" in text
    assert f"{name}-connection" in text
    assert "for development" in text


def test_the_notes_contain_the_address_of_the_ingress(version: str, tmp_path: Path) -> None:
    sets = {
        "ingress.enabled": True,
        "ingress.host": "bapo.example.com",
        "ingress.tls.secretName": "tls",
        "networkPolicy.ingressFrom": FROM_INGRESS,
    }
    text = notes(version, "bapo", Case(("production",), sets), tmp_path)
    assert "https://bapo.example.com/\n" in text
    assert "port-forward" not in text
    sets["buffer.rootPath"] = "/team/bapo"
    assert "https://bapo.example.com/team/bapo/\n" in notes(
        version, "bapo", Case(("production",), sets), tmp_path
    )


def test_replicas_of_several_nodes_need_the_controller_of_leaderworkersets(
    version: str, tmp_path: Path
) -> None:
    case = Case(("dev",), {"rollout.nodes": 2, "rollout.pipelineParallelSize": 2})
    with cluster(tmp_path, {}) as kubeconfig, pytest.raises(HelmError) as caught:
        install(version, "bapo", case, kubeconfig, dry_run="server")
    assert "rollout.nodes: it is 2, but this cluster has no LeaderWorkerSet" in " ".join(
        str(caught.value).split()
    )
    with cluster(tmp_path, {}, LEADER_WORKER_SETS) as kubeconfig:
        text = install(version, "bapo", case, kubeconfig, dry_run="server")
        assert "kind: LeaderWorkerSet" in text


def test_an_upgrade_keeps_values_by_the_option_that_takes_the_new_defaults(
    version: str, tmp_path: Path
) -> None:
    """Another option keeps the defaults of the earlier version, which had not all keys."""
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    del defaults["buffer"]["rootPath"]
    kept = yaml.safe_load((CHART / "values-dev.yaml").read_text())
    release = {
        "name": "bapo",
        "namespace": NAMESPACE,
        "version": 1,
        "info": {"status": "deployed"},
        "chart": {
            "metadata": {"name": "bapo", "version": "0.2.0", "apiVersion": "v2"},
            "templates": [],
            "values": defaults,
        },
        "config": {**kept, "image": {"registry": "registry.example.com/kept"}},
        "manifest": "",
    }
    with cluster(tmp_path, {}, release=release) as kubeconfig:
        upgrade = ("upgrade", "bapo", str(CHART), f"--namespace={NAMESPACE}", "--dry-run=server")
        upgrade += (f"--kubeconfig={kubeconfig}", "--disable-openapi-validation")
        assert "registry.example.com/kept/bapo/service" in run(
            version, *upgrade, "--reset-then-reuse-values"
        )
        with pytest.raises(HelmError, match="rootPath"):
            run(version, *upgrade, "--reuse-values")


def notes(version: str, release: str, case: Case, directory: Path) -> str:
    with cluster(directory, {}) as kubeconfig:
        return install(version, release, case, kubeconfig).partition("NOTES:")[2]


def install(
    version: str, release: str, case: Case, kubeconfig: Path, dry_run: str = "client"
) -> str:
    """Returns what Helm says when it would install the chart."""
    return run(
        version,
        "install",
        release,
        str(CHART),
        "--namespace=ml",
        f"--kubeconfig={kubeconfig}",
        f"--dry-run={dry_run}",
        "--disable-openapi-validation",
        *case.arguments(),
    )
