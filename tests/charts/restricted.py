"""Finds violations of the Pod Security Standard "restricted".

https://kubernetes.io/docs/concepts/security/pod-security-standards/#restricted
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}
HOST = ("hostNetwork", "hostPID", "hostIPC", "hostUsers")
SECCOMP = ("RuntimeDefault", "Localhost")


def violations(spec: dict[str, Any]) -> list[str]:
    """Returns the violations of a pod's spec; empty if the standard admits it."""
    containers = [
        container
        for kind in ("initContainers", "containers", "ephemeralContainers")
        for container in spec.get(kind, [])
    ]
    problems = list(_of_pod(spec))
    for container in containers:
        problems += [
            f"{container['name']}: {problem}" for problem in _of_container(container, spec)
        ]
    return problems


def _of_pod(spec: dict[str, Any]) -> Iterator[str]:
    yield from (field for field in HOST if spec.get(field))
    for volume in spec.get("volumes", []):
        yield from (f"volume {kind}" for kind in volume.keys() - VOLUMES - {"name"})
    if spec.get("securityContext", {}).get("sysctls"):
        yield "sysctls"


def _of_container(container: dict[str, Any], spec: dict[str, Any]) -> Iterator[str]:
    own_context = container.get("securityContext", {})
    context = {**spec.get("securityContext", {}), **own_context}
    if own_context.get("privileged"):
        yield "privileged"
    if own_context.get("allowPrivilegeEscalation") is not False:
        yield "allowPrivilegeEscalation"
    if context.get("runAsNonRoot") is not True:
        yield "runAsNonRoot"
    if context.get("runAsUser") == 0:
        yield "runAsUser 0"
    if context.get("seccompProfile", {}).get("type") not in SECCOMP:
        yield "seccompProfile"
    if own_context.get("procMount", "Default") != "Default":
        yield "procMount"
    capabilities = own_context.get("capabilities", {})
    if capabilities.get("drop") != ["ALL"]:
        yield "capabilities not dropped"
    if set(capabilities.get("add", [])) - {"NET_BIND_SERVICE"}:
        yield "capabilities added"
    if any("hostPort" in port for port in container.get("ports", [])):
        yield "hostPort"
