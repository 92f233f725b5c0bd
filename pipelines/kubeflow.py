"""Runs training jobs on Kubernetes, as PyTorchJobs or as TrainJobs."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import replace
from datetime import datetime
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

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
    WORKFLOW_ANNOTATION,
    Owner,
    TrainingJob,
)
from services.common.process import find_error

KUEUE_VERSIONS = ("v1beta2", "v1beta1")
"""Versions of Kueue's API, the newest first."""
WORKFLOW = ("argoproj.io", "v1alpha1", "workflows")
CREATING = ("ContainerCreating", "PodInitializing")
"""Reasons of a container that waits for its turn, and not for a person."""
RESTARTING = "PyTorchJobRestarting"
"""Reason of the training operator's event for a restart, which does not say what ended."""


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

    def delete(self, name: str, workflow: str | None) -> None:
        """Deletes the job, unless it belongs to another workflow than `workflow`."""
        self._delete(self.resource, name, workflow)

    def _delete(
        self,
        resource: ResourceType,
        name: str,
        workflow: str | None,
        propagation: Literal["Foreground", "Background"] = "Foreground",
    ) -> None:
        found = self.cluster.get(resource, name)
        if found is None:
            return
        if workflow is not None and workflow_of(found) not in (None, workflow):
            return
        # With the uid, because another pipeline may replace the job after this has read it.
        self.cluster.delete(resource, name, propagation, uid=found["metadata"]["uid"])

    def is_deleting(self, name: str) -> bool:  # noqa: ARG002
        """Whether objects of a job that no longer exists are still being deleted."""
        return False

    @abstractmethod
    def is_suspended(self, job: Object) -> bool: ...

    @abstractmethod
    def state(self, job: Object) -> JobState:
        """Returns the phase of a job that is not suspended, with the object's own reason."""

    @abstractmethod
    def restarts(self, pods: list[Any]) -> int:
        """Returns how often the job has restarted, as far as its present pods show it."""

    def warning(self, name: str, since: datetime) -> str:
        """Returns the last warning about the job, such as an exceeded quota; else nothing.

        since: when the job was created.
        """
        return self.cluster.warning(self.name, name, since)


class PyTorchJobs(JobKind):
    """PyTorchJobs of the Kubeflow training operator 1.9."""

    name = "PyTorchJob"
    resource = (pytorchjob.GROUP, pytorchjob.VERSION, pytorchjob.PLURAL)
    pod_label = "training.kubeflow.org/job-name"

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self._seen: dict[str, set[str]] = {}
        """Uids of the pods that were seen, by the job's uid and the pod's name."""

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

    def restarts(self, pods: list[Any]) -> int:
        """Counts the pods of each name: the operator makes a new one for each restart.

        It has no counter of its own, and its `backoffLimit` does not count exits that
        `restartPolicy: ExitCode` restarts.
        """
        counts = [0]
        for pod in pods:
            owner = (pod.metadata.owner_references or [None])[0]
            key = f"{owner.uid if owner is not None else ''}/{pod.metadata.name}"
            uids = self._seen.setdefault(key, set())
            uids.add(pod.metadata.uid)
            counts.append(len(uids) - 1)
        return max(counts)


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

    def delete(self, name: str, workflow: str | None) -> None:
        """Deletes the job, and Kubernetes its runtime and its pods afterwards.

        The API refuses every change of a TrainJob whose runtime does not exist. Kubernetes deletes
        objects in the foreground by such changes, and the runtime at the same time.
        """
        if self.cluster.get(self.resource, name) is None:
            self._delete(self._runtime, name, workflow)
        else:
            self._delete(self.resource, name, workflow, "Background")

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
        restarts = self.restarts(self.cluster.pods(self.pod_label, name))
        if restarts > 0:
            return JobState("restarting", f"restart {restarts}")
        return JobState("waiting")

    def restarts(self, pods: list[Any]) -> int:
        label = "jobset.sigs.k8s.io/restart-attempt"
        return max((int((pod.metadata.labels or {}).get(label, 0)) for pod in pods), default=0)

    def warning(self, name: str, since: datetime) -> str:
        """Also finds the warnings of the Job that creates the pods."""
        workers = f"{name}-{trainjob.NODE}-0"
        return self.cluster.warning("Job", workers, since) or super().warning(name, since)


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
        self._ends: dict[str, str] = {}
        """How a container ended last, by the job's uid."""

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
        return replace(
            self._state(kind, job),
            spec_hash=labels.get(SPEC_HASH_LABEL, ""),
            workflow=workflow_of(job),
        )

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
        if state.phase == "succeeded":
            return state
        if queue and kind.is_suspended(job):
            return replace(state, reason=self._place_in_queue(name, queue))
        pods = self._cluster.pods(kind.pod_label, name)
        restarts = kind.restarts(pods)
        ended = self._note_end(job, pods, has_restarted=restarts > 0)
        state = replace(state, restarts=restarts, last_end=ended)
        if ended and state.phase == "restarting":
            state = replace(state, reason=ended)
        obstacle, is_blocked = _obstacle(pods)
        if obstacle:
            # A pod that cannot start waits, whatever the job's conditions say of its predecessor.
            return replace(state, phase="waiting", reason=obstacle, blocked=is_blocked)
        if state.phase != "waiting":
            return state
        return replace(state, reason=ended or kind.warning(name, _created(job)) or state.reason)

    def _note_end(self, job: Object, pods: list[Any], *, has_restarted: bool) -> str:
        """Returns how a container of the job ended last, also after its pod was deleted.

        The operator deletes a pod within a second of its end, so the warning that it leaves is
        asked for where no container was seen to end.
        """
        uid = job["metadata"]["uid"]
        for pod in pods:
            for container in pod.status.container_statuses or []:
                ended = container.state.terminated
                if ended is not None and ended.exit_code:
                    end = f"{ended.exit_code} ({ended.reason})"
                    self._ends[uid] = f"{pod.metadata.name} exited with {end}"
        conditions = {condition["type"] for condition in _true_conditions(job)}
        if uid not in self._ends and (has_restarted or "Restarting" in conditions):
            name = job["metadata"]["name"]
            return self._cluster.warning(job["kind"], name, _created(job), but=RESTARTING)
        return self._ends.get(uid, "")

    def delete(self, name: str, workflow: str | None = None) -> None:
        for kind in self._kinds:
            kind.delete(name, workflow)

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


def workflow_of(job: Object) -> str | None:
    """Returns the workflow that an object of a job belongs to, as `namespace/name`, or None.

    The owner stands for the annotation on jobs of earlier versions.
    """
    metadata = job["metadata"]
    annotated: str | None = (metadata.get("annotations") or {}).get(WORKFLOW_ANNOTATION)
    if annotated is not None:
        return annotated
    owners = metadata.get("ownerReferences") or []
    names = [owner["name"] for owner in owners if owner["kind"] == "Workflow"]
    return f"{metadata['namespace']}/{names[0]}" if names else None


def _created(job: Object) -> datetime:
    return datetime.fromisoformat(job["metadata"]["creationTimestamp"])


def _obstacle(pods: list[Any]) -> tuple[str, bool]:
    """Returns what the pods wait for, in the words of the scheduler or the kubelet, and whether it
    keeps a container from being created on a node."""
    for pod in pods:
        for condition in pod.status.conditions or []:
            if condition.type == "PodScheduled" and condition.status == "False":
                return f"{pod.metadata.name} has no node: {condition.message}", False
        for container in pod.status.container_statuses or []:
            waiting = container.state.waiting
            if waiting is not None and waiting.reason not in (None, *CREATING):
                return f"{pod.metadata.name}: {waiting.reason}: {waiting.message or ''}", True
    return "", False


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
