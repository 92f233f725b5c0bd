"""Objects of kinds that are not Kubernetes' own, against the official definitions of their kinds.

`make test-crds` installs those, as npm packages that are made from them, and runs this.
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
    """What is wrong with them; empty if nothing is."""
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
    found = [json.loads(each) for each in distinct_objects()]
    return [each for each in found if each["kind"] in CUSTOM]


def test_they_are_as_their_definitions_say(custom: list[Object], tmp_path: Path) -> None:
    assert {each["kind"] for each in custom} == CUSTOM
    assert errors(custom, tmp_path) == ""


@pytest.mark.parametrize(
    ("kind", "path", "value", "words"),
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
def test_what_they_do_not_say_is_found(
    custom: list[Object], kind: str, path: list[str | int], value: Any, words: str, tmp_path: Path
) -> None:
    broken = copy.deepcopy(next(each for each in custom if each["kind"] == kind))
    *way, last = path
    place = broken
    for each in way:
        place = place[each]
    place[last] = value
    assert words in errors([broken], tmp_path)
