"""Pods in real containers, as a kubelet would start them: the chart's, and those of training jobs.

podman runs them: their own user, a read-only root, no capabilities, their memory limit, variables
from ConfigMaps and Secrets, `emptyDir` volumes. What a cluster has besides (a network for each pod,
a scheduler, restarts) is not here: pods share the network of this machine, and the names of
services and pods lead back to it.
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
    """Where pods run. Everything below `directory` is theirs."""

    objects: list[Object]
    """Of a release: its ConfigMaps and Secrets are what pods refer to."""
    directory: Path
    names: list[str]
    """Of services and pods, as pods call them."""
    shared: list[Path]
    """Directories of this machine that every pod sees, in the same place."""
    _pods: list[str] = field(default_factory=list)

    def start(self, name: str, pod: Object, injected: Mapping[str, str] | None = None) -> str:
        """Starts a pod of one container; the container's name."""
        podman("rm", "--force", "--ignore", name)
        self._pods.append(name)
        podman("run", "--detach", f"--name={name}", *self._options(name, pod, injected or {}))
        return name

    def finish(self, name: str, pod: Object) -> tuple[int, str]:
        """Runs a pod to its end: (exit code, log)."""
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
        """None while it runs."""
        state = json.loads(podman("inspect", name))[0]["State"]
        return None if state["Running"] else int(state["ExitCode"])

    def stop(self, name: str) -> None:
        podman("stop", f"--time={STOP_WITHIN_S}", name)

    def data(self, kind: str, name: str) -> dict[str, str]:
        """What a ConfigMap or Secret says."""
        (found,) = (
            each
            for each in self.objects
            if each["kind"] == kind and each["metadata"]["name"] == name
        )
        coded = {
            key: base64.b64decode(value).decode() if kind == "Secret" else value
            for key, value in found.get("data", {}).items()
        }
        return coded | found.get("stringData", {})

    def close(self) -> None:
        for name in self._pods:
            podman("rm", "--force", "--ignore", "--time=0", name)

    # -- a pod's container as podman's options

    def _options(self, name: str, pod: Object, injected: Mapping[str, str]) -> Iterator[str]:
        (container,) = pod["containers"]
        yield "--network=host"
        yield f"--hostname={name}"
        yield from (f"--add-host={each}:127.0.0.1" for each in self.names)
        yield from self._security(pod["securityContext"], container["securityContext"])
        yield f"--memory={_bytes(container['resources']['limits']['memory'])}"
        for key, value in {**self.variables(name, container), **injected}.items():
            yield f"--env={key}={value}"
        volumes = {each["name"]: each for each in pod.get("volumes", [])}
        for mount in container.get("volumeMounts", []):
            yield self._mount(name, mount, volumes[mount["name"]], pod["securityContext"])
        yield from (f"--volume={path}:{path}:ro" for path in self.shared)
        command = [*container.get("command", []), *container.get("args", [])]
        yield f"--entrypoint={json.dumps(command)}"
        yield container["image"]

    def _security(self, pod: Object, container: Object) -> Iterator[str]:
        yield f"--user={pod['runAsUser']}:{pod['runAsGroup']}"
        yield f"--group-add={pod['fsGroup']}"
        if container["readOnlyRootFilesystem"]:
            yield from ("--read-only", "--read-only-tmpfs=false")
        yield from (f"--cap-drop={each}" for each in container["capabilities"]["drop"])
        if not container["allowPrivilegeEscalation"]:
            yield "--security-opt=no-new-privileges"

    def variables(self, name: str, container: Object) -> dict[str, str]:
        found: dict[str, str] = {}
        for source in container.get("envFrom", []):
            for reference, kind in (("configMapRef", "ConfigMap"), ("secretRef", "Secret")):
                if reference in source:
                    found |= self.data(kind, source[reference]["name"])
        for each in container.get("env", []):
            found[each["name"]] = self._value(name, each, found)
        return found

    def _value(self, name: str, variable: Object, known: Mapping[str, str]) -> str:
        origin = variable.get("valueFrom", {})
        if "secretKeyRef" in origin:
            reference = origin["secretKeyRef"]
            return self.data("Secret", reference["name"])[reference["key"]]
        if "fieldRef" in origin:
            assert origin["fieldRef"]["fieldPath"] == "metadata.name", origin
            return name
        assert not origin, f"{variable}: nobody has needed this yet"
        text: str = variable["value"]
        return re.sub(r"\$\((\w+)\)", lambda found: known[found[1]], text)

    def _mount(self, name: str, mount: Object, volume: Object, security: Object) -> str:
        place = self.directory / name / volume["name"]
        place.mkdir(parents=True, exist_ok=True)
        if "configMap" in volume:
            for file, text in self.data("ConfigMap", volume["configMap"]["name"]).items():
                (place / file).write_text(text)
            return f"--volume={place}:{mount['mountPath']}:ro"
        if volume["emptyDir"].get("medium") == "Memory":
            size = _bytes(volume["emptyDir"]["sizeLimit"])
            options = f"type=tmpfs,destination={mount['mountPath']},tmpfs-mode=1777"
            return f"--mount={options},tmpfs-size={size}"
        # As the kubelet makes it: the group's, and open.
        subprocess.run(["chgrp", str(security["fsGroup"]), place], check=True)
        place.chmod(0o2777)
        return f"--volume={place}:{mount['mountPath']}"


@contextmanager
def node(
    objects: list[Object], directory: Path, names: list[str], shared: list[Path]
) -> Iterator[Node]:
    made = Node(objects, directory, names, shared)
    try:
        yield made
    finally:
        made.close()


def podman(*arguments: str) -> str:
    done = subprocess.run(["podman", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"podman {' '.join(arguments[:2])} …: {done.stderr.strip()}"
    return done.stdout.strip()


def _bytes(quantity: str) -> int:
    found = re.fullmatch(r"(\d+)(\w*)", quantity)
    assert found is not None, quantity
    return int(found[1]) * _UNITS[found[2]]
