"""Calls the Kubernetes API for the pipeline, with time-outs, retries and remedies."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Collection
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypeVar

from kubeflow.training import TrainingClient
from kubernetes import client as kubernetes_client
from kubernetes.client.exceptions import ApiException
from kubernetes.client.rest import RESTClientObject
from kubernetes.config import ConfigException
from urllib3.exceptions import HTTPError

from bapo_core.errors import BapoError, TransientError

log = logging.getLogger(__name__)

_NEVER = datetime.min.replace(tzinfo=UTC)
NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
RETRY_FOR_S = 120.0
"""Seconds for which a transient error is retried."""
STEP_RETRY_FOR_S = 900.0
"""Seconds for which a step of the pipeline retries a transient error, because Kubeflow does not
repeat a step that fails. Upgrading the API server of a small cluster takes minutes."""
SAY_EVERY_S = 60.0
"""Seconds between two log lines about a call that is repeated."""
CONFLICT_PAUSE_S = 0.5
TRANSIENT_STATUSES = (0, 429, 500, 502, 503, 504)
"""HTTP statuses of transient errors; 0 stands for no response."""
REQUEST_TIMEOUT_S = 15.0
LOG_LINES = 100
"""Lines that are read from the end of a pod's log to find its last error."""

Object = dict[str, Any]
ResourceType = tuple[str, str, str]
"""API group, version and plural of a kind of custom objects."""
Response = TypeVar("Response")


class ApiUnavailable(TransientError):
    """The Kubernetes API does not answer, or reports a transient error."""


class RequestRefused(BapoError):
    """The API server refused a request with an HTTP status that no retry changes."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def current_namespace() -> str:
    """Returns the namespace of this pod. Raises `BapoError` outside of a cluster."""
    try:
        return NAMESPACE_FILE.read_text().strip()
    except OSError as error:
        raise BapoError(
            f"{NAMESPACE_FILE} cannot be read, so this is no pod of a cluster; "
            "`bapo pipeline run-local` runs the pipeline on this machine"
        ) from error


class Cluster:
    """A namespace of a cluster.

    Transient errors are retried for `retry_for_s` seconds, then `ApiUnavailable` is raised. Any
    other refusal is a `RequestRefused` with the server's message and the remedy.
    """

    def __init__(
        self,
        namespace: str,
        configuration: kubernetes_client.Configuration | None = None,
        *,
        retry_for_s: float = RETRY_FOR_S,
    ) -> None:
        """Connects to the cluster of `configuration`, or else to the one that `kubectl` uses."""
        self.namespace, self._retry_for_s = namespace, retry_for_s
        try:
            self.training = TrainingClient(client_configuration=configuration, namespace=namespace)
        except ConfigException as error:
            raise BapoError(
                f"no Kubernetes cluster is configured: {error}; `kubectl get nodes` must work"
            ) from error
        self._custom, self._core = self.training.custom_api, self.training.core_api
        api = self._custom.api_client
        api.rest_client = _ClientWithTimeouts(api.configuration)

    # -- custom objects

    def get(self, kind: ResourceType, name: str) -> Object | None:
        """Returns an object, or None if there is none of this name or the kind is not installed."""
        return self._unless_missing(
            "read",
            name,
            lambda: self._custom.get_namespaced_custom_object(*self._in_namespace(kind), name),
        )

    def select(self, kind: ResourceType, labels: dict[str, str]) -> list[Object] | None:
        """Returns the objects with these labels, or None if the kind is not installed."""
        selector = ",".join(f"{key}={value}" for key, value in labels.items())
        response = self._unless_missing(
            "list",
            kind[2],
            lambda: self._custom.list_namespaced_custom_object(
                *self._in_namespace(kind), label_selector=selector
            ),
        )
        return None if response is None else list(response["items"])

    def create(self, kind: ResourceType, manifest: Object) -> Object:
        """Creates an object and returns it."""
        created: Object = self.call(
            "create",
            manifest["metadata"]["name"],
            lambda: self._custom.create_namespaced_custom_object(
                *self._in_namespace(kind), manifest
            ),
        )
        return created

    def put(self, kind: ResourceType, manifest: Object) -> None:
        """Creates an object, or replaces the one of its name.

        Begins again when another client creates, changes or deletes the object in between.
        """
        deadline = time.monotonic() + self._retry_for_s
        while True:
            try:
                self._put_once(kind, manifest)
            except RequestRefused as error:
                if error.status not in (404, 409) or time.monotonic() > deadline:
                    raise
                time.sleep(CONFLICT_PAUSE_S)
            else:
                return

    def _put_once(self, kind: ResourceType, manifest: Object) -> None:
        name = manifest["metadata"]["name"]
        existing = self.get(kind, name)
        if existing is None:
            self.create(kind, manifest)
            return
        version = {"resourceVersion": existing["metadata"]["resourceVersion"]}
        replacement = manifest | {"metadata": manifest["metadata"] | version}
        self.call(
            "replace",
            name,
            lambda: self._custom.replace_namespaced_custom_object(
                *self._in_namespace(kind), name, replacement
            ),
        )

    def delete(
        self,
        kind: ResourceType,
        name: str,
        propagation: Literal["Foreground", "Background"] = "Foreground",
        *,
        uid: str | None = None,
    ) -> None:
        """Deletes an object and what it owns; does nothing if it does not exist.

        propagation: "Foreground" deletes the owned objects first, "Background" afterwards. uid: if
        given, an object of this name with another uid is left as it is.
        """
        options = kubernetes_client.V1DeleteOptions(
            propagation_policy=propagation,
            preconditions=None if uid is None else kubernetes_client.V1Preconditions(uid=uid),
        )
        try:
            self._unless_missing(
                "delete",
                name,
                lambda: self._custom.delete_namespaced_custom_object(
                    *self._in_namespace(kind), name, body=options
                ),
            )
        except RequestRefused as error:
            if uid is None or error.status != 409:
                raise

    def _in_namespace(self, kind: ResourceType) -> tuple[str, str, str, str]:
        group, version, plural = kind
        return group, version, self.namespace, plural

    # -- scaling

    def replicas(self, kind: ResourceType, name: str) -> int:
        """Returns the number of replicas that a workload should have."""
        scale = self.call(
            "read",
            name,
            lambda: self._custom.get_namespaced_custom_object_scale(
                *self._in_namespace(kind), name
            ),
        )
        return int(scale["spec"].get("replicas", 0))

    def scale(self, kind: ResourceType, name: str, replicas: int) -> None:
        """Sets the number of replicas that a workload should have."""
        change = {"spec": {"replicas": replicas}}  # the client sends it as a merge patch
        self.call(
            "scale",
            name,
            lambda: self._custom.patch_namespaced_custom_object_scale(
                *self._in_namespace(kind), name, change
            ),
        )

    # -- pods and events

    def pods(self, label: str, value: str) -> list[Any]:
        """Returns the pods with a label."""
        response = self.call(
            "list the pods of",
            value,
            lambda: self._core.list_namespaced_pod(
                self.namespace, label_selector=f"{label}={value}"
            ),
        )
        return list(response.items)

    def log(self, pod: str) -> str:
        """Returns the end of a pod's log; empty if there is none or it may not be read."""
        read = self._core.read_namespaced_pod_log
        text = self._unless_hidden(
            "read the log of", pod, lambda: read(pod, self.namespace, tail_lines=LOG_LINES)
        )
        return text or ""

    def config_map(self, name: str) -> dict[str, str] | None:
        """Returns the texts of a ConfigMap by their keys, or None if it does not exist."""
        read = self._core.read_namespaced_config_map
        found = self._unless_missing("read the ConfigMap", name, lambda: read(name, self.namespace))
        return None if found is None else dict(found.data or {})

    def warning(self, kind: str, name: str, since: datetime, but: str = "") -> str:
        """Returns the last warning event of an object, such as an exceeded quota.

        Returns "" if there is none, or if events may not be read.

        since: creation time of the object, because the events of an earlier object of its name
        remain. but: reason of the events to leave out.
        """
        response = self._unless_hidden(
            "read the events of",
            name,
            lambda: self._core.list_namespaced_event(
                self.namespace,
                field_selector=f"involvedObject.kind={kind},involvedObject.name={name}",
            ),
        )
        warnings = sorted(
            (_time_of(event), number, event)
            for number, event in enumerate([] if response is None else response.items)
            if event.type == "Warning" and event.reason != but and _time_of(event) >= since
        )
        if not warnings:
            return ""
        *_, event = warnings[-1]
        return f"{event.reason}: {event.message}"

    # -- requests

    def _unless_missing(
        self, verb: str, name: str, call: Callable[[], Response]
    ) -> Response | None:
        return self._unless(verb, name, call, (404,))

    def _unless_hidden(self, verb: str, name: str, call: Callable[[], Response]) -> Response | None:
        """Returns None also without the right to read it, which the reaper's account has not."""
        return self._unless(verb, name, call, (403, 404))

    def _unless(
        self, verb: str, name: str, call: Callable[[], Response], statuses: Collection[int]
    ) -> Response | None:
        try:
            return self.call(verb, name, call)
        except RequestRefused as error:
            if error.status not in statuses:
                raise
            return None

    def call(self, verb: str, name: str, call: Callable[[], Response]) -> Response:
        """Calls the API and retries transient errors.

        Raises `ApiUnavailable` after `retry_for_s`, and `RequestRefused` for any other error.
        """
        began = said = time.monotonic()
        deadline = began + self._retry_for_s
        pause = 0.2
        while True:
            try:
                return call()
            except (ApiException, HTTPError, RuntimeError, TimeoutError) as error:
                refusal = _find_cause(error, ApiException)
                if refusal is None and _find_cause(error, HTTPError, TimeoutError) is None:
                    raise
                status = 0 if refusal is None else int(refusal.status or 0)
                if status not in TRANSIENT_STATUSES:
                    message = _describe_refusal(verb, name, status, refusal)
                    raise RequestRefused(status, message) from error
                if time.monotonic() + pause > deadline:
                    raise ApiUnavailable(
                        f"the Kubernetes API could not {verb} {name} for {self._retry_for_s:.0f} s "
                        f"({refusal.reason if refusal is not None else error}); check that the "
                        "control plane is healthy, then retry the step"
                    ) from error
                if (now := time.monotonic()) - said >= SAY_EVERY_S:
                    said = now
                    log.warning(
                        "the Kubernetes API could not %s %s for %.0f s (%s); it is tried again "
                        "for up to %.0f s",
                        *(verb, name, now - began),
                        refusal.reason if refusal is not None else error,
                        deadline - now,
                    )
            time.sleep(pause)
            pause = min(2 * pause, 5.0)


def _time_of(event: Any) -> datetime:
    """Returns when an event happened last."""
    moment: datetime | None = event.last_timestamp or event.event_time
    return _NEVER if moment is None else moment


class _ClientWithTimeouts(RESTClientObject):  # type: ignore[misc]
    """Gives every request a time-out; kubeflow-training itself would wait for ever."""

    def request(self, *arguments: Any, _request_timeout: Any = None, **options: Any) -> Any:
        # (connect, read): the client ignores a single number unless it is an integer.
        timeout = _request_timeout or (REQUEST_TIMEOUT_S, REQUEST_TIMEOUT_S)
        return super().request(*arguments, _request_timeout=timeout, **options)


def _find_cause(error: BaseException, *kinds: type[BaseException]) -> Any:
    """Returns the first error of these kinds in the chain of causes, or None.

    kubeflow-training raises `RuntimeError` for every error, and chains the cause.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, kinds):
            return cause
        cause = cause.__cause__ or cause.__context__
    return None


def _describe_refusal(verb: str, name: str, status: int, error: ApiException | None) -> str:
    """Returns the server's message, and the remedy where one is known."""
    message = _message(error)
    remedy = {
        401: "the service account's token is not accepted; see the pod's serviceAccountName",
        403: (
            "a quota is used up: free some of it, or request less"
            if "exceeded quota" in message
            else "bind the chart's pipeline role to the pipeline's service account "
            "(pipeline.serviceAccounts in its values)"
        ),
        404: (
            "is the operator of the chart's trainer.jobKind installed? `kubectl get crd "
            "pytorchjobs.kubeflow.org trainjobs.trainer.kubeflow.org` must find its kind"
            if verb == "create"
            else "it does not exist"
        ),
        422: "the API server refuses the manifest; docs/deploy.md has the operators' versions",
    }.get(status, "the message is the API server's own")
    return f"Kubernetes refused to {verb} {name} (HTTP {status}): {message}; {remedy}"


def _message(error: ApiException | None) -> str:
    """Returns the message of the `Status` object that the API server answered with."""
    if error is None:
        return ""
    try:
        return str(json.loads(error.body)["message"])
    except (TypeError, ValueError, KeyError):
        return str(error.reason)
