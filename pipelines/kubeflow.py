"""Runs the trainer's jobs on Kubernetes, through kubeflow-training's client."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from kubeflow.training import TrainingClient
from kubernetes import client as kubernetes_client
from kubernetes.client.exceptions import ApiException
from kubernetes.client.rest import RESTClientObject
from kubernetes.config import ConfigException
from urllib3.exceptions import HTTPError

from bapo_core.errors import BapoError, TransientError
from pipelines.backends import JobState
from pipelines.pytorchjob import (
    GROUP,
    LABELS,
    PLURAL,
    QUEUE_LABEL,
    RUN_LABEL,
    SPEC_HASH_LABEL,
    VERSION,
    Owner,
)

NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
RETRY_FOR_S = 120.0
"""Seconds for which a transient error is retried. Upgrading an API server takes less."""
KUEUE_VERSIONS = ("v1beta2", "v1beta1")
"""Versions of Kueue's API, the newest first."""
TRANSIENT_STATUSES = (0, 429, 500, 502, 503, 504)
"""HTTP statuses of transient errors; 0 stands for no response."""
REQUEST_TIMEOUT_S = 15.0

Response = TypeVar("Response")


class ApiUnavailable(TransientError):
    """The Kubernetes API does not answer, or reports a transient error."""


def current_namespace() -> str:
    """Returns the namespace of this pod. Raises `BapoError` outside of a cluster."""
    try:
        return NAMESPACE_FILE.read_text().strip()
    except OSError as error:
        raise BapoError(
            f"{NAMESPACE_FILE} cannot be read, so this is no pod of a cluster; "
            "`bapo pipeline run-local` runs the pipeline on this machine"
        ) from error


class KubeflowBackend:
    """Creates, reads and deletes the PyTorchJobs of a namespace.

    Transient errors are retried for `retry_for_s` seconds, then `ApiUnavailable` is raised. Any
    other refusal is a `BapoError` with the server's message and the remedy.
    """

    def __init__(
        self,
        namespace: str,
        release: str,
        configuration: kubernetes_client.Configuration | None = None,
        *,
        retry_for_s: float = RETRY_FOR_S,
    ) -> None:
        """Connects to the cluster that `kubectl` would use, or to that of `configuration`."""
        self._namespace, self._release, self._retry_for_s = namespace, release, retry_for_s
        try:
            self._client = TrainingClient(client_configuration=configuration, namespace=namespace)
        except ConfigException as error:
            raise BapoError(
                f"no Kubernetes cluster is configured: {error}; `kubectl get nodes` must work"
            ) from error
        api = self._client.custom_api.api_client
        api.rest_client = _ClientWithTimeouts(api.configuration)

    def create(self, job: dict[str, Any]) -> bool:
        name = job["metadata"]["name"]
        model = self._client.api_client.deserialize(
            SimpleNamespace(data=json.dumps(job)), "KubeflowOrgV1PyTorchJob"
        )
        try:
            self._call("create", name, lambda: self._client.create_job(model))
        except _RequestRefused as error:
            if error.status == 409:
                return False
            raise
        return True

    def state(self, name: str) -> JobState | None:
        try:
            model = self._call("read", name, lambda: self._client.get_job(name))
        except _RequestRefused as error:
            if error.status == 404:
                return None
            raise
        job = self._client.api_client.sanitize_for_serialization(model)
        return replace(
            self._state(name, job),
            spec_hash=job["metadata"].get("labels", {}).get(SPEC_HASH_LABEL, ""),
        )

    def _state(self, name: str, job: dict[str, Any]) -> JobState:
        if job["metadata"].get("deletionTimestamp"):
            return JobState("terminating", "it was deleted, but still exists")
        status = job.get("status") or {}
        conditions = [
            condition
            for condition in status.get("conditions") or []
            if condition["status"] == "True"
        ]
        last = conditions[-1] if conditions else {"type": "Created"}
        types = {condition["type"] for condition in conditions}
        reason = f"{last.get('reason', '')}: {last.get('message', '')}".strip(": ")
        if "Failed" in types:
            return JobState("failed", self._failure(name, reason))
        if "Succeeded" in types:
            return JobState("succeeded")
        if last["type"] == "Running":
            return JobState("running")
        if last["type"] == "Restarting":
            return JobState("restarting", reason)
        queue = job["metadata"].get("labels", {}).get(QUEUE_LABEL)
        if queue and (job["spec"].get("runPolicy") or {}).get("suspend"):
            return JobState("waiting", self._place_in_queue(name, queue))
        return JobState("waiting", self._obstacle(name) or reason)

    def delete(self, name: str) -> None:
        try:
            self._call(
                "delete",
                name,
                lambda: self._client.delete_job(
                    name,
                    delete_options=kubernetes_client.V1DeleteOptions(
                        propagation_policy="Foreground"
                    ),
                ),
            )
        except _RequestRefused as error:
            if error.status != 404:
                raise

    def jobs(self) -> dict[str, str]:
        labels = LABELS | {"app.kubernetes.io/instance": self._release}
        selector = ",".join(f"{key}={value}" for key, value in labels.items())
        response = self._call(
            "list",
            PLURAL,
            lambda: self._client.custom_api.list_namespaced_custom_object(
                GROUP, VERSION, self._namespace, PLURAL, label_selector=selector
            ),
        )
        jobs = [item["metadata"] for item in response["items"]]
        return {job["name"]: job["labels"][RUN_LABEL] for job in jobs if RUN_LABEL in job["labels"]}

    def is_queued(self, name: str) -> bool:
        return self._workload(name) is not None

    def _workload(self, name: str) -> dict[str, Any] | None:
        """Returns the Workload by which Kueue manages a job, or None if it does not."""
        list_objects = self._client.custom_api.list_namespaced_custom_object
        for version in KUEUE_VERSIONS:
            arguments = ("kueue.x-k8s.io", version, self._namespace, "workloads")
            try:
                response = self._call("list", "workloads", partial(list_objects, *arguments))
            except _RequestRefused as error:
                if error.status != 404:
                    raise
                continue  # Kueue of another version, or none
            for workload in response["items"]:
                owners = workload["metadata"].get("ownerReferences") or []
                if any((owner["kind"], owner["name"]) == ("PyTorchJob", name) for owner in owners):
                    return dict(workload)
            return None
        return None

    def abandoned(self, name: str) -> bool:
        job = self._call(
            "read",
            name,
            lambda: self._client.custom_api.get_namespaced_custom_object(
                GROUP, VERSION, self._namespace, PLURAL, name
            ),
        )
        owners = job["metadata"].get("ownerReferences") or []
        return any(self.has_ended(f"{self._namespace}/{owner['name']}") for owner in owners)

    def has_ended(self, workflow: str) -> bool:
        namespace, _, name = workflow.partition("/")
        if namespace != self._namespace:
            return False
        found = self._read_workflow(name)
        return found is None or _has_finished(found)

    def is_terminating(self, name: str) -> bool:
        """Whether the workflow was terminated, has finished or was deleted.

        Kubeflow's "Terminate" sets the workflow's deadline to 0. Also True when this service
        account may not read workflows.
        """
        workflow = self._workflow(name) if name else None
        return workflow is None or _has_finished(workflow) or _is_terminated(workflow)

    def owner(self, name: str) -> Owner | None:
        """Returns the workflow that runs the pipeline as the owner of its job.

        None when the workflow was deleted, or when this service account may not read workflows.
        """
        workflow = self._workflow(name) if name else None
        return None if workflow is None else Owner(name, workflow["metadata"]["uid"])

    def _workflow(self, name: str) -> dict[str, Any] | None:
        """Returns the workflow, or None as `_read_workflow` and without the right to read it."""
        try:
            return self._read_workflow(name)
        except _RequestRefused as error:
            if error.status != 403:
                raise
            return None

    def _read_workflow(self, name: str) -> dict[str, Any] | None:
        """Returns the workflow, or None if it was deleted."""
        try:
            workflow: dict[str, Any] = self._call(
                "read workflow",
                name,
                lambda: self._client.custom_api.get_namespaced_custom_object(
                    "argoproj.io", "v1alpha1", self._namespace, "workflows", name
                ),
            )
        except _RequestRefused as error:
            if error.status != 404:
                raise
            return None
        return workflow

    # -- the reason of a job's state

    def _place_in_queue(self, name: str, queue: str) -> str:
        """Returns what Kueue says of a job that it has suspended."""
        workload = self._workload(name) or {}
        for condition in (workload.get("status") or {}).get("conditions") or []:
            if condition["type"] == "QuotaReserved" and condition["status"] != "True":
                return f"Kueue has not admitted it from the queue {queue}: {condition['message']}"
        return f"Kueue has not admitted it from the queue {queue}"

    def _obstacle(self, name: str) -> str:
        """Returns what the pods wait for, in the words of the scheduler or the kubelet."""
        for pod in self._pods(name):
            for condition in pod.status.conditions or []:
                if condition.type == "PodScheduled" and condition.status == "False":
                    return f"{pod.metadata.name} has no node: {condition.message}"
            for container in pod.status.container_statuses or []:
                waiting = container.state.waiting
                if waiting is not None and waiting.reason != "ContainerCreating":
                    return f"{pod.metadata.name}: {waiting.reason}: {waiting.message or ''}"
        return self._warning(name)

    def _failure(self, name: str, reason: str) -> str:
        """Returns how a container ended and the last line of its log, or else the job's `reason`
        when its pods were deleted."""
        for pod in self._pods(name):
            for container in pod.status.container_statuses or []:
                ended = container.state.terminated
                if ended is not None and ended.exit_code:
                    log = self._last_line(pod.metadata.name)
                    code = f"{ended.exit_code} ({ended.reason})"
                    return f"{pod.metadata.name} exited with {code}{log}"
            if pod.status.phase == "Failed":
                return f"{pod.metadata.name}: {pod.status.reason}: {pod.status.message}"
        return f"{reason}; its pods were deleted"

    def _last_line(self, pod: str) -> str:
        try:
            log = self._call(
                "read the log of",
                pod,
                lambda: self._client.core_api.read_namespaced_pod_log(
                    pod, self._namespace, tail_lines=1
                ),
            )
        except _RequestRefused:
            return ""  # the pod was deleted meanwhile
        return f": {log.strip()}" if log and log.strip() else ""

    def _pods(self, name: str) -> list[Any]:
        response = self._call(
            "list the pods of",
            name,
            lambda: self._client.core_api.list_namespaced_pod(
                self._namespace, label_selector=f"training.kubeflow.org/job-name={name}"
            ),
        )
        return list(response.items)

    def _warning(self, name: str) -> str:
        """Returns the last warning event of the job itself, such as an exceeded quota."""
        response = self._call(
            "read the events of",
            name,
            lambda: self._client.core_api.list_namespaced_event(
                self._namespace,
                field_selector=f"involvedObject.kind=PyTorchJob,involvedObject.name={name}",
            ),
        )
        warnings = [event for event in response.items if event.type == "Warning"]
        return f"{warnings[-1].reason}: {warnings[-1].message}" if warnings else ""

    # -- the API

    def _call(self, verb: str, name: str, call: Callable[[], Response]) -> Response:
        """Calls the API and retries transient errors. Raises `_RequestRefused` for any other."""
        deadline = time.monotonic() + self._retry_for_s
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
                    raise _RequestRefused(status, message) from error
                if time.monotonic() + pause > deadline:
                    raise ApiUnavailable(
                        f"the Kubernetes API could not {verb} {name} for {self._retry_for_s:.0f} s "
                        f"({refusal.reason if refusal is not None else error}); check that the "
                        "control plane is healthy, then retry the step"
                    ) from error
            time.sleep(pause)
            pause = min(2 * pause, 5.0)


class _ClientWithTimeouts(RESTClientObject):  # type: ignore[misc]
    """Gives every request a time-out; kubeflow-training itself would wait for ever."""

    def request(self, *arguments: Any, _request_timeout: Any = None, **options: Any) -> Any:
        # (connect, read): the client ignores a single number unless it is an integer.
        timeout = _request_timeout or (REQUEST_TIMEOUT_S, REQUEST_TIMEOUT_S)
        return super().request(*arguments, _request_timeout=timeout, **options)


class _RequestRefused(BapoError):
    """The API server refused a request with an HTTP status that no retry changes."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def _has_finished(workflow: dict[str, Any]) -> bool:
    return (workflow.get("status") or {}).get("phase") in ("Succeeded", "Failed", "Error")


def _is_terminated(workflow: dict[str, Any]) -> bool:
    spec = workflow.get("spec") or {}
    return bool(
        spec.get("activeDeadlineSeconds") == 0
        or spec.get("shutdown")
        or workflow["metadata"].get("deletionTimestamp")
    )


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
            "is the Kubeflow training operator installed? `kubectl get crd "
            f"{PLURAL}.{GROUP}` must find it"
            if verb in ("create", "list")
            else "it does not exist"
        ),
        422: "the API server refuses the manifest: is the training operator 1.9?",
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
