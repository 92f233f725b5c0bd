"""Tests the chart's custom resources against the official definitions of their kinds.

`make test-crds` installs these as npm packages that are generated from them, and runs the tests.
"""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.charts.helm import Object
from tests.charts.test_render import CUSTOM, distinct_objects

pytestmark = pytest.mark.crds

INSTALLED = Path(sys.prefix) / "crds"


def errors(objects: list[Object], directory: Path) -> str:
    """Returns the validation errors of objects; empty if there are none."""
    if not (INSTALLED / "node_modules").exists():
        raise FileNotFoundError(f"{INSTALLED} is missing: run `make test-crds`")
    (directory / "objects.json").write_text(json.dumps(objects))
    shutil.copy(Path(__file__).parent / "crds" / "check.mjs", INSTALLED)
    command = ["node", "check.mjs", str(directory / "objects.json")]
    done = subprocess.run(command, cwd=INSTALLED, capture_output=True, text=True, check=False)
    assert done.returncode == (1 if done.stdout else 0), done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def custom() -> list[Object]:
    manifests = [json.loads(text) for text in distinct_objects()]
    return [manifest for manifest in manifests if manifest["kind"] in CUSTOM]


def test_custom_resources_match_their_definitions(custom: list[Object], tmp_path: Path) -> None:
    assert {manifest["kind"] for manifest in custom} == CUSTOM
    assert errors(custom, tmp_path) == ""


@pytest.mark.parametrize(
    ("kind", "path", "value", "message"),
    [
        ("ServiceMonitor", ["spec", "endpoints", 0, "interval"], "15x", "must match pattern"),
        ("ServiceMonitor", ["spec", "endpoints", 0, "portt"], "http", "'\"portt\"' does not exist"),
        ("ServiceMonitor", ["spec", "selector"], "app", "must be object"),
        (
            "HTTPRoute",
            ["spec", "rules", 0, "matches", 0, "path", "type"],
            "Prefix",
            "must be equal",
        ),
        ("HTTPRoute", ["spec", "hostnames", 0], "a b", "must match pattern"),
        ("HTTPRoute", ["spec", "backends"], [], "'\"backends\"' does not exist"),
    ],
)
def test_a_deviation_from_the_definitions_is_found(
    custom: list[Object], kind: str, path: list[str | int], value: Any, message: str, tmp_path: Path
) -> None:
    broken = copy.deepcopy(next(manifest for manifest in custom if manifest["kind"] == kind))
    *parents, last = path
    node = broken
    for key in parents:
        node = node[key]
    node[last] = value
    assert message in errors([broken], tmp_path)
