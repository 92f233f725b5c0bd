"""Tests that both versions of Helm render the same objects, and that Kubernetes accepts them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from kubernetes_validate import utils

from tests.charts.cases import CASES, FILES
from tests.charts.helm import CHART, Object, of_kind, pod_of, render, run, workloads

GOLDEN = Path(__file__).parent / "golden"
CUSTOM = {"ServiceMonitor", "PrometheusRule", "HTTPRoute"}
"""Kinds that are custom resources, which test_crds.py validates."""
LEADER_WORKER_SET = Path(__file__).parent / "crds" / "leaderworkerset.json"
"""Schema of the spec of a LeaderWorkerSet, whose definition is no npm package."""
KUBERNETES = ("1.31", "1.32", "1.33", "1.34", "1.35", "1.36")


@pytest.fixture(scope="module", autouse=True)
def _cached_schemas() -> Any:
    """Reads each schema once, because they are large."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "schema_contents", cache(utils.schema_contents))
        yield


def test_the_package_renders_as_the_chart_does(tmp_path: Path) -> None:
    """A file that `.helmignore` leaves out would be missing."""
    run("4.1", "package", str(CHART), "--destination", str(tmp_path))
    (package,) = tmp_path.glob("bapo-*.tgz")
    arguments = ["--namespace=ml", *FILES["production"].arguments()]
    from_package, from_folder = (
        run("4.1", "template", "bapo", str(chart), *arguments).splitlines()
        for chart in (package, CHART)
    )
    different = {a for a, b in zip(from_package, from_folder, strict=True) if a != b}
    assert {line.split(":")[0].strip() for line in different} == {
        "BAPO_TOKEN",
        "BAPO_VERIFIER_TOKEN",
        "BAPO_REPLICA_TOKEN",
        "BAPO_COLLECTOR_TOKEN",
        "BAPO_TRAINER_TOKEN",
        "BAPO_PIPELINE_TOKEN",
    }


def test_the_package_lists_its_images() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    images = yaml.safe_load(chart["annotations"]["artifacthub.io/images"])
    listed = {image["image"] for image in images}
    names = [values["image"][name] for name in ("service", "trainer", "rollout")]
    own = {f"{name}:{chart['appVersion']}" for name in names}
    bundled = {values[name]["bundled"]["image"] for name in ("database", "s3")}
    assert listed == own | bundled


@pytest.mark.parametrize("name", FILES)
def test_the_chart_passes_lint(name: str, version: str) -> None:
    assert "0 chart(s) failed" in run(
        version, "lint", "--strict", str(CHART), *FILES[name].arguments()
    )


@pytest.mark.parametrize("name", CASES)
def test_versions_of_helm_render_the_same(name: str) -> None:
    first, second = (masked(render(CASES[name], version)) for version in ("3.18", "4.1"))
    assert first == second


@pytest.mark.parametrize("kubernetes", KUBERNETES)
def test_kubernetes_accepts_every_object(kubernetes: str) -> None:
    for text in distinct_objects():
        manifest = json.loads(text)
        if manifest["kind"] == "LeaderWorkerSet":
            for workload in workloads([manifest]):
                names = {key: workload["metadata"][key] for key in ("name", "namespace", "labels")}
                pods = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": names}
                pods["template"] = pod_of(workload)
                kubernetes_validate.validate(pods, kubernetes, strict=True)
        elif manifest["kind"] not in CUSTOM:
            kubernetes_validate.validate(manifest, kubernetes, strict=True)


def test_leaderworkersets_match_their_definition() -> None:
    validator = jsonschema.Draft7Validator(json.loads(LEADER_WORKER_SET.read_text()))
    manifests = [json.loads(text) for text in distinct_objects()]
    sets = of_kind(manifests, "LeaderWorkerSet")
    assert len(sets) == 3
    for manifest in sets:
        assert manifest["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
        validator.validate(manifest["spec"])
    broken = {**sets[0]["spec"], "startupPolicy": "Whenever", "size": 2}
    assert len(list(validator.iter_errors(broken))) == 2


def test_validation_finds_an_unknown_field() -> None:
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "a"}, "spek": {}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(service, KUBERNETES[0], strict=True)


@pytest.mark.parametrize("name", FILES)
def test_the_rendered_objects_are_the_golden_ones(name: str, update_golden: bool) -> None:
    """`pytest tests/charts --update-golden` overwrites the file; review its diff."""
    rendered = yaml.safe_dump_all(masked(render(FILES[name])), sort_keys=False, width=100)
    path = GOLDEN / f"{name}.yaml"
    if update_golden:
        path.write_text(rendered)
    assert path.read_text() == rendered


def masked(objects: list[Object]) -> list[Object]:
    """Returns copies in a fixed order, with the generated data of Secrets masked."""
    copies: list[Object] = json.loads(json.dumps(objects))
    for manifest in copies:
        if manifest["kind"] == "Secret":
            manifest["data"] = dict.fromkeys(manifest["data"], "<masked>")
    return sorted(copies, key=lambda manifest: (manifest["kind"], manifest["metadata"]["name"]))


def distinct_objects() -> set[str]:
    """Returns the distinct objects of all cases as JSON."""
    return {
        json.dumps(manifest, sort_keys=True) for case in CASES.values() for manifest in render(case)
    }
