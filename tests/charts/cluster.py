"""Serves the part of the Kubernetes API that Helm queries: kinds, the namespace, its Secrets."""

from __future__ import annotations

import base64
import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.charts.helm import NAMESPACE

KINDS = {
    "v1": {
        "configmaps": "ConfigMap",
        "namespaces": "Namespace",
        "pods": "Pod",
        "secrets": "Secret",
        "serviceaccounts": "ServiceAccount",
        "services": "Service",
    },
    "apps/v1": {"deployments": "Deployment", "statefulsets": "StatefulSet"},
    "batch/v1": {"jobs": "Job", "cronjobs": "CronJob"},
    "networking.k8s.io/v1": {"networkpolicies": "NetworkPolicy", "ingresses": "Ingress"},
    "policy/v1": {"poddisruptionbudgets": "PodDisruptionBudget"},
    "autoscaling/v2": {"horizontalpodautoscalers": "HorizontalPodAutoscaler"},
    "monitoring.coreos.com/v1": {
        "prometheusrules": "PrometheusRule",
        "servicemonitors": "ServiceMonitor",
    },
    "rbac.authorization.k8s.io/v1": {"roles": "Role", "rolebindings": "RoleBinding"},
}


LEADER_WORKER_SETS = {"leaderworkerset.x-k8s.io/v1": {"leaderworkersets": "LeaderWorkerSet"}}


def answers(
    secrets: dict[str, dict[str, str]], served: dict[str, dict[str, str]]
) -> dict[str, Any]:
    """Returns the response bodies, by path. served: kinds by API version, and by plural."""
    bodies: dict[str, Any] = {
        "/version": {"major": "1", "minor": "33", "gitVersion": "v1.33.0"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": _groups(served)},
    }
    for version, kinds in served.items():
        root = "/api" if version == "v1" else "/apis"
        bodies[f"{root}/{version}"] = {
            "kind": "APIResourceList",
            "groupVersion": version,
            "resources": [
                {
                    "name": name,
                    "singularName": "",
                    "namespaced": kind != "Namespace",
                    "kind": kind,
                    "verbs": ["get"],
                }
                for name, kind in kinds.items()
            ],
        }
    bodies[f"/api/v1/namespaces/{NAMESPACE}"] = {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": NAMESPACE},
    }
    for name, data in secrets.items():
        bodies[f"/api/v1/namespaces/{NAMESPACE}/secrets/{name}"] = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": _owned(name),
            "data": {key: base64.b64encode(value.encode()).decode() for key, value in data.items()},
        }
    return bodies


def _owned(name: str) -> dict[str, Any]:
    """Returns metadata of an object of the release "bapo", which Helm therefore adopts."""
    return {
        "name": name,
        "namespace": NAMESPACE,
        "labels": {"app.kubernetes.io/managed-by": "Helm"},
        "annotations": {
            "meta.helm.sh/release-name": "bapo",
            "meta.helm.sh/release-namespace": NAMESPACE,
        },
    }


def _stored(release: dict[str, Any]) -> dict[str, Any]:
    """Returns the Secret in which Helm stores a release: JSON, packed, in base64, as any value."""
    packed = base64.b64encode(gzip.compress(json.dumps(release).encode()))
    labels = {"owner": "helm", "name": "bapo", "status": "deployed", "version": "1"}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "helm.sh/release.v1",
        "metadata": {
            "name": "sh.helm.release.v1.bapo.v1",
            "namespace": NAMESPACE,
            "labels": labels,
        },
        "data": {"release": base64.b64encode(packed).decode()},
    }


def _groups(served: dict[str, dict[str, str]]) -> list[dict[str, Any]]:
    versions = [version for version in served if version != "v1"]
    return [
        {
            "name": version.partition("/")[0],
            "versions": [{"groupVersion": version, "version": version.partition("/")[2]}],
            "preferredVersion": {"groupVersion": version, "version": version.partition("/")[2]},
        }
        for version in versions
    ]


@contextmanager
def cluster(
    directory: Path,
    secrets: dict[str, dict[str, str]],
    custom: dict[str, dict[str, str]] | None = None,
    release: dict[str, Any] | None = None,
) -> Iterator[Path]:
    """Serves a cluster that has these Secrets; yields the path of its kubeconfig.

    custom: its custom kinds besides Prometheus' by API version, and by plural. release: the release
    "bapo" that is installed, as Helm stores it.
    """
    bodies = answers(secrets, KINDS | (custom or {}))
    stored = [] if release is None else [_stored(release)]
    listing = {"apiVersion": "v1", "kind": "SecretList", "metadata": {}, "items": stored}
    bodies[f"/api/v1/namespaces/{NAMESPACE}/secrets"] = listing

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = bodies.get(self.path.partition("?")[0])
            status = 404 if body is None else 200
            missing = {"kind": "Status", "apiVersion": "v1", "reason": "NotFound", "code": 404}
            data = json.dumps(body or missing).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    path = directory / "kubeconfig"
    path.write_text(json.dumps(_kubeconfig(f"http://127.0.0.1:{server.server_port}")))
    try:
        yield path
    finally:
        server.shutdown()
        server.server_close()


def _kubeconfig(address: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [{"name": "test", "cluster": {"server": address}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        "users": [{"name": "test", "user": {}}],
    }
