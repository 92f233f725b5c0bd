"""Tests that secrets are generated once, kept, and contained in Secrets only."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
import yaml

from tests.charts.cases import CASES, DATABASE_URL, DEV, OWN_KEYS
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
    workloads,
)
from tests.charts.test_values import install

PROCESS_TOKENS = (
    "BAPO_REPLICA_TOKEN",
    "BAPO_COLLECTOR_TOKEN",
    "BAPO_TRAINER_TOKEN",
    "BAPO_PIPELINE_TOKEN",
)
KEEP = {"helm.sh/resource-policy": "keep"}
EXISTING = {
    "bapo-token": {"BAPO_TOKEN": "kept-token", "BAPO_VERIFIER_TOKEN": "kept-verifier-token"},
    "bapo-database": {"POSTGRES_PASSWORD": "kept-password", "BAPO_DATABASE_URL": "old"},
    "bapo-s3": {"BAPO_S3_ACCESS_KEY": "kept-access", "BAPO_S3_SECRET_KEY": "kept-secret"},
}

DATABASE, S3 = "bapo-external-database", "bapo-external-s3"
NAMED = {
    DATABASE: {"BAPO_DATABASE_URL": DATABASE_URL},
    S3: {"BAPO_S3_ACCESS_KEY": "a", "BAPO_S3_SECRET_KEY": "s"},
    "ours": {"BAPO_TOKEN": "t", "BAPO_VERIFIER_TOKEN": "v"},
}
"""Secrets of the user's, which values-production.yaml and `token.existingSecret` name."""


def decoded(secret: Object) -> dict[str, str]:
    return {key: base64.b64decode(value).decode() for key, value in secret["data"].items()}


def test_generated_secrets_agree(dev: list[Object]) -> None:
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
    """Renders as an installation does, which looks up objects in the cluster."""
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


def objects_on(kubeconfig: Path, version: str, case: Case) -> list[Object]:
    """Returns the objects that an installation renders."""
    return list(filter(None, yaml.safe_load_all(render_on(kubeconfig, version, case))))


def test_named_secrets_must_exist_with_their_keys(tmp_path: Path, version: str) -> None:
    case = Case(("production",), {"image.pullSecrets": ["pull"], "token.existingSecret": "ours"})
    with cluster(tmp_path, NAMED | {"pull": {".dockerconfigjson": "{}"}}) as kubeconfig:
        assert "kind: StatefulSet" in render_on(kubeconfig, version, case)
    incomplete = {"bapo-external-s3": {"BAPO_S3_ACCESS_KEY": "a"}, "ours": {"token": "t"}}
    with cluster(tmp_path, incomplete) as kubeconfig, pytest.raises(HelmError) as caught:
        render_on(kubeconfig, version, case)
    message = " ".join(str(caught.value).split())
    for problem in (
        "database.existingSecret: the namespace ml has no Secret bapo-external-database; "
        "create it with BAPO_DATABASE_URL",
        "s3.existingSecret: the Secret bapo-external-s3 has no key BAPO_S3_SECRET_KEY",
        "token.existingSecret: the Secret ours has no key BAPO_TOKEN",
        "token.existingSecret: the Secret ours has no key BAPO_VERIFIER_TOKEN",
        "image.pullSecrets: the namespace ml has no Secret pull",
    ):
        assert problem in message


@pytest.mark.parametrize("end", ["\n", "\r\n", " \n"])
def test_white_space_around_the_values_of_secrets_is_no_obstacle(
    end: str, tmp_path: Path, version: str
) -> None:
    """The services remove it (`tests/outside/test_secrets.py`), and the chart from values."""
    secrets = {
        name: {key: value + end for key, value in data.items()} for name, data in NAMED.items()
    }
    case = Case(("production",), {"token.existingSecret": "ours"})
    with cluster(tmp_path, secrets) as kubeconfig:
        assert "kind: StatefulSet" in render_on(kubeconfig, version, case)
    given = {name: str(value) + end for name, value in OWN_KEYS.items() if value}
    objects = render(Case(("production",), OWN_KEYS | given), version)
    assert decoded(one(objects, "Secret", "bapo-database"))["BAPO_DATABASE_URL"] == DATABASE_URL
    keys = {"BAPO_S3_ACCESS_KEY": "access-key-1", "BAPO_S3_SECRET_KEY": "secret-key-1"}
    assert decoded(one(objects, "Secret", "bapo-s3")) == keys


@pytest.mark.parametrize(
    ("secret", "key", "text", "problem"),
    [
        ("ours", "BAPO_TOKEN", "one\ntwo-hidden", "holds a line break or another character"),
        ("ours", "BAPO_TRAINER_TOKEN", "tök-hidden", "holds a line break or another character"),
        ("ours", "BAPO_VERIFIER_TOKEN", "\n", "is empty"),
        (S3, "BAPO_S3_SECRET_KEY", "a\x1bhidden", "holds a line break or another character"),
        (
            DATABASE,
            "BAPO_DATABASE_URL",
            "postgresql://a:p@hidden@db/bapo",
            "has more than one @; in",
        ),
    ],
)
def test_a_value_that_no_service_takes_is_refused_by_its_name(
    secret: str, key: str, text: str, problem: str, tmp_path: Path, version: str
) -> None:
    case = Case(("production",), {"token.existingSecret": "ours"})
    secrets = NAMED | {secret: NAMED[secret] | {key: text}}
    with cluster(tmp_path, secrets) as kubeconfig, pytest.raises(HelmError) as caught:
        render_on(kubeconfig, version, case)
    message = " ".join(str(caught.value).split())
    assert f".existingSecret: {key} of the Secret {secret} {problem}" in message
    assert "hidden" not in message


def test_an_upgrade_keeps_generated_secrets(tmp_path: Path, version: str) -> None:
    with cluster(tmp_path, EXISTING) as kubeconfig:
        objects = objects_on(kubeconfig, version, DEV)
    tokens = decoded(one(objects, "Secret", "bapo-token"))
    # The Secret of an earlier version had no tokens of processes.
    added = {key: tokens.pop(key) for key in PROCESS_TOKENS}
    assert tokens == EXISTING["bapo-token"]
    assert {len(token) for token in added.values()} == {40}
    assert len(set(added.values())) == len(PROCESS_TOKENS)
    assert decoded(one(objects, "Secret", "bapo-s3")) == EXISTING["bapo-s3"]
    database = decoded(one(objects, "Secret", "bapo-database"))
    assert database["POSTGRES_PASSWORD"] == "kept-password"
    # The URL is derived from the password that is kept.
    assert ":kept-password@bapo-postgres.ml.svc" in database["BAPO_DATABASE_URL"]
    assert "kept-secret" in decoded(one(objects, "Secret", "bapo-s3-identities"))["identities.json"]


def test_an_upgrade_restarts_the_pods_that_read_a_secret_of_yours_that_changed(
    tmp_path: Path, version: str
) -> None:
    case = Case(("production",), {"token.existingSecret": "ours"})

    def annotations(secrets: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
        with cluster(tmp_path, secrets) as kubeconfig:
            objects = objects_on(kubeconfig, version, case)
        return {
            workload["metadata"]["name"]: pod_of(workload)["metadata"]["annotations"]
            for workload in workloads(objects, "Deployment", "StatefulSet")
        }

    before = annotations(NAMED)
    assert set(before) == {"bapo-buffer", "bapo-verifier", "bapo-collector", "bapo-rollout"}
    assert annotations(NAMED) == before
    for secret, key in (
        ("bapo-external-database", "BAPO_DATABASE_URL"),
        ("bapo-external-s3", "BAPO_S3_SECRET_KEY"),
        ("ours", "BAPO_VERIFIER_TOKEN"),
    ):
        after = annotations(NAMED | {secret: NAMED[secret] | {key: DATABASE_URL + "/new"}})
        assert all(after[name] != before[name] for name in before), secret


def test_an_upgrade_restarts_no_pod_because_secrets_were_generated(
    tmp_path: Path, version: str
) -> None:
    with cluster(tmp_path, {}) as kubeconfig:
        installed = objects_on(kubeconfig, version, DEV)
    with cluster(tmp_path, EXISTING) as kubeconfig:
        upgraded = objects_on(kubeconfig, version, DEV)
    assert list(map(pod_of, workloads(installed))) == list(map(pod_of, workloads(upgraded)))


def test_generated_secrets_and_volumes_outlive_the_release(dev: list[Object]) -> None:
    for name in ("bapo-token", "bapo-database", "bapo-s3"):
        assert one(dev, "Secret", name)["metadata"]["annotations"] == KEEP
    for name in ("bapo-postgres", "bapo-s3"):
        policy = one(dev, "StatefulSet", name)["spec"]["persistentVolumeClaimRetentionPolicy"]
        assert policy == {"whenDeleted": "Retain", "whenScaled": "Retain"}


def test_secrets_and_volumes_can_be_deleted_with_the_release() -> None:
    objects = render(CASES["least"])
    assert not any("annotations" in manifest["metadata"] for manifest in of_kind(objects, "Secret"))
    for name in ("bapo-postgres", "bapo-s3", "bapo-rollout"):
        policy = one(objects, "StatefulSet", name)["spec"]["persistentVolumeClaimRetentionPolicy"]
        assert policy["whenDeleted"] == "Delete"


def test_secret_values_are_in_secrets_only() -> None:
    for case in ("own keys", "dev"):
        objects = render(CASES[case])
        values = {
            value
            for secret in of_kind(objects, "Secret")
            for value in decoded(secret).values()
            if value != DATABASE_URL.partition("@")[0]
        }
        assert values
        elsewhere = json.dumps([manifest for manifest in objects if manifest["kind"] != "Secret"])
        assert not [value for value in values if value in elsewhere]


def test_nothing_is_generated_for_secrets_that_exist(everything: list[Object]) -> None:
    assert not of_kind(everything, "Secret")
    buffer = container_of(everything, "Deployment", "bapo-buffer")
    assert [
        source["secretRef"]["name"] for source in buffer["envFrom"] if "secretRef" in source
    ] == ["bapo-external-s3"]
    assert token_keys(buffer) == {key: key for key in ("BAPO_TOKEN", *PROCESS_TOKENS)}


def test_every_reference_is_to_an_object_of_the_release(dev: list[Object]) -> None:
    """With everything bundled, no object has to exist before."""
    release = {(manifest["kind"], manifest["metadata"]["name"]): manifest for manifest in dev}
    for name, container in containers(dev):
        for source in container.get("envFrom", []):
            ((field, reference),) = source.items()
            kind = "ConfigMap" if field == "configMapRef" else "Secret"
            assert (kind, reference["name"]) in release, name
        for variable in container.get("env", []):
            reference = variable.get("valueFrom", {}).get("secretKeyRef")
            if reference is not None:
                assert reference["key"] in release["Secret", reference["name"]]["data"], name


def test_the_verifier_gets_a_token_that_no_other_service_accepts(dev: list[Object]) -> None:
    """It runs hostile input."""
    verifier = container_of(dev, "Deployment", "bapo-verifier")
    assert "envFrom" not in verifier
    references = [variable for variable in verifier["env"] if "valueFrom" in variable]
    assert [variable["name"] for variable in references] == ["BAPO_TOKEN"]
    assert references[0]["valueFrom"]["secretKeyRef"]["key"] == "BAPO_VERIFIER_TOKEN"
    tokens = decoded(one(dev, "Secret", "bapo-token"))
    assert tokens["BAPO_VERIFIER_TOKEN"] != tokens["BAPO_TOKEN"]
    collector = container_of(dev, "Deployment", "bapo-collector")
    assert token_keys(collector)["BAPO_VERIFIER_TOKEN"] == "BAPO_VERIFIER_TOKEN"


def token_keys(container: Object) -> dict[str, str]:
    """Returns the variables of a container that hold tokens, and their keys in the Secret."""
    return {
        variable["name"]: variable["valueFrom"]["secretKeyRef"]["key"]
        for variable in container.get("env", [])
        if variable["name"].endswith("TOKEN")
    }


@pytest.mark.parametrize("case", ["dev", "several nodes", "scaled to zero", "everything"])
def test_each_process_gets_a_token_of_its_own_and_none_but_the_buffer_service_the_administrators(
    case: str,
) -> None:
    objects = render(CASES[case])
    keys = {
        "bapo-buffer": {"BAPO_TOKEN": "BAPO_TOKEN", **{key: key for key in PROCESS_TOKENS}},
        "bapo-verifier": {"BAPO_TOKEN": "BAPO_VERIFIER_TOKEN"},
        "bapo-rollout": {"BAPO_TOKEN": "BAPO_REPLICA_TOKEN"},
        "bapo-nodes": {"BAPO_TOKEN": "BAPO_REPLICA_TOKEN"},
        "bapo-nodes-workers": {"BAPO_TOKEN": "BAPO_REPLICA_TOKEN"},
        "bapo-collector": {
            "BAPO_TOKEN": "BAPO_COLLECTOR_TOKEN",
            "BAPO_VERIFIER_TOKEN": "BAPO_VERIFIER_TOKEN",
        },
        "bapo-reaper": {"BAPO_TOKEN": "BAPO_PIPELINE_TOKEN"},
        "bapo-scaler": {"BAPO_TOKEN": "BAPO_REPLICA_TOKEN"},
        "bapo-test": {
            "BAPO_TOKEN": "BAPO_PIPELINE_TOKEN",
            "BAPO_VERIFIER_TOKEN": "BAPO_VERIFIER_TOKEN",
        },
    }
    found = set()
    for path, container in containers(objects):
        name = path.partition("/")[2]
        assert token_keys(container) == keys.get(name, {}), name
        # All keys of the Secret of tokens would be variables.
        sources = [
            source.get("secretRef", {}).get("name", "") for source in container.get("envFrom", [])
        ]
        assert not [source for source in sources if source.endswith("-token")], name
        found.add(name)
    assert {"bapo-buffer", "bapo-verifier", "bapo-collector", "bapo-test"} <= found


def test_a_secret_of_yours_without_tokens_of_processes_still_works_with_a_warning(
    tmp_path: Path, version: str
) -> None:
    """It was made for an earlier version of the chart."""
    case = Case(("production",), {"token.existingSecret": "ours"})
    with cluster(tmp_path, NAMED) as kubeconfig:
        objects = objects_on(kubeconfig, version, case)
        notes = " ".join(install(version, "bapo", case, kubeconfig, dry_run="server").split())
    assert "WARNING: the Secret ours has no BAPO_REPLICA_TOKEN, BAPO_COLLECTOR_TOKEN" in notes
    for kind, name in (("Deployment", "bapo-collector"), ("StatefulSet", "bapo-rollout")):
        assert token_keys(container_of(objects, kind, name))["BAPO_TOKEN"] == "BAPO_TOKEN"
    buffer = container_of(objects, "Deployment", "bapo-buffer")
    assert token_keys(buffer) == {"BAPO_TOKEN": "BAPO_TOKEN"}
    connection = one(objects, "ConfigMap", "bapo-connection")["data"]
    assert connection["BAPO_TRAINER_TOKEN_KEY"] == "BAPO_TOKEN"
    complete = NAMED["ours"] | {key: key * 2 for key in PROCESS_TOKENS}
    with cluster(tmp_path, NAMED | {"ours": complete}) as kubeconfig:
        objects = objects_on(kubeconfig, version, case)
    collector = container_of(objects, "Deployment", "bapo-collector")
    assert token_keys(collector)["BAPO_TOKEN"] == "BAPO_COLLECTOR_TOKEN"


def test_only_the_database_and_its_clients_get_its_password(dev: list[Object]) -> None:
    knowing = {
        workload["metadata"]["name"]
        for workload in workloads(dev)
        if "bapo-database" in json.dumps(pod_of(workload)["spec"])
    }
    assert knowing == {"bapo-buffer", "bapo-migrate", "bapo-postgres"}


def test_the_object_store_requires_keys(dev: list[Object]) -> None:
    command = container_of(dev, "StatefulSet", "bapo-s3")["command"]
    assert "-s3.config=/identities/identities.json" in command
    # Its other processes require no password.
    assert "-ip.bind=127.0.0.1" in command
