"""Runs pods of the chart and of training jobs in containers, as a kubelet would.

podman gives them their user, a read-only root, no capabilities, their memory limit, variables from
ConfigMaps and Secrets, and `emptyDir` volumes. It does not give them a network for each pod, a
scheduler or restarts: pods share the network of this machine, to which the names of services and
pods resolve.
"""

from __future__ import annotations

import base64
import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Object = dict[str, Any]

_UNITS = {"": 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
STOP_WITHIN_S = 20


@dataclass
class Node:
    """A machine that runs pods, with their volumes below `directory`."""

    objects: list[Object]
    """Objects of a release, to whose ConfigMaps and Secrets pods refer."""
    directory: Path
    names: list[str]
    """Host names of services and pods."""
    _pods: list[str] = field(default_factory=list)

    def start(self, name: str, pod: Object, injected: Mapping[str, str] | None = None) -> str:
        """Starts a pod of one container; returns the container's name."""
        podman("rm", "--force", "--ignore", name)
        self._pods.append(name)
        podman("run", "--detach", f"--name={name}", *self._options(name, pod, injected or {}))
        return name

    def finish(self, name: str, pod: Object) -> tuple[int, str]:
        """Runs a pod until it ends; returns its exit code and its log."""
        self.start(name, pod)
        return self.wait(name), self.log(name)

    def wait(self, name: str) -> int:
        return int(podman("wait", name))

    def log(self, name: str) -> str:
        done = subprocess.run(
            ["podman", "logs", name],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=True,
        )
        return done.stdout

    def exit_code(self, name: str) -> int | None:
        """Returns the exit code of a pod; None while it runs."""
        state = json.loads(podman("inspect", name))[0]["State"]
        return None if state["Running"] else int(state["ExitCode"])

    def stop(self, name: str) -> None:
        podman("stop", f"--time={STOP_WITHIN_S}", name)

    def data(self, kind: str, name: str) -> dict[str, str]:
        """Returns the decoded data of a ConfigMap or Secret."""
        (match,) = (
            manifest
            for manifest in self.objects
            if manifest["kind"] == kind and manifest["metadata"]["name"] == name
        )
        decoded = {
            key: base64.b64decode(value).decode() if kind == "Secret" else value
            for key, value in match.get("data", {}).items()
        }
        return decoded | match.get("stringData", {})

    def close(self) -> None:
        for name in self._pods:
            podman("rm", "--force", "--ignore", "--time=0", name)

    # -- a pod's container as podman's options

    def _options(self, name: str, pod: Object, injected: Mapping[str, str]) -> Iterator[str]:
        (container,) = pod["containers"]
        yield "--network=host"
        yield f"--hostname={name}"
        yield from (f"--add-host={host}:127.0.0.1" for host in self.names)
        yield from self._security(pod["securityContext"], container["securityContext"])
        yield f"--memory={_bytes(container['resources']['limits']['memory'])}"
        for key, value in {**self.variables(name, container), **injected}.items():
            yield f"--env={key}={value}"
        volumes = {host["name"]: host for host in pod.get("volumes", [])}
        for mount in container.get("volumeMounts", []):
            yield self._mount(name, mount, volumes[mount["name"]], pod["securityContext"])
        command = [*container.get("command", []), *container.get("args", [])]
        yield f"--entrypoint={json.dumps(command)}"
        yield container["image"]

    def _security(self, pod: Object, container: Object) -> Iterator[str]:
        yield f"--user={pod['runAsUser']}:{pod['runAsGroup']}"
        yield f"--group-add={pod['fsGroup']}"
        if container["readOnlyRootFilesystem"]:
            yield from ("--read-only", "--read-only-tmpfs=false")
        yield from (f"--cap-drop={name}" for name in container["capabilities"]["drop"])
        if not container["allowPrivilegeEscalation"]:
            yield "--security-opt=no-new-privileges"

    def variables(self, name: str, container: Object) -> dict[str, str]:
        variables: dict[str, str] = {}
        for source in container.get("envFrom", []):
            for reference, kind in (("configMapRef", "ConfigMap"), ("secretRef", "Secret")):
                if reference in source:
                    variables |= self.data(kind, source[reference]["name"])
        for variable in container.get("env", []):
            variables[variable["name"]] = self._value(name, variable, variables)
        return variables

    def _value(self, name: str, variable: Object, earlier: Mapping[str, str]) -> str:
        origin = variable.get("valueFrom", {})
        if "secretKeyRef" in origin:
            reference = origin["secretKeyRef"]
            return self.data("Secret", reference["name"])[reference["key"]]
        if "fieldRef" in origin:
            assert origin["fieldRef"]["fieldPath"] == "metadata.name", origin
            return name
        assert not origin, f"{variable}: this source is not supported"
        text: str = variable["value"]
        return re.sub(r"\$\((\w+)\)", lambda match: earlier[match[1]], text)

    def _mount(self, name: str, mount: Object, volume: Object, security: Object) -> str:
        directory = self.directory / name / volume["name"]
        directory.mkdir(parents=True, exist_ok=True)
        if "configMap" in volume:
            for file, text in self.data("ConfigMap", volume["configMap"]["name"]).items():
                (directory / file).write_text(text)
            return f"--volume={directory}:{mount['mountPath']}:ro"
        if volume["emptyDir"].get("medium") == "Memory":
            size = _bytes(volume["emptyDir"]["sizeLimit"])
            options = f"type=tmpfs,destination={mount['mountPath']},tmpfs-mode=1777"
            return f"--mount={options},tmpfs-size={size}"
        # The kubelet gives the volume to the pod's group, and lets every user write.
        subprocess.run(["chgrp", str(security["fsGroup"]), directory], check=True)
        directory.chmod(0o2777)
        return f"--volume={directory}:{mount['mountPath']}"


@contextmanager
def node(objects: list[Object], directory: Path, names: list[str]) -> Iterator[Node]:
    running = Node(objects, directory, names)
    try:
        yield running
    finally:
        running.close()


def podman(*arguments: str) -> str:
    done = subprocess.run(["podman", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"podman {' '.join(arguments[:2])} …: {done.stderr.strip()}"
    return done.stdout.strip()


def _bytes(quantity: str) -> int:
    match = re.fullmatch(r"(\d+)(\w*)", quantity)
    assert match is not None, quantity
    return int(match[1]) * _UNITS[match[2]]
