"""Helm, as tests use it: a render is made once."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parents[2] / "charts" / "bapo"
VERSIONS = ("3.18", "4.1")
NAMESPACE = "ml"
WORKLOADS = ("Deployment", "StatefulSet", "Job", "Pod")

Object = dict[str, Any]


class HelmError(Exception):
    """What Helm said."""


def run(version: str, *arguments: str) -> str:
    binary = Path(sys.prefix) / "helm" / version / "helm"
    if not binary.exists():
        raise FileNotFoundError(f"{binary} is missing: run `make install`")
    done = subprocess.run([binary, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise HelmError(done.stdout + done.stderr)
    return done.stdout


@dataclass(frozen=True)
class Case:
    """What a chart is rendered from: `values-<each file>.yaml`, and values set on top."""

    files: tuple[str, ...] = ()
    sets: dict[str, Any] = field(default_factory=dict)
    release: str = "bapo"

    def arguments(self) -> list[str]:
        files = [f"--values={CHART}/values-{each}.yaml" for each in self.files]
        sets = [f"--set-json={path}={json.dumps(value)}" for path, value in self.sets.items()]
        return [*files, *sets]


def render(case: Case, version: str = VERSIONS[-1]) -> list[Object]:
    """All objects, those of hooks included. Callers share them: do not change them."""
    return _render(tuple(case.arguments()), case.release, version)


@cache
def _render(arguments: tuple[str, ...], release: str, version: str) -> list[Object]:
    text = run(version, "template", release, str(CHART), f"--namespace={NAMESPACE}", *arguments)
    return [each for each in yaml.load_all(text, Loader=_Loader) if each]


_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


# ---- looking at objects --------------------------------------------------------------------------


def of_kind(objects: list[Object], *kinds: str) -> list[Object]:
    return [each for each in objects if each["kind"] in kinds]


def one(objects: list[Object], kind: str, name: str) -> Object:
    (found,) = (each for each in of_kind(objects, kind) if each["metadata"]["name"] == name)
    return found


def pod_of(workload: Object) -> Object:
    """Metadata and spec of its pods."""
    return workload if workload["kind"] == "Pod" else workload["spec"]["template"]


def containers(objects: list[Object]) -> Iterator[tuple[str, Object]]:
    """Every container with `kind/name` of its workload."""
    for workload in of_kind(objects, *WORKLOADS):
        spec = pod_of(workload)["spec"]
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            yield f"{workload['kind']}/{workload['metadata']['name']}", container


def container_of(objects: list[Object], kind: str, name: str) -> Object:
    (container,) = pod_of(one(objects, kind, name))["spec"]["containers"]
    return container


def env(container: Object) -> dict[str, str | None]:
    """Its variables; None for those from elsewhere."""
    return {each["name"]: each.get("value") for each in container.get("env", [])}
