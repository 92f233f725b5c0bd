"""Runs training jobs on Kubernetes, as PyTorchJobs or as TrainJobs."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

from kubernetes import client as kubernetes_client

from pipelines import pytorchjob, trainjob
from pipelines.backends import JobState
from pipelines.cluster import RETRY_FOR_S, Cluster, Object, RequestRefused, ResourceType
from pipelines.settings import JobKindName
from pipelines.training_job import (
    LABELS,
    QUEUE_LABEL,
    RUN_LABEL,
    SPEC_HASH_LABEL,
    Owner,
    TrainingJob,
)
from services.common.process import find_error

KUEUE_VERSIONS = ("v1beta2", "v1beta1")
"""Versions of Kueue's API, the newest first."""
WORKFLOW = ("argoproj.io", "v1alpha1", "workflows")


class JobKind(ABC):
    """One kind of object that stands for a training job."""

    name: ClassVar[JobKindName]
    resource: ClassVar[ResourceType]
    pod_label: ClassVar[str]
    """Label of the pods with the job's name."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    @abstractmethod
    def create(self, job: TrainingJob) -> None:
        """Creates the job. Raises `RequestRefused` with status 409 if its name is taken."""

    def delete(self, name: str) -> None:
        self.cluster.delete(self.resource, name)

    def is_deleting(self, name: str) -> bool:  # noqa: ARG002
        """Whether objects of a job that no longer exists are still being deleted."""
        return False

    @abstractmethod
    def is_suspended(self, job: Object) -> bool: ...

    @abstractmethod
    def state(self, job: Object) -> JobState:
        """Returns the phase of a job that is not suspended, with the object's own reason."""

    def warning(self, name: str) -> str:
        """Returns the last warning about the job, such as an exceeded quota; else nothing."""
        return self.cluster.warning(self.name, name)


class PyTorchJobs(JobKind):
    """PyTorchJobs of the Kubeflow training operator 1.9."""

    name = "PyTorchJob"
    resource = (pytorchjob.GROUP, pytorchjob.VERSION, pytorchjob.PLURAL)
    pod_label = "training.kubeflow.org/job-name"

    def create(self, job: TrainingJob) -> None:
        training = self.cluster.training
        model = training.api_client.deserialize(
            SimpleNamespace(data=json.dumps(pytorchjob.build_pytorchjob(job))),
            "KubeflowOrgV1PyTorchJob",
        )
        self.cluster.call("create", job.name, lambda: training.create_job(model))

    def is_suspended(self, job: Object) -> bool:
        return bool((job["spec"].get("runPolicy") or {}).get("suspend"))

    def state(self, job: Object) -> JobState:
        conditions = _true_conditions(job)
        types = {condition["type"] for condition in conditions}
        last = conditions[-1] if conditions else {"type": "Created"}
        reason = _reason(last)
        if "Failed" in types:
            return JobState("failed", reason)
        if "Succeeded" in types:
            return JobState("succeeded")
        if last["type"] == "Running":
            return JobState("running")
        if last["type"] == "Restarting":
            return JobState("restarting", reason)
        return JobState("waiting", reason)


class TrainJobs(JobKind):
    """TrainJobs of Kubeflow Trainer 2, each with a TrainingRuntime of its own."""

    name = "TrainJob"
    resource = (trainjob.GROUP, trainjob.VERSION, trainjob.PLURAL)
    pod_label = "jobset.sigs.k8s.io/jobset-name"
    _runtime = (trainjob.GROUP, trainjob.VERSION, trainjob.RUNTIMES)

    def create(self, job: TrainingJob) -> None:
        # The API refuses a TrainJob without its runtime. One of this name may be left of a step
        # that was killed here.
        self.cluster.put(self._runtime, trainjob.build_runtime(job))
        created = self.cluster.create(self.resource, trainjob.build_trainjob(job))
        owner = Owner(job.name, created["metadata"]["uid"], trainjob.API_VERSION, self.name)
        self.cluster.put(self._runtime, trainjob.build_runtime(job, owner))

    def delete(self, name: str) -> None:
        """Deletes the job, and Kubernetes its runtime and its pods afterwards.

        The API refuses every change of a TrainJob whose runtime does not exist. Kubernetes deletes
        objects in the foreground by such changes, and the runtime at the same time.
        """
        if self.cluster.get(self.resource, name) is None:
            self.cluster.delete(self._runtime, name)
        else:
            self.cluster.delete(self.resource, name, "Background")

    def is_deleting(self, name: str) -> bool:
        """Whether a runtime, to which a new job could refer, or a pod of a deleted job exists."""
        runtime = self.cluster.get(self._runtime, name)
        metadata = {} if runtime is None else runtime["metadata"]
        return (
            "deletionTimestamp" in metadata
            or bool(metadata.get("ownerReferences"))
            or bool(self.cluster.pods(self.pod_label, name))
        )

    def is_suspended(self, job: Object) -> bool:
        return bool(job["spec"].get("suspend"))

    def state(self, job: Object) -> JobState:
        conditions = {condition["type"]: condition for condition in _true_conditions(job)}
        if "Failed" in conditions:
            return JobState("failed", _reason(conditions["Failed"]))
        if "Complete" in conditions:
            return JobState("succeeded")
        jobs = (job.get("status") or {}).get("jobsStatus") or []
        if jobs and all(status["ready"] for status in jobs):
            return JobState("running")
        name = job["metadata"]["name"]
        attempts = [
            int(pod.metadata.labels.get("jobset.sigs.k8s.io/restart-attempt", 0))
            for pod in self.cluster.pods(self.pod_label, name)
        ]
        if max(attempts, default=0) > 0:
            return JobState("restarting", f"restart {max(attempts)}")
        return JobState("waiting")

    def warning(self, name: str) -> str:
        """Also finds the warnings of the Job that creates the pods."""
        workers = f"{name}-{trainjob.NODE}-0"
        return self.cluster.warning("Job", workers) or super().warning(name)


class KubeflowBackend:
    """Creates, reads and deletes the training jobs of a namespace.

    Raises `ApiUnavailable` and `RequestRefused` as `Cluster` does.
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
        self._cluster = Cluster(namespace, configuration, retry_for_s=retry_for_s)
        self._release = release
        self._kinds: list[JobKind] = [PyTorchJobs(self._cluster), TrainJobs(self._cluster)]

    def create(self, job: TrainingJob) -> bool:
        # After an upgrade of the release to the other kind, a job may still be of the old one.
        if self._find(job.name) is not None:
            return False
        kind = next(kind for kind in self._kinds if kind.name == job.deployment.job_kind)
        try:
            kind.create(job)
        except RequestRefused as error:
            if error.status == 409:
                return False
            raise
        return True

    def state(self, name: str) -> JobState | None:
        found = self._find(name)
        if found is None:
            if any(kind.is_deleting(name) for kind in self._kinds):
                return JobState("terminating", "its pods or its runtime still exist")
            return None
        kind, job = found
        labels = job["metadata"].get("labels", {})
        return replace(self._state(kind, job), spec_hash=labels.get(SPEC_HASH_LABEL, ""))

    def _find(self, name: str) -> tuple[JobKind, Object] | None:
        for kind in self._kinds:
            job = self._cluster.get(kind.resource, name)
            if job is not None:
                return kind, job
        return None

    def _state(self, kind: JobKind, job: Object) -> JobState:
        name = job["metadata"]["name"]
        if job["metadata"].get("deletionTimestamp"):
            command = f"kubectl describe {kind.name.lower()} {name}"
            return JobState("terminating", f"`{command}` shows what holds it")
        state = kind.state(job)
        queue = job["metadata"].get("labels", {}).get(QUEUE_LABEL)
        if state.phase == "failed":
            return replace(state, reason=self._failure(kind, name, state.reason))
        if state.phase != "waiting":
            return state
        if queue and kind.is_suspended(job):
            return replace(state, reason=self._place_in_queue(name, queue))
        return replace(state, reason=self._obstacle(kind, name) or state.reason)

    def delete(self, name: str) -> None:
        for kind in self._kinds:
            kind.delete(name)

    def jobs(self) -> dict[str, str]:
        labels = LABELS | {"app.kubernetes.io/instance": self._release}
        jobs = [
            job["metadata"]
            for kind in self._kinds
            for job in self._cluster.select(kind.resource, labels) or []
        ]
        return {job["name"]: job["labels"][RUN_LABEL] for job in jobs if RUN_LABEL in job["labels"]}

    def is_queued(self, name: str) -> bool:
        return self._workload(name) is not None

    def _workload(self, name: str) -> Object | None:
        """Returns the Workload by which Kueue manages a job, or None if it does not."""
        kinds = {kind.name for kind in self._kinds}
        for version in KUEUE_VERSIONS:
            workloads = self._cluster.select(("kueue.x-k8s.io", version, "workloads"), {})
            if workloads is None:
                continue  # Kueue of another version, or none
            for workload in workloads:
                owners = workload["metadata"].get("ownerReferences") or []
                if any(owner["kind"] in kinds and owner["name"] == name for owner in owners):
                    return workload
            return None
        return None

    def abandoned(self, name: str) -> bool:
        found = self._find(name)
        owners = found[1]["metadata"].get("ownerReferences") or [] if found is not None else []
        return any(self.has_ended(f"{self._cluster.namespace}/{owner['name']}") for owner in owners)

    def has_ended(self, workflow: str) -> bool:
        namespace, _, name = workflow.partition("/")
        if namespace != self._cluster.namespace:
            return False
        found = self._cluster.get(WORKFLOW, name)
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

    def _workflow(self, name: str) -> Object | None:
        """Returns the workflow, or None if it was deleted or without the right to read it."""
        try:
            return self._cluster.get(WORKFLOW, name)
        except RequestRefused as error:
            if error.status != 403:
                raise
            return None

    # -- the reason of a job's state

    def _place_in_queue(self, name: str, queue: str) -> str:
        """Returns what Kueue says of a job that it has suspended."""
        workload = self._workload(name) or {}
        for condition in (workload.get("status") or {}).get("conditions") or []:
            if condition["type"] == "QuotaReserved" and condition["status"] != "True":
                return f"Kueue has not admitted it from the queue {queue}: {condition['message']}"
            if condition["type"] == "Admitted" and condition["status"] == "True":
                return (
                    f"Kueue has admitted it from the queue {queue}, but has not started it; if "
                    "this lasts, Kueue's log has the reason (it may support other versions of the "
                    "job's operator)"
                )
        return f"Kueue has not admitted it from the queue {queue}"

    def _obstacle(self, kind: JobKind, name: str) -> str:
        """Returns what the pods wait for, in the words of the scheduler or the kubelet."""
        for pod in self._cluster.pods(kind.pod_label, name):
            for condition in pod.status.conditions or []:
                if condition.type == "PodScheduled" and condition.status == "False":
                    return f"{pod.metadata.name} has no node: {condition.message}"
            for container in pod.status.container_statuses or []:
                waiting = container.state.waiting
                if waiting is not None and waiting.reason != "ContainerCreating":
                    return f"{pod.metadata.name}: {waiting.reason}: {waiting.message or ''}"
        return kind.warning(name)

    def _failure(self, kind: JobKind, name: str, reason: str) -> str:
        """Returns how a container ended and the last error of its log, or else the job's `reason`
        when its pods were deleted."""
        for pod in self._cluster.pods(kind.pod_label, name):
            for container in pod.status.container_statuses or []:
                ended = container.state.terminated
                if ended is not None and ended.exit_code:
                    error = find_error(self._cluster.log(pod.metadata.name))
                    code = f"{ended.exit_code} ({ended.reason})"
                    return f"{pod.metadata.name} exited with {code}" + (error and f": {error}")
            if pod.status.phase == "Failed":
                return f"{pod.metadata.name}: {pod.status.reason}: {pod.status.message}"
        return f"{reason}; its pods were deleted"


def _true_conditions(job: Object) -> list[dict[str, Any]]:
    """Returns the conditions that hold, in the order in which the operator wrote them."""
    conditions = (job.get("status") or {}).get("conditions") or []
    return [condition for condition in conditions if condition["status"] == "True"]


def _reason(condition: dict[str, Any]) -> str:
    return f"{condition.get('reason', '')}: {condition.get('message', '')}".strip(": ")


def _has_finished(workflow: Object) -> bool:
    return (workflow.get("status") or {}).get("phase") in ("Succeeded", "Failed", "Error")


def _is_terminated(workflow: Object) -> bool:
    spec = workflow.get("spec") or {}
    return bool(
        spec.get("activeDeadlineSeconds") == 0
        or spec.get("shutdown")
        or workflow["metadata"].get("deletionTimestamp")
    )
