"""Secrets: generated once, kept, and nowhere else."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
import yaml

from tests.charts.cases import CASES, DATABASE_URL, DEV
from tests.charts.cluster import cluster
from tests.charts.helm import (
    CHART,
    NAMESPACE,
    Case,
    HelmError,
    Object,
    container_of,
    containers,
    of_kind,
    one,
    pod_of,
    render,
    run,
)

KEEP = {"helm.sh/resource-policy": "keep"}
EXISTING = {
    "bapo-token": {"BAPO_TOKEN": "kept-token"},
    "bapo-database": {"POSTGRES_PASSWORD": "kept-password", "BAPO_DATABASE_URL": "old"},
    "bapo-s3": {"BAPO_S3_ACCESS_KEY": "kept-access", "BAPO_S3_SECRET_KEY": "kept-secret"},
}


def decoded(secret: Object) -> dict[str, str]:
    return {key: base64.b64decode(value).decode() for key, value in secret["data"].items()}


def test_generated_secrets_fit_together(dev: list[Object]) -> None:
    token = decoded(one(dev, "Secret", "bapo-token"))["BAPO_TOKEN"]
    database = decoded(one(dev, "Secret", "bapo-database"))
    keys = decoded(one(dev, "Secret", "bapo-s3"))
    password = database["POSTGRES_PASSWORD"]
    assert len(token) == 40
    assert password.isalnum()
    assert (
        database["BAPO_DATABASE_URL"]
        == f"postgresql+psycopg://bapo:{password}@bapo-postgres.ml.svc:5432/bapo"
    )
    (identity,) = json.loads(decoded(one(dev, "Secret", "bapo-s3-identities"))["identities.json"])[
        "identities"
    ]
    assert identity["credentials"] == [
        {"accessKey": keys["BAPO_S3_ACCESS_KEY"], "secretKey": keys["BAPO_S3_SECRET_KEY"]}
    ]


def render_on(kubeconfig: Path, version: str, case: Case) -> str:
    """As an installation would, looking at what is there."""
    return run(
        version,
        "template",
        "bapo",
        str(CHART),
        f"--namespace={NAMESPACE}",
        f"--kubeconfig={kubeconfig}",
        "--dry-run=server",
        "--disable-openapi-validation",
        *case.arguments(),
    )


def test_secrets_that_are_said_to_exist_must(tmp_path: Path, version: str) -> None:
    case = Case(("production",), {"image.pullSecrets": ["pull"], "token.existingSecret": "ours"})
    there = {
        "bapo-external-database": {"BAPO_DATABASE_URL": DATABASE_URL},
        "bapo-external-s3": {"BAPO_S3_ACCESS_KEY": "a", "BAPO_S3_SECRET_KEY": "s"},
        "pull": {".dockerconfigjson": "{}"},
        "ours": {"BAPO_TOKEN": "t"},
    }
    with cluster(tmp_path, there) as kubeconfig:
        assert "kind: StatefulSet" in render_on(kubeconfig, version, case)
    torn = {"bapo-external-s3": {"BAPO_S3_ACCESS_KEY": "a"}, "ours": {"token": "t"}}
    with cluster(tmp_path, torn) as kubeconfig, pytest.raises(HelmError) as caught:
        render_on(kubeconfig, version, case)
    said = " ".join(str(caught.value).split())
    for words in (
        "database.existingSecret: the namespace ml has no Secret bapo-external-database; "
        "create it with BAPO_DATABASE_URL",
        "s3.existingSecret: the Secret bapo-external-s3 has no key BAPO_S3_SECRET_KEY",
        "token.existingSecret: the Secret ours has no key BAPO_TOKEN",
        "image.pullSecrets: the namespace ml has no Secret pull",
    ):
        assert words in said


def test_an_upgrade_keeps_what_was_generated(tmp_path: Path, version: str) -> None:
    with cluster(tmp_path, EXISTING) as kubeconfig:
        text = render_on(kubeconfig, version, DEV)
    objects = [each for each in yaml.safe_load_all(text) if each]
    assert decoded(one(objects, "Secret", "bapo-token")) == EXISTING["bapo-token"]
    assert decoded(one(objects, "Secret", "bapo-s3")) == EXISTING["bapo-s3"]
    database = decoded(one(objects, "Secret", "bapo-database"))
    assert database["POSTGRES_PASSWORD"] == "kept-password"
    # Made anew from the password that is kept.
    assert ":kept-password@bapo-postgres.ml.svc" in database["BAPO_DATABASE_URL"]
    assert "kept-secret" in decoded(one(objects, "Secret", "bapo-s3-identities"))["identities.json"]


def test_generated_secrets_and_volumes_outlive_the_release(dev: list[Object]) -> None:
    for name in ("bapo-token", "bapo-database", "bapo-s3"):
        assert one(dev, "Secret", name)["metadata"]["annotations"] == KEEP
    for name in ("bapo-postgres", "bapo-s3"):
        policy = one(dev, "StatefulSet", name)["spec"]["persistentVolumeClaimRetentionPolicy"]
        assert policy == {"whenDeleted": "Retain", "whenScaled": "Retain"}


def test_unless_they_are_not_to() -> None:
    objects = render(CASES["least"])
    assert not any("annotations" in each["metadata"] for each in of_kind(objects, "Secret"))
    for name in ("bapo-postgres", "bapo-s3", "bapo-rollout"):
        policy = one(objects, "StatefulSet", name)["spec"]["persistentVolumeClaimRetentionPolicy"]
        assert policy["whenDeleted"] == "Delete"


def test_secrets_are_in_secrets_alone() -> None:
    for case in ("own keys", "dev"):
        objects = render(CASES[case])
        values = {
            value
            for secret in of_kind(objects, "Secret")
            for value in decoded(secret).values()
            if value != DATABASE_URL.partition("@")[0]
        }
        assert values
        elsewhere = json.dumps([each for each in objects if each["kind"] != "Secret"])
        assert not [value for value in values if value in elsewhere]


def test_nothing_is_generated_beside_secrets_of_yours(everything: list[Object]) -> None:
    assert not of_kind(everything, "Secret")
    buffer = container_of(everything, "Deployment", "bapo-buffer")
    assert [each["secretRef"]["name"] for each in buffer["envFrom"] if "secretRef" in each] == [
        "our-token",
        "bapo-external-s3",
    ]


def test_every_reference_leads_somewhere(dev: list[Object]) -> None:
    """With everything bundled there is nothing to bring along."""
    there = {(each["kind"], each["metadata"]["name"]): each for each in dev}
    for name, container in containers(dev):
        for each in container.get("envFrom", []):
            ((kind, reference),) = each.items()
            found = ("ConfigMap" if kind == "configMapRef" else "Secret", reference["name"])
            assert found in there, name
        for each in container.get("env", []):
            reference = each.get("valueFrom", {}).get("secretKeyRef")
            assert (
                reference is None
                or reference["key"] in (there["Secret", reference["name"]]["data"])
            ), name


def test_the_verifier_knows_the_token_and_nothing_else(dev: list[Object]) -> None:
    verifier = container_of(dev, "Deployment", "bapo-verifier")
    assert "envFrom" not in verifier
    references = [each for each in verifier["env"] if "valueFrom" in each]
    assert [each["name"] for each in references] == ["BAPO_TOKEN"]


def test_only_the_database_and_its_clients_know_its_password(dev: list[Object]) -> None:
    knowing = {
        workload["metadata"]["name"]
        for workload in of_kind(dev, "Deployment", "StatefulSet", "Job", "Pod")
        if "bapo-database" in json.dumps(pod_of(workload)["spec"])
    }
    assert knowing == {"bapo-buffer", "bapo-migrate", "bapo-postgres"}


def test_the_object_store_lets_nobody_in_without_keys(dev: list[Object]) -> None:
    command = container_of(dev, "StatefulSet", "bapo-s3")["command"]
    assert "-s3.config=/identities/identities.json" in command
    # Its other parts ask for no password.
    assert "-ip.bind=127.0.0.1" in command
