"""The chart renders, the same under each version of Helm, into objects that Kubernetes accepts."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubernetes_validate import utils

from tests.charts.cases import CASES, FILES
from tests.charts.helm import CHART, Object, render, run

GOLDEN = Path(__file__).parent / "golden"
CUSTOM = {"ServiceMonitor", "HTTPRoute"}
"""Kinds that are not Kubernetes' own: test_crds.py has the definitions."""
KUBERNETES = ("1.31", "1.32", "1.33", "1.34", "1.35", "1.36")


@pytest.fixture(scope="module", autouse=True)
def _schemas_are_read_once() -> Any:
    """They are large, and would be read for every object."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "schema_contents", cache(utils.schema_contents))
        yield


@pytest.mark.parametrize("name", FILES)
def test_lints(name: str, version: str) -> None:
    assert "0 chart(s) failed" in run(
        version, "lint", "--strict", str(CHART), *FILES[name].arguments()
    )


@pytest.mark.parametrize("name", CASES)
def test_versions_of_helm_render_the_same(name: str) -> None:
    first, second = (masked(render(CASES[name], each)) for each in ("3.18", "4.1"))
    assert first == second


@pytest.mark.parametrize("kubernetes", KUBERNETES)
def test_kubernetes_accepts_every_object(kubernetes: str) -> None:
    for text in distinct_objects():
        found = json.loads(text)
        if found["kind"] not in CUSTOM:
            kubernetes_validate.validate(found, kubernetes, strict=True)


def test_an_unknown_field_would_be_found() -> None:
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "a"}, "spek": {}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(service, KUBERNETES[0], strict=True)


@pytest.mark.parametrize("name", FILES)
def test_looks_as_it_did(name: str, update_golden: bool) -> None:
    """`pytest tests/charts --update-golden` writes it anew; read the difference then."""
    now = yaml.safe_dump_all(masked(render(FILES[name])), sort_keys=False, width=100)
    path = GOLDEN / f"{name}.yaml"
    if update_golden:
        path.write_text(now)
    assert path.read_text() == now


def masked(objects: list[Object]) -> list[Object]:
    """In a fixed order, without what is generated."""
    copies: list[Object] = json.loads(json.dumps(objects))
    for each in copies:
        if each["kind"] == "Secret":
            each["data"] = dict.fromkeys(each["data"], "<masked>")
    return sorted(copies, key=lambda each: (each["kind"], each["metadata"]["name"]))


def distinct_objects() -> set[str]:
    """Of all cases, as JSON."""
    return {json.dumps(each, sort_keys=True) for case in CASES.values() for each in render(case)}
