"""Calls kubectl and helm on the cluster that `KUBECONFIG` names."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Object = dict[str, Any]


def kubectl(*arguments: str, stdin: str | None = None, check: bool = True) -> str:
    """Returns what kubectl prints. Raises `AssertionError` with its message when it fails."""
    return _run("kubectl", *arguments, stdin=stdin, check=check)


def helm(*arguments: str) -> str:
    return _run(str(Path(sys.prefix) / "helm" / "4.1" / "helm"), *arguments)


def _run(program: str, *arguments: str, stdin: str | None = None, check: bool = True) -> str:
    assert shutil.which(program), f"{program} is not installed"
    done = subprocess.run(
        [program, *arguments], input=stdin, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 or not check, f"{' '.join(arguments)}: {done.stdout}{done.stderr}"
    return done.stdout


class Namespace:
    """Objects of one namespace."""

    def __init__(self, name: str) -> None:
        self.name = name

    def kubectl(self, *arguments: str, stdin: str | None = None, check: bool = True) -> str:
        return kubectl("-n", self.name, *arguments, stdin=stdin, check=check)

    def apply(self, *objects: Object) -> None:
        self.kubectl("apply", "-f", "-", stdin=json.dumps(_list(objects)))

    def create(self, item: Object) -> Object:
        created: Object = json.loads(
            self.kubectl("create", "-o", "json", "-f", "-", stdin=json.dumps(item))
        )
        return created

    def get(self, kind: str, name: str) -> Object | None:
        text = self.kubectl("get", kind, name, "-o", "json", "--ignore-not-found")
        return json.loads(text) if text.strip() else None

    def names(self, kind: str, label: str = "") -> set[str]:
        """Returns the names of the objects of a kind, or of several: `jobs,pods`."""
        items = json.loads(self.kubectl("get", kind, "-l", label, "-o", "json"))["items"]
        return {item["metadata"]["name"] for item in items}

    def evict(self, pod: str) -> None:
        """Evicts a pod, as the draining of its node does."""
        eviction = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod, "namespace": self.name},
        }
        path = f"/api/v1/namespaces/{self.name}/pods/{pod}/eviction"
        kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(eviction))

    def not_restricted(self) -> str:
        """Returns what the admission plugin says of the pods that are not restricted ones."""
        label = ["pod-security.kubernetes.io/enforce=restricted", "--overwrite", "--dry-run=server"]
        done = subprocess.run(
            ["kubectl", "label", "namespace", self.name, *label],
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stderr

    def log(self, pod: str) -> str:
        return self.kubectl("logs", pod, check=False)


def _list(objects: tuple[Object, ...]) -> Object:
    return {"apiVersion": "v1", "kind": "List", "items": list(objects)}


def wait_until(
    condition: Callable[[], Any], what: str, seconds: float, explain: Callable[[], str] = str
) -> Any:
    """Returns what `condition` returns once it is true. Fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, f"{what} took more than {seconds:.0f} s {explain()}"
        time.sleep(0.5)
    return result
