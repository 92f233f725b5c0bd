"""Renders the chart with Helm, once for each combination of values."""

from __future__ import annotations

import copy
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
WORKLOADS = ("Deployment", "StatefulSet", "LeaderWorkerSet", "Job", "CronJob", "Pod")

Object = dict[str, Any]


REGISTRY = "registry.example.com"


class HelmError(Exception):
    """Helm failed; the message is its output."""


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
    """Values that the chart is rendered with: `values-<name>.yaml` for each file, then `sets`."""

    files: tuple[str, ...] = ()
    sets: dict[str, Any] = field(default_factory=dict)
    release: str = "bapo"

    def arguments(self) -> list[str]:
        files = [f"--values={CHART}/values-{name}.yaml" for name in self.files]
        values = dict(self.sets)
        if not {"production", "air-gapped"} & set(self.files):
            values.setdefault("image.registry", REGISTRY)  # the other files leave it to the user
        sets = [f"--set-json={path}={json.dumps(value)}" for path, value in values.items()]
        return [*files, *sets]


def render(case: Case, version: str = VERSIONS[-1]) -> list[Object]:
    """Returns all objects, including hooks. Callers share them and must not change them."""
    return _render(tuple(case.arguments()), case.release, version)


@cache
def _render(arguments: tuple[str, ...], release: str, version: str) -> list[Object]:
    text = run(version, "template", release, str(CHART), f"--namespace={NAMESPACE}", *arguments)
    return [manifest for manifest in yaml.load_all(text, Loader=_Loader) if manifest]


_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


# ---- queries on objects -------------------------------------------------------------------------


def of_kind(objects: list[Object], *kinds: str) -> list[Object]:
    return [manifest for manifest in objects if manifest["kind"] in kinds]


def workloads(objects: list[Object], *kinds: str) -> list[Object]:
    """Returns the workloads of these kinds, or of all.

    A LeaderWorkerSet has two templates of pods, so it counts as two: that of the leaders, which has
    its name, and `<name>-workers`. Their pods have the labels that its controller adds.
    """
    found = []
    for manifest in of_kind(objects, *(kinds or WORKLOADS)):
        if manifest["kind"] == "LeaderWorkerSet":
            found += [_leaders_or_workers(manifest, index) for index in (0, 1)]
        else:
            found.append(manifest)
    return found


def _leaders_or_workers(manifest: Object, index: int) -> Object:
    """Returns the leaders (index 0) or the workers of a LeaderWorkerSet as the StatefulSet that its
    controller makes of them."""
    name = manifest["metadata"]["name"]
    role, suffix = (("leaderTemplate", ""), ("workerTemplate", "-workers"))[index]
    template = copy.deepcopy(manifest["spec"]["leaderWorkerTemplate"][role])
    template["metadata"]["labels"] |= {
        "leaderworkerset.sigs.k8s.io/name": name,
        "leaderworkerset.sigs.k8s.io/worker-index": str(index),
    }
    metadata = {**manifest["metadata"], "name": f"{name}{suffix}"}
    spec = {"template": template}
    return {**manifest, "kind": "StatefulSet", "metadata": metadata, "spec": spec}


def one(objects: list[Object], kind: str, name: str) -> Object:
    (match,) = (
        manifest for manifest in of_kind(objects, kind) if manifest["metadata"]["name"] == name
    )
    return match


def pod_of(workload: Object) -> Object:
    """Returns metadata and spec of a workload's pods."""
    if workload["kind"] == "Pod":
        return workload
    spec = workload["spec"]
    template: Object = (spec["jobTemplate"]["spec"] if "jobTemplate" in spec else spec)["template"]
    return template


def containers(objects: list[Object]) -> Iterator[tuple[str, Object]]:
    """Yields every container, after `kind/name` of its workload."""
    for workload in workloads(objects):
        spec = pod_of(workload)["spec"]
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            yield f"{workload['kind']}/{workload['metadata']['name']}", container


def container_of(objects: list[Object], kind: str, name: str) -> Object:
    (workload,) = (
        workload for workload in workloads(objects, kind) if workload["metadata"]["name"] == name
    )
    (container,) = pod_of(workload)["spec"]["containers"]
    return container


def env(container: Object) -> dict[str, str | None]:
    """Returns a container's variables; None for those from ConfigMaps, Secrets or fields."""
    return {variable["name"]: variable.get("value") for variable in container.get("env", [])}
