"""The PyTorchJob that trains a run (training-operator 1.9), built here and nowhere else.

One job trains the whole run. Its workers are equal: torchrun's elastic rendezvous needs no master,
whose init container restricted pod security would refuse. A failure is one of the whole job, which
continues from the last checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bapo_core.errors import BapoError

GROUP, VERSION, PLURAL = "kubeflow.org", "v1", "pytorchjobs"
RENDEZVOUS_PORT = 23456
LONGEST_NAME = 50
"""Pods and services are named after the job and the worker, within 63 letters."""
RUN_LABEL, MADE_FROM_LABEL = "bapo/run", "bapo/made-from"
"""Which run a job trains; a digest of all that it was made from."""
LABELS = {"app.kubernetes.io/name": "bapo", "app.kubernetes.io/component": "trainer"}
"""Of every job of ours and its pods; network policies select by them."""
USER = 10001
"""Of our images."""


_MEMORY = re.compile(r"[0-9]+(\.[0-9]+)?[KMGT]i?")


@dataclass(frozen=True, slots=True)
class Resources:
    """What the training takes."""

    workers: int = 1
    """Pods."""
    gpus: int = 1
    """Of each; one process a GPU. With none, `trainer.processes` of the run's configuration."""
    gpu_resource: str = "nvidia.com/gpu"
    cpu: str = "4"
    memory: str = "32Gi"
    scratch: str = "100Gi"
    """Disk for the initial model and checkpoints on their way."""

    def __post_init__(self) -> None:
        if self.workers < 1 or self.gpus < 0:
            raise BapoError(
                f"{self.workers} workers of {self.gpus} GPUs each cannot train; give at least one "
                "worker, and 0 GPUs for a run on CPUs"
            )
        _threads(self.cpu, 1)
        if not _MEMORY.fullmatch(self.memory):
            raise BapoError(f"memory {self.memory!r} is no amount of memory; give 32Gi or 500Mi")


@dataclass(frozen=True, slots=True)
class Deployment:
    """What the release of the chart says of itself, in its connection ConfigMap."""

    namespace: str
    release: str
    connection: str
    """The ConfigMap with the services' addresses."""
    token_secret: str
    s3_secret: str
    image: str
    service_account: str
    pull_policy: str = "IfNotPresent"
    pull_secrets: tuple[str, ...] = ()
    queue: str = ""
    """Kueue's local queue; none if empty."""
    priority_class: str = ""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Mapping[str, Any], ...] = ()

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], namespace: str) -> Deployment:
        """Raises `BapoError` naming what the ConfigMap lacks."""

        def of(name: str) -> str:
            value = environment.get(name, "")
            if not value:
                raise BapoError(
                    f"{name} is not set: the step did not get the connection ConfigMap of the "
                    "release (`<release>-connection`); see docs/deploy.md"
                )
            return value

        def parsed(name: str, otherwise: str) -> Any:
            try:
                return json.loads(environment.get(name) or otherwise)
            except ValueError as error:
                raise BapoError(f"{name} in the connection ConfigMap is not JSON") from error

        secrets = environment.get("BAPO_TRAINER_PULL_SECRETS", "")
        return cls(
            namespace=namespace,
            release=of("BAPO_RELEASE"),
            connection=of("BAPO_CONNECTION"),
            token_secret=of("BAPO_TOKEN_SECRET"),
            s3_secret=of("BAPO_S3_SECRET"),
            image=of("BAPO_TRAINER_IMAGE"),
            service_account=of("BAPO_TRAINER_SERVICE_ACCOUNT"),
            pull_policy=environment.get("BAPO_TRAINER_PULL_POLICY") or "IfNotPresent",
            pull_secrets=tuple(filter(None, secrets.split(","))),
            queue=environment.get("BAPO_TRAINER_QUEUE", ""),
            priority_class=environment.get("BAPO_TRAINER_PRIORITY_CLASS", ""),
            node_selector=parsed("BAPO_TRAINER_NODE_SELECTOR", "{}"),
            tolerations=tuple(parsed("BAPO_TRAINER_TOLERATIONS", "[]")),
        )


@dataclass(frozen=True, slots=True)
class Owner:
    """The workflow that a job belongs to: Kubernetes removes the job with it."""

    name: str
    uid: str

    def reference(self) -> dict[str, Any]:
        return {
            "apiVersion": "argoproj.io/v1alpha1",
            "kind": "Workflow",
            "name": self.name,
            "uid": self.uid,
        }


def job_name(release: str, run: str) -> str:
    """Of the run's one job; whoever asks twice asks for the same."""
    name = f"{release}-{run}"
    if not name[0].isalpha():
        name = f"bapo-{name}"
    if len(name) <= LONGEST_NAME and not name.endswith("-"):
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{name[: LONGEST_NAME - 9].rstrip('-')}-{digest}"


def build_job(
    run: str,
    deployment: Deployment,
    resources: Resources,
    *,
    processes: int = 1,
    owner: Owner | None = None,
) -> dict[str, Any]:
    """The manifest. `processes` per worker count only where there are no GPUs."""
    name = job_name(deployment.release, run)
    labels = {
        **LABELS,
        "app.kubernetes.io/part-of": "bapo",
        "app.kubernetes.io/instance": deployment.release,
        RUN_LABEL: run,
    }
    queue = {"kueue.x-k8s.io/queue-name": deployment.queue} if deployment.queue else {}
    metadata: dict[str, Any] = {
        "name": name,
        "namespace": deployment.namespace,
        "labels": {**labels, **queue},
    }
    if owner is not None:
        metadata["ownerReferences"] = [owner.reference()]
    worker = {
        "replicas": resources.workers,
        # 1 to 127 end the job, 128 to 255 start the pod again: the trainer's exit codes say which.
        "restartPolicy": "ExitCode",
        "template": {
            # A sidecar would outlive the training, and the job would never end.
            "metadata": {"labels": labels, "annotations": {"sidecar.istio.io/inject": "false"}},
            "spec": _pod(run, name, deployment, resources, resources.gpus or processes),
        },
    }
    job: dict[str, Any] = {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "PyTorchJob",
        "metadata": metadata,
        "spec": {
            "elasticPolicy": {
                "rdzvBackend": "c10d",
                "rdzvId": name,
                # All or nothing: sharded state needs every worker.
                "minReplicas": resources.workers,
                "maxReplicas": resources.workers,
                # A worker that fails ends the pod with the trainer's own exit code.
                "maxRestarts": 0,
                # A worker may wait long for its node, and so for its peers.
                "rdzvConf": [
                    {"key": "join_timeout", "value": "3600"},
                    {"key": "read_timeout", "value": "600"},
                ],
            },
            "runPolicy": {
                "backoffLimit": 20,
                "cleanPodPolicy": "Running",
                "suspend": bool(deployment.queue),  # Kueue starts what it admits
                "ttlSecondsAfterFinished": 24 * 3600,
            },
            "pytorchReplicaSpecs": {"Worker": worker},
        },
    }
    content = json.dumps([job["spec"], metadata.get("ownerReferences")], sort_keys=True)
    metadata["labels"][MADE_FROM_LABEL] = hashlib.sha256(content.encode()).hexdigest()[:16]
    return job


def _pod(
    run: str, name: str, deployment: Deployment, resources: Resources, processes: int
) -> dict[str, Any]:
    pod: dict[str, Any] = {
        "serviceAccountName": deployment.service_account,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        # What is under way is finished, or not: the checkpoint holds either way.
        "terminationGracePeriodSeconds": 60,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(run, deployment, resources, processes)],
        "volumes": [
            {"name": "scratch", "emptyDir": {"sizeLimit": resources.scratch}},
            {"name": "tmp", "emptyDir": {"sizeLimit": "10Gi"}},
            # Between the GPUs of a pod; counts as its memory.
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}},
        ],
    }
    if resources.workers > 1:
        # A node that is lost takes one worker; a node with two of them gains nothing.
        pod["topologySpreadConstraints"] = [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": {"training.kubeflow.org/job-name": name}},
            }
        ]
    optional = {
        "imagePullSecrets": [{"name": secret} for secret in deployment.pull_secrets],
        "priorityClassName": deployment.priority_class,
        "nodeSelector": dict(deployment.node_selector),
        "tolerations": [dict(toleration) for toleration in deployment.tolerations],
    }
    return pod | {key: value for key, value in optional.items() if value}


def _container(
    run: str, deployment: Deployment, resources: Resources, processes: int
) -> dict[str, Any]:
    gpus = {resources.gpu_resource: str(resources.gpus)} if resources.gpus else {}
    return {
        "name": "pytorch",  # the operator looks for it
        "image": deployment.image,
        "imagePullPolicy": deployment.pull_policy,
        # The operator's name for the number of processes differs between versions; torchrun's
        # option does not.
        "command": ["python", "-m", "services.trainer.launch"],
        "args": ["--nproc-per-node", str(processes)],
        "ports": [{"name": "pytorchjob-port", "containerPort": RENDEZVOUS_PORT}],
        "envFrom": [
            {"configMapRef": {"name": deployment.connection}},
            {"secretRef": {"name": deployment.token_secret}},
            {"secretRef": {"name": deployment.s3_secret}},
        ],
        "env": [
            {"name": "BAPO_RUN", "value": run},
            {"name": "BAPO_SCRATCH", "value": "/scratch"},
            {"name": "HOME", "value": "/tmp"},
            {"name": "OMP_NUM_THREADS", "value": _threads(resources.cpu, processes)},
        ],
        "resources": {
            "requests": {"cpu": resources.cpu, "memory": resources.memory, **gpus},
            "limits": {"memory": resources.memory, **gpus},
        },
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
        },
        "volumeMounts": [
            {"name": "scratch", "mountPath": "/scratch"},
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }


def _threads(cpu: str, processes: int) -> str:
    """Of each process: torch would take every core of the node for itself."""
    try:
        cores = float(cpu[:-1]) / 1000 if cpu.endswith("m") else float(cpu)
    except ValueError as error:
        raise BapoError(f"cpu {cpu!r} is no amount of cores; give 4 or 500m") from error
    return str(max(1, int(cores) // processes))
