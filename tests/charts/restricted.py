"""The Pod Security Standard "restricted": what of a pod breaks it.

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
    """Of a pod's spec, in words; empty if it is admitted."""
    containers = [
        each
        for kind in ("initContainers", "containers", "ephemeralContainers")
        for each in spec.get(kind, [])
    ]
    found = list(_of_pod(spec))
    for container in containers:
        found += [f"{container['name']}: {each}" for each in _of_container(container, spec)]
    return found


def _of_pod(spec: dict[str, Any]) -> Iterator[str]:
    yield from (each for each in HOST if spec.get(each))
    for volume in spec.get("volumes", []):
        yield from (f"volume {kind}" for kind in volume.keys() - VOLUMES - {"name"})
    if spec.get("securityContext", {}).get("sysctls"):
        yield "sysctls"


def _of_container(container: dict[str, Any], spec: dict[str, Any]) -> Iterator[str]:
    own = container.get("securityContext", {})
    context = {**spec.get("securityContext", {}), **own}
    if own.get("privileged"):
        yield "privileged"
    if own.get("allowPrivilegeEscalation") is not False:
        yield "allowPrivilegeEscalation"
    if context.get("runAsNonRoot") is not True:
        yield "runAsNonRoot"
    if context.get("runAsUser") == 0:
        yield "runAsUser 0"
    if context.get("seccompProfile", {}).get("type") not in SECCOMP:
        yield "seccompProfile"
    if own.get("procMount", "Default") != "Default":
        yield "procMount"
    capabilities = own.get("capabilities", {})
    if capabilities.get("drop") != ["ALL"]:
        yield "capabilities not dropped"
    if set(capabilities.get("add", [])) - {"NET_BIND_SERVICE"}:
        yield "capabilities added"
    if any("hostPort" in port for port in container.get("ports", [])):
        yield "hostPort"
