"""The trainer's jobs on Kubernetes, through kubeflow-training's client."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
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
from pipelines.pytorchjob import GROUP, LABELS, MADE_FROM_LABEL, PLURAL, RUN_LABEL, VERSION, Owner

NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
GIVE_UP_AFTER_S = 120.0
"""An API server that is upgraded is back sooner."""
PASSING = (0, 429, 500, 502, 503, 504)
"""0: no answer."""
REQUEST_S = 15.0

Answer = TypeVar("Answer")


class ApiUnavailable(TransientError):
    """The Kubernetes API does not answer."""


def current_namespace() -> str:
    """Of the pod that we are in."""
    try:
        return NAMESPACE_FILE.read_text().strip()
    except OSError as error:
        raise BapoError(
            f"{NAMESPACE_FILE} cannot be read: this is no pod of a cluster; "
            "`bapo pipeline run-local` runs the pipeline on this machine"
        ) from error


class KubeflowBackend:
    """PyTorchJobs of a namespace."""

    def __init__(
        self,
        namespace: str,
        release: str,
        configuration: kubernetes_client.Configuration | None = None,
        *,
        give_up_s: float = GIVE_UP_AFTER_S,
    ) -> None:
        """Finds the cluster as `kubectl` would, or takes `configuration`."""
        self._namespace, self._release, self._give_up_s = namespace, release, give_up_s
        try:
            self._client = TrainingClient(client_configuration=configuration, namespace=namespace)
        except ConfigException as error:
            raise BapoError(f"no cluster: {error}; `kubectl get nodes` must work first") from error
        api = self._client.custom_api.api_client
        api.rest_client = _Impatient(api.configuration)

    def create(self, job: dict[str, Any]) -> bool:
        name = job["metadata"]["name"]
        model = self._client.api_client.deserialize(
            SimpleNamespace(data=json.dumps(job)), "KubeflowOrgV1PyTorchJob"
        )
        try:
            self._call("create", name, lambda: self._client.create_job(model))
        except _Refused as error:
            if error.status == 409:
                return False
            raise
        return True

    def state(self, name: str) -> JobState | None:
        try:
            found = self._call("read", name, lambda: self._client.get_job(name))
        except _Refused as error:
            if error.status == 404:
                return None
            raise
        job = self._client.api_client.sanitize_for_serialization(found)
        return replace(
            self._state(name, job),
            spec_hash=job["metadata"].get("labels", {}).get(MADE_FROM_LABEL, ""),
        )

    def _state(self, name: str, job: dict[str, Any]) -> JobState:
        if job["metadata"].get("deletionTimestamp"):
            return JobState("ending", "it was deleted, and is not gone yet")
        status = job.get("status") or {}
        conditions = [each for each in status.get("conditions") or [] if each["status"] == "True"]
        last = conditions[-1] if conditions else {"type": "Created"}
        kinds = {each["type"] for each in conditions}
        words = f"{last.get('reason', '')}: {last.get('message', '')}".strip(": ")
        if "Failed" in kinds:
            return JobState("failed", self._why_failed(name, words))
        if "Succeeded" in kinds:
            return JobState("succeeded")
        if last["type"] == "Running":
            return JobState("running")
        if last["type"] == "Restarting":
            return JobState("restarting", words)
        return JobState("waiting", self._waits_for(name) or words)

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
        except _Refused as error:
            if error.status != 404:
                raise

    def jobs(self) -> dict[str, str]:
        labels = LABELS | {"app.kubernetes.io/instance": self._release}
        selector = ",".join(f"{key}={value}" for key, value in labels.items())
        found = self._call(
            "list",
            PLURAL,
            lambda: self._client.custom_api.list_namespaced_custom_object(
                GROUP, VERSION, self._namespace, PLURAL, label_selector=selector
            ),
        )
        named = {item["metadata"]["name"]: item["metadata"]["labels"] for item in found["items"]}
        return {name: own[RUN_LABEL] for name, own in named.items() if RUN_LABEL in own}

    def abandoned(self, name: str) -> bool:
        found = self._call(
            "read",
            name,
            lambda: self._client.custom_api.get_namespaced_custom_object(
                GROUP, VERSION, self._namespace, PLURAL, name
            ),
        )
        owners = found["metadata"].get("ownerReferences") or []
        for owner in owners:
            workflow = self._workflow(owner["name"])
            if workflow is None or _is_over(workflow):
                return True
        return False

    def is_ending(self, workflow: str) -> bool:
        """Whether somebody has ended the workflow: Kubeflow's "Terminate" sets its deadline to 0.
        True if we may not see it."""
        found = self._workflow(workflow) if workflow else None
        return found is None or _is_over(found) or _is_ending(found)

    def owner(self, workflow: str) -> Owner | None:
        """The workflow that runs the pipeline; None if we may not see it, or it is gone."""
        found = self._workflow(workflow) if workflow else None
        return None if found is None else Owner(workflow, found["metadata"]["uid"])

    def _workflow(self, name: str) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = self._call(
                "read workflow",
                name,
                lambda: self._client.custom_api.get_namespaced_custom_object(
                    "argoproj.io", "v1alpha1", self._namespace, "workflows", name
                ),
            )
        except _Refused as error:
            if error.status not in (403, 404):
                raise
            return None
        return found

    # -- why a job is not further

    def _waits_for(self, name: str) -> str:
        """What the pods wait for, in the scheduler's or the kubelet's words."""
        for pod in self._pods(name):
            for condition in pod.status.conditions or []:
                if condition.type == "PodScheduled" and condition.status == "False":
                    return f"{pod.metadata.name} finds no node: {condition.message}"
            for container in pod.status.container_statuses or []:
                waiting = container.state.waiting
                if waiting is not None and waiting.reason != "ContainerCreating":
                    return f"{pod.metadata.name}: {waiting.reason}: {waiting.message or ''}"
        return self._warning(name)

    def _why_failed(self, name: str, otherwise: str) -> str:
        """How a container ended, and its last line, if a pod is left to tell."""
        for pod in self._pods(name):
            for container in pod.status.container_statuses or []:
                ended = container.state.terminated
                if ended is not None and ended.exit_code:
                    log = self._last_line(pod.metadata.name)
                    return f"{pod.metadata.name} ended with {ended.exit_code} ({ended.reason}){log}"
            if pod.status.phase == "Failed":
                return f"{pod.metadata.name}: {pod.status.reason}: {pod.status.message}"
        return f"{otherwise}; its pods are gone"

    def _last_line(self, pod: str) -> str:
        try:
            log = self._call(
                "read the log of",
                pod,
                lambda: self._client.core_api.read_namespaced_pod_log(
                    pod, self._namespace, tail_lines=1
                ),
            )
        except _Refused:
            return ""  # the pod has gone meanwhile
        return f": {log.strip()}" if log and log.strip() else ""

    def _pods(self, name: str) -> list[Any]:
        found = self._call(
            "list the pods of",
            name,
            lambda: self._client.core_api.list_namespaced_pod(
                self._namespace, label_selector=f"training.kubeflow.org/job-name={name}"
            ),
        )
        return list(found.items)

    def _warning(self, name: str) -> str:
        """The last warning about the job itself: an exceeded quota, for one."""
        found = self._call(
            "read the events of",
            name,
            lambda: self._client.core_api.list_namespaced_event(
                self._namespace,
                field_selector=f"involvedObject.kind=PyTorchJob,involvedObject.name={name}",
            ),
        )
        warnings = [event for event in found.items if event.type == "Warning"]
        return f"{warnings[-1].reason}: {warnings[-1].message}" if warnings else ""

    # -- the API

    def _call(self, doing: str, name: str, call: Callable[[], Answer]) -> Answer:
        """Repeats what may pass; raises `_Refused` with words for what will not."""
        deadline = time.monotonic() + self._give_up_s
        pause = 0.2
        while True:
            try:
                return call()
            except (ApiException, HTTPError, RuntimeError, TimeoutError) as error:
                refused = _behind(error, ApiException)
                if refused is None and _behind(error, HTTPError, TimeoutError) is None:
                    raise
                status = 0 if refused is None else int(refused.status or 0)
                if status not in PASSING:
                    raise _Refused(status, _words(doing, name, status, refused)) from error
                if time.monotonic() + pause > deadline:
                    raise ApiUnavailable(
                        f"the Kubernetes API could not {doing} {name} for {self._give_up_s:.0f} s "
                        f"({refused.reason if refused is not None else error}); see whether the "
                        "control plane is well, then retry the step"
                    ) from error
            time.sleep(pause)
            pause = min(2 * pause, 5.0)


class _Impatient(RESTClientObject):  # type: ignore[misc]
    """kubeflow-training waits for ever for a server that takes a call and says nothing."""

    def request(self, *arguments: Any, _request_timeout: Any = None, **options: Any) -> Any:
        # A pair: of single numbers only whole ones count.
        timeout = _request_timeout or (REQUEST_S, REQUEST_S)
        return super().request(*arguments, _request_timeout=timeout, **options)


class _Refused(BapoError):
    """The API said no. `status` is the HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def _is_over(workflow: dict[str, Any]) -> bool:
    return (workflow.get("status") or {}).get("phase") in ("Succeeded", "Failed", "Error")


def _is_ending(workflow: dict[str, Any]) -> bool:
    spec = workflow.get("spec") or {}
    return bool(
        spec.get("activeDeadlineSeconds") == 0
        or spec.get("shutdown")
        or workflow["metadata"].get("deletionTimestamp")
    )


def _behind(error: BaseException, *kinds: type[BaseException]) -> Any:
    """kubeflow-training raises RuntimeError whatever happened: the cause is behind it."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, kinds):
            return seen
        seen = seen.__cause__ or seen.__context__
    return None


def _words(doing: str, name: str, status: int, error: ApiException | None) -> str:
    said = _message(error)
    hint = {
        401: "the service account's token is not accepted; see the pod's serviceAccountName",
        403: (
            "a quota is used up: free some of it, or ask for less"
            if "exceeded quota" in said
            else "bind the chart's pipeline role to the pipeline's service account "
            "(pipeline.serviceAccounts in its values)"
        ),
        404: (
            "is the Kubeflow training operator installed? `kubectl get crd "
            f"{PLURAL}.{GROUP}` must find it"
            if doing in ("create", "list")
            else "it is not there"
        ),
        422: "the API server refuses the manifest: is the training operator 1.9?",
    }.get(status, "see the API server's words")
    return f"Kubernetes refused to {doing} {name} (HTTP {status}): {said}; {hint}"


def _message(error: ApiException | None) -> str:
    """Of the Status object that the API server answers with."""
    if error is None:
        return ""
    try:
        return str(json.loads(error.body)["message"])
    except (TypeError, ValueError, KeyError):
        return str(error.reason)
