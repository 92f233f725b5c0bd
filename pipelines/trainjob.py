"""Builds the TrainJob of a training job and the TrainingRuntime that it needs (Kubeflow Trainer 2).

A TrainJob only refers to a runtime, which has the pods and what becomes of a job whose pod fails.
So each job gets a runtime of its own and of the same name. The JobSet that Kubeflow Trainer makes
from both restarts as a whole, as torchrun's rendezvous requires.
"""

from __future__ import annotations

from typing import Any

from pipelines.training_job import (
    MAX_RESTARTS,
    RENDEZVOUS_CONF,
    RENDEZVOUS_PORT,
    Owner,
    TrainingJob,
)

GROUP, VERSION, PLURAL = "trainer.kubeflow.org", "v1alpha1", "trainjobs"
API_VERSION = f"{GROUP}/{VERSION}"
RUNTIMES = "trainingruntimes"
NODE = "node"
"""Name that Kubeflow Trainer gives the workers' Job and their container."""
FATAL_EXIT_CODES = list(range(1, 128))
"""Exit codes that fail the job; after any other one, or the loss of a node, it restarts."""


def build_trainjob(job: TrainingJob) -> dict[str, Any]:
    """Builds the TrainJob's manifest."""
    return {
        "apiVersion": API_VERSION,
        "kind": "TrainJob",
        "metadata": job.metadata(),
        "spec": {
            "runtimeRef": {"apiGroup": GROUP, "kind": "TrainingRuntime", "name": job.name},
            # Kueue's webhook suspends a job with a queue itself.
            "suspend": False,
            "trainer": {"numNodes": job.resources.workers},
        },
    }


def build_runtime(job: TrainingJob, owner: Owner | None = None) -> dict[str, Any]:
    """Builds the TrainingRuntime's manifest. owner: the TrainJob, once it exists."""
    metadata: dict[str, Any] = {
        "name": job.name,
        "namespace": job.deployment.namespace,
        "labels": {**job.labels, "trainer.kubeflow.org/framework": "torch"},
        **job.annotations(),
    }
    if owner is not None:
        metadata["ownerReferences"] = [owner.reference()]
    fatal = {"containerName": NODE, "operator": "In", "values": FATAL_EXIT_CODES}
    workers = {
        "name": NODE,
        "template": {
            "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
            "spec": {
                # The JobSet restarts all workers; a Job would restart one alone.
                "backoffLimit": 0,
                "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": fatal}]},
                "template": _pod_template(job),
            },
        },
    }
    return {
        "apiVersion": API_VERSION,
        "kind": "TrainingRuntime",
        "metadata": metadata,
        "spec": {
            "mlPolicy": {"numNodes": job.resources.workers, "torch": {}},
            "template": {
                "spec": {
                    "failurePolicy": {
                        "maxRestarts": MAX_RESTARTS,
                        "rules": [
                            {
                                "name": "fatal",
                                "action": "FailJobSet",
                                "onJobFailureReasons": ["PodFailurePolicy"],
                            }
                        ],
                    },
                    "replicatedJobs": [workers],
                }
            },
        },
    }


def _pod_template(job: TrainingJob) -> dict[str, Any]:
    # Kubeflow Trainer would let torchrun wait 15 minutes for its peers, without a rendezvous.
    variables = {
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ID": job.name,
        "PET_RDZV_ENDPOINT": f"{job.name}-{NODE}-0-0.{job.name}:{RENDEZVOUS_PORT}",
        "PET_RDZV_CONF": ",".join(f"{key}={value}" for key, value in RENDEZVOUS_CONF.items()),
        "PET_MAX_RESTARTS": "0",
    }
    template = job.pod_template(NODE, variables)
    template["spec"]["restartPolicy"] = "Never"
    return template
