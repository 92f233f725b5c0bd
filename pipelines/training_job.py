"""Describes the job that trains a run, whichever kind of Kubernetes object stands for it.

One job trains the whole run. When a worker exits with 128 to 255, the whole job restarts and
continues from the last checkpoint; 1 to 127 fail it (services/common/process.py). `pytorchjob` and
`trainjob` build the manifests, whose pods are the same.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field
from typing import Any

from bapo_core.errors import BapoError
from pipelines.settings import DeploymentSettings, JobKindName, TrainerPod

RENDEZVOUS_PORT = 23456
RENDEZVOUS_PORT_NAME = "pytorchjob-port"
"""Name by which the training operator finds the port."""
RENDEZVOUS_CONF = {"join_timeout": 3600, "read_timeout": 600}
"""Settings of torchrun's rendezvous, in seconds: a worker waits for its peers as long as these wait
for their nodes."""
MAX_NAME_LENGTH = 46
"""A pod's name has at most 63 characters, of which a TrainJob adds up to 17 to the job's name."""
MAX_RESTARTS = 20
"""Restarts after which a job fails."""
RUN_LABEL = "bapo/run"
"""Label with the run that a job trains."""
SPEC_HASH_LABEL = "bapo/made-from"
"""Label with a digest of what the pipeline asked for."""
WORKFLOW_ANNOTATION = "bapo/workflow"
"""Annotation with the workflow that a job belongs to, as `namespace/name`: no other pipeline may
delete it."""
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
LABELS = {"app.kubernetes.io/name": "bapo", "app.kubernetes.io/component": "trainer"}
"""Labels of every training job and its pods; network policies select by them."""
CA_DIRECTORY = "/etc/bapo/ca"
"""Where the certificates of `DeploymentSettings.ca_bundle` are mounted, as in the chart's pods."""

_MEMORY = re.compile(r"[0-9]+(\.[0-9]+)?[KMGT]i?")


@dataclass(frozen=True, slots=True)
class Resources:
    """Compute resources of a training job.

    Raises `BapoError` for values that Kubernetes would refuse.
    """

    workers: int = 1
    """Number of pods."""
    gpus: int = 1
    """GPUs of each pod, with one process for each. At 0, a pod runs `trainer.processes` of the
    run's configuration on CPUs."""
    cpu: str = "4"
    """Cores that each pod requests, as Kubernetes writes them: `4` or `500m`."""
    memory: str = "32Gi"
    """Memory request and limit of each pod."""

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
    """Names and scheduling settings that a training job takes from the chart's release."""

    namespace: str
    release: str
    connection: str
    """Name of the ConfigMap with the services' addresses."""
    token_secret: str
    s3_secret: str
    image: str
    service_account: str
    trainer_token_key: str = "BAPO_TRAINER_TOKEN"
    """Key of `token_secret` that has the trainer's token."""
    pull_policy: str = "IfNotPresent"
    pull_secrets: tuple[str, ...] = ()
    queue: str = ""
    """Kueue's local queue; none if empty."""
    ca_bundle: str = ""
    """ConfigMap with certificates of authorities; none if empty."""
    job_kind: JobKindName = "PyTorchJob"
    """Kind of the object that stands for a training job."""
    pod: TrainerPod = field(default_factory=TrainerPod)

    @classmethod
    def from_settings(cls, settings: DeploymentSettings, namespace: str) -> Deployment:
        return cls(
            namespace=namespace,
            release=settings.release,
            connection=settings.connection,
            token_secret=settings.token_secret,
            trainer_token_key=settings.trainer_token_key,
            s3_secret=settings.s3_secret,
            image=settings.trainer_image,
            service_account=settings.trainer_service_account,
            pull_policy=settings.trainer_pull_policy,
            pull_secrets=settings.trainer_pull_secrets,
            queue=settings.trainer_queue,
            ca_bundle=settings.ca_bundle,
            job_kind=settings.trainer_job_kind,
            pod=settings.trainer_pod,
        )


@dataclass(frozen=True, slots=True)
class Owner:
    """The object, usually an Argo workflow, that Kubernetes deletes another one together with."""

    name: str
    uid: str
    api_version: str = "argoproj.io/v1alpha1"
    kind: str = "Workflow"

    def reference(self) -> dict[str, Any]:
        return {
            "apiVersion": self.api_version,
            "kind": self.kind,
            "name": self.name,
            "uid": self.uid,
        }


def job_name(release: str, run: str) -> str:
    """Returns the name of the run's only job; it depends on nothing but its arguments."""
    name = f"{release}-{run}"
    if not name[0].isalpha():
        name = f"bapo-{name}"
    if len(name) <= MAX_NAME_LENGTH and not name.endswith("-"):
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{name[: MAX_NAME_LENGTH - 9].rstrip('-')}-{digest}"


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """The job of a run, as the pipeline asks for it."""

    run: str
    deployment: Deployment
    resources: Resources
    processes: int = 1
    """Processes of each worker when it has no GPUs; otherwise there is one for each GPU."""
    owner: Owner | None = None
    """Workflow that the job is deleted with."""
    workflow: str | None = None
    """The same workflow as `namespace/name`, also where the pipeline may not read workflows; None
    outside a cluster."""

    @property
    def name(self) -> str:
        return job_name(self.deployment.release, self.run)

    @property
    def spec_hash(self) -> str:
        """A digest of what the pipeline asked for, and not of what the release adds.

        An upgrade of the release during a run would otherwise replace a healthy job at the next
        segment.
        """
        owners = None if self.owner is None else [self.owner.reference()]
        made_from = [asdict(self.resources), self.processes, owners, self.workflow]
        content = json.dumps(made_from, sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    @property
    def labels(self) -> dict[str, str]:
        """Labels of the job and of its pods."""
        return {
            **LABELS,
            "app.kubernetes.io/part-of": "bapo",
            "app.kubernetes.io/instance": self.deployment.release,
            RUN_LABEL: self.run,
        }

    def metadata(self) -> dict[str, Any]:
        """Returns the job's metadata; Kueue reads the queue from its labels."""
        queue = {QUEUE_LABEL: self.deployment.queue} if self.deployment.queue else {}
        metadata: dict[str, Any] = {
            "name": self.name,
            "namespace": self.deployment.namespace,
            "labels": {**self.labels, **queue, SPEC_HASH_LABEL: self.spec_hash},
            **self.annotations(),
        }
        if self.owner is not None:
            metadata["ownerReferences"] = [self.owner.reference()]
        return metadata

    def annotations(self) -> dict[str, Any]:
        """Returns the annotations of the job's objects as a part of their metadata."""
        return {"annotations": {WORKFLOW_ANNOTATION: self.workflow}} if self.workflow else {}

    def pod_template(self, container: str, variables: dict[str, str]) -> dict[str, Any]:
        """Returns the template of a worker's pod.

        container: name of the container, by which the operator finds it. variables: environment
        variables of this kind of job.
        """
        pod = self.deployment.pod
        return {
            "metadata": {
                # A sidecar would run on after the training, so that the job would never finish.
                "labels": {"sidecar.istio.io/inject": "false"} | pod.pod_labels | self.labels,
                "annotations": pod.pod_annotations,
            },
            "spec": _pod(self, {"name": container} | _container(self, variables)),
        }


def _pod(job: TrainingJob, container: dict[str, Any]) -> dict[str, Any]:
    deployment = job.deployment
    settings = deployment.pod
    pod: dict[str, Any] = {
        "serviceAccountName": deployment.service_account,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        # An upload that takes longer is lost; the run then continues from an earlier checkpoint.
        "terminationGracePeriodSeconds": 60,
        "securityContext": settings.pod_security_context,
        "containers": [container],
        "volumes": [
            # The initial model, and checkpoints in transfer.
            {"name": "scratch", "emptyDir": {"sizeLimit": settings.scratch_size}},
            {"name": "tmp", "emptyDir": {"sizeLimit": settings.tmp_size}},
            # NCCL exchanges tensors between the GPUs of a pod here. It counts as the pod's memory.
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": settings.shm_size}},
            *settings.extra_volumes,
        ],
    }
    if deployment.ca_bundle:
        pod["volumes"].append({"name": "ca", "configMap": {"name": deployment.ca_bundle}})
    if job.resources.workers > 1:
        # Two workers on one node gain nothing, and would both be lost with it.
        pod["topologySpreadConstraints"] = [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": job.labels},
            }
        ]
    optional = {
        "imagePullSecrets": [{"name": secret} for secret in deployment.pull_secrets],
        "priorityClassName": settings.priority_class_name,
        "nodeSelector": settings.node_selector,
        "tolerations": list(settings.tolerations),
        "affinity": settings.affinity,
        "runtimeClassName": settings.runtime_class_name,
        "schedulerName": settings.scheduler_name,
    }
    return pod | {key: value for key, value in optional.items() if value}


def _container(job: TrainingJob, variables: dict[str, str]) -> dict[str, Any]:
    deployment, resources, settings = job.deployment, job.resources, job.deployment.pod
    processes = resources.gpus or job.processes
    devices = dict(settings.extra_resources)
    if resources.gpus:
        devices[settings.gpu_resource] = str(resources.gpus)
    limits = {"memory": resources.memory, **devices}
    if settings.cpu_limit:
        limits["cpu"] = resources.cpu
    mounts = [
        {"name": "scratch", "mountPath": "/scratch"},
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "shm", "mountPath": "/dev/shm"},
        *settings.extra_volume_mounts,
    ]
    if deployment.ca_bundle:
        mounts.append({"name": "ca", "mountPath": CA_DIRECTORY, "readOnly": True})
    return {
        "image": deployment.image,
        "imagePullPolicy": deployment.pull_policy,
        # The operators' variables for the number of processes differ; torchrun's option does not.
        "command": ["python", "-m", "services.trainer.launch"],
        "args": ["--nproc-per-node", str(processes)],
        "ports": [{"name": RENDEZVOUS_PORT_NAME, "containerPort": RENDEZVOUS_PORT}],
        "envFrom": [
            {"configMapRef": {"name": deployment.connection}},
            *({"secretRef": {"name": name}} for name in [deployment.s3_secret] if name),
        ],
        "env": [
            # Only this one of the release's tokens: the others permit more, or something else.
            {
                "name": "BAPO_TOKEN",
                "valueFrom": {
                    "secretKeyRef": {
                        "name": deployment.token_secret,
                        "key": deployment.trainer_token_key,
                    }
                },
            },
            *({"name": name, "value": value} for name, value in variables.items()),
            {"name": "BAPO_RUN", "value": job.run},
            {"name": "BAPO_SCRATCH", "value": "/scratch"},
            {"name": "HOME", "value": "/tmp"},
            {"name": "OMP_NUM_THREADS", "value": _threads(resources.cpu, processes)},
            *settings.extra_env,
        ],
        "resources": {
            "requests": {"cpu": resources.cpu, "memory": resources.memory, **devices},
            "limits": limits,
        },
        "securityContext": settings.security_context,
        "volumeMounts": mounts,
    }


def _threads(cpu: str, processes: int) -> str:
    """Returns OMP_NUM_THREADS: the pod's cores, shared by its processes.

    Without it, torch starts a thread for every core of the node. Raises `BapoError` when `cpu` is
    not a number of cores.
    """
    try:
        cores = float(cpu[:-1]) / 1000 if cpu.endswith("m") else float(cpu)
    except ValueError as error:
        raise BapoError(f"cpu {cpu!r} is no amount of cores; give 4 or 500m") from error
    return str(max(1, int(cores) // processes))
