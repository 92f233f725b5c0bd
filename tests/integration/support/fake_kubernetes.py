"""Serves the part of the Kubernetes API that the pipeline uses, and checks every request.

It stands in for a cluster. Objects are stored as they were sent; selectors select; what does not
exist is a 404, and a request that a real server would refuse fails the test.
"""

from __future__ import annotations

import json
import ssl
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from kubernetes import client

Object = dict[str, Any]
CREATED = datetime(2026, 11, 26, 18, 30, tzinfo=UTC)
"""When every object was created."""


@dataclass
class Refusal:
    """A response in place of the real one, sent after `delay_s` seconds."""

    status: int
    message: str = ""
    delay_s: float = 0.0
    method: str = ""
    """Method of the requests that it answers; any if empty."""


@dataclass
class FakeKubernetes:
    """The objects of one namespace, by plural and name."""

    namespace: str = "team"
    objects: dict[str, dict[str, Object]] = field(default_factory=lambda: defaultdict(dict))
    logs: dict[str, str] = field(default_factory=dict)
    refusals: list[Refusal] = field(default_factory=list)
    """Responses to the next requests, in place of the real ones."""
    operators: tuple[str, ...] = ("kubeflow.org", "trainer.kubeflow.org")
    """API groups of the operators that are installed."""
    kueue: str = "none"
    """Version of Kueue's API."""
    finalizer: bool = False
    """Whether deleted objects stay, as an object with a finalizer does."""
    forbidden: tuple[str, ...] = ()
    """Ends of the paths that the account may not read."""
    requests: list[str] = field(default_factory=list)

    def configuration(self) -> client.Configuration:
        configuration = client.Configuration(host=self.url)
        configuration.retries = False  # urllib3's retries would hide those of the backend
        return configuration

    url: str = ""
    token: str = ""
    """Bearer token that requests must carry; none if empty."""

    def answer(self, method: str, target: str, body: Object | None) -> tuple[int, Any]:
        url = urlsplit(target)
        self.requests.append(f"{method} {url.path}")
        if self.refusals and self.refusals[0].method in ("", method):
            refusal = self.refusals.pop(0)
            time.sleep(refusal.delay_s)
            return refusal.status, status(refusal.status, refusal.message)
        if url.path.endswith(self.forbidden):
            return 403, status(403, f"{url.path} is forbidden")
        group, plural, name, rest = self._parse(url.path)
        if not self._is_installed(group, url.path):
            return 404, "404 page not found\n"
        if method == "POST":
            assert body is not None
            return self._create(plural, body)
        if name is None:
            return 200, self._list(plural, parse_qs(url.query))
        if name not in self.objects[plural]:
            return 404, status(404, f'{plural} "{name}" not found')
        if method == "PUT":
            assert body is not None
            assert name is not None
            assert body["metadata"].pop("resourceVersion", None) == "1", "a conflict"
            self.objects[plural][name] = body
            return 200, self._read(plural, name)
        if method == "DELETE":
            return self._delete(plural, name, body)
        if rest == "scale":
            return 200, self._scale(plural, name, body)
        return 200, self.logs.get(name, "") if rest == "log" else self._read(plural, name)

    def _is_installed(self, group: str, path: str) -> bool:
        if group.endswith("kubeflow.org"):
            return group in self.operators
        return group != "kueue.x-k8s.io" or f"/{self.kueue}/" in path

    def _parse(self, path: str) -> tuple[str, str, str | None, str | None]:
        segments = path.strip("/").split("/")
        skip = 2 if segments[0] == "api" else 3
        group = "" if segments[0] == "api" else segments[1]
        assert segments[skip : skip + 2] == ["namespaces", self.namespace], path
        tail = [*segments[skip + 2 :], None, None]
        assert tail[0] is not None
        return group, tail[0], tail[1], tail[2]

    def _create(self, plural: str, body: Object) -> tuple[int, Any]:
        name = body["metadata"]["name"]
        assert body["metadata"].get("namespace") == self.namespace
        if name in self.objects[plural]:
            return 409, status(409, f'{plural} "{name}" already exists')
        self.objects[plural][name] = body
        return 201, self._read(plural, name)

    def _read(self, plural: str, name: str) -> Object:
        """Returns an object with what the server adds."""
        stored = self.objects[plural][name]
        added = {
            "uid": f"uid-of-{name}",
            "resourceVersion": "1",
            "creationTimestamp": CREATED.isoformat(),
        }
        metadata = {**added, **stored["metadata"]}
        return {**stored, "metadata": metadata}

    def _delete(self, plural: str, name: str, options: Object | None) -> tuple[int, Any]:
        policy = (options or {}).get("propagationPolicy")
        # In the foreground, the end of a TrainJob's deletion would be refused without its runtime.
        assert policy == ("Background" if plural == "trainjobs" else "Foreground")
        uid = ((options or {}).get("preconditions") or {}).get("uid")
        if uid not in (None, self._read(plural, name)["metadata"]["uid"]):
            return 409, status(409, f"Precondition failed: UID in precondition: {uid}")
        if not self.finalizer:
            del self.objects[plural][name]
        if plural == "trainjobs":
            # The garbage collector's part.
            runtime = self.objects["trainingruntimes"].pop(name, None)
            assert runtime is not None
            (owner,) = runtime["metadata"]["ownerReferences"]
            assert (owner["kind"], owner["uid"]) == ("TrainJob", f"uid-of-{name}")
        return 200, status(200, "")

    def _scale(self, plural: str, name: str, patch: Any) -> Object:
        """Applies a merge patch, as what the client sends is declared to be."""
        spec = self.objects[plural][name]["spec"]
        if patch is not None:
            assert isinstance(patch, dict), "cannot unmarshal array into Go value of type map"
            spec |= patch["spec"]
        # A number of 0 is left out.
        shown = {"replicas": spec["replicas"]} if spec["replicas"] else {}
        return {"apiVersion": "autoscaling/v1", "kind": "Scale", "spec": shown}

    def _list(self, plural: str, query: dict[str, list[str]]) -> Object:
        items = list(self.objects[plural].values())
        for term in ",".join(query.get("labelSelector", [])).split(","):
            if term:
                key, _, value = term.partition("=")
                items = [item for item in items if item["metadata"]["labels"].get(key) == value]
        for term in ",".join(query.get("fieldSelector", [])).split(","):
            if term:
                key, _, value = term.partition("=")
                section, field_name = key.split(".")
                items = [item for item in items if item[section].get(field_name) == value]
        return {"apiVersion": "v1", "kind": "List", "metadata": {}, "items": items}

    # -- what an operator and a kubelet write

    def condition(
        self, name: str, kind: str, reason: str = "", message: str = "", jobs: str = "pytorchjobs"
    ) -> None:
        job_status = self.objects[jobs][name].setdefault("status", {"conditions": []})
        for earlier in job_status["conditions"]:
            if earlier["type"] in ("Running", "Restarting"):
                earlier["status"] = "False"
        condition = {"type": kind, "status": "True", "reason": reason, "message": message}
        job_status["conditions"].append(condition)

    def pod(
        self,
        job: str,
        number: int = 0,
        labels: tuple[str, ...] = ("training.kubeflow.org/job-name",),
        uid: str = "u-1",
        **status: Any,
    ) -> str:
        name = f"{job}-worker-{number}"
        self.objects["pods"][name] = {
            "metadata": {"name": name, "uid": uid, "labels": dict.fromkeys(labels, job)},
            "status": {"phase": "Pending", **status},
        }
        return name

    def event(
        self, job: str, reason: str, message: str, kind: str = "PyTorchJob", age_s: float = -1.0
    ) -> None:
        """Adds a warning. age_s: seconds for which it precedes the creation of the job."""
        moment = CREATED - timedelta(seconds=age_s)
        self.objects["events"][f"{job}.{len(self.objects['events'])}"] = {
            "metadata": {"name": f"{job}.1"},
            "involvedObject": {"kind": kind, "name": job},
            "type": "Warning",
            "reason": reason,
            "message": message,
            "lastTimestamp": moment.isoformat().replace("+00:00", "Z"),
        }


def status(code: int, message: str) -> Object:
    return {"kind": "Status", "apiVersion": "v1", "code": code, "message": message}


@contextmanager
def fake_kubernetes(
    certificate: tuple[Path, Path] | None = None, **options: Any
) -> Iterator[FakeKubernetes]:
    """Serves a `FakeKubernetes`. `certificate`: files of the certificate and its key, for TLS."""
    fake = FakeKubernetes(**options)

    class Handler(BaseHTTPRequestHandler):
        def _serve(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(size)) if size else None
            scheme, _, token = (self.headers.get("Authorization") or "").partition(" ")
            if fake.token and (scheme.lower(), token) != ("bearer", fake.token):
                code, answer = 401, status(401, "Unauthorized")
            else:
                code, answer = fake.answer(self.command, self.path, body)
            is_text = isinstance(answer, str)
            data = answer.encode() if is_text else json.dumps(answer).encode()
            self.send_response(code)
            self.send_header("Content-Type", "text/plain" if is_text else "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _serve

        def log_message(self, format: str, *args: object) -> None:
            """Silences the access log."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    scheme = "http" if certificate is None else "https"
    fake.url = f"{scheme}://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
