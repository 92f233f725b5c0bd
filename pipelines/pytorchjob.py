"""Builds the PyTorchJob of a training job (Kubeflow training operator 1.9).

All of its workers are of the type Worker: torchrun's elastic rendezvous needs no Master, whose init
container the restricted pod security standard would refuse.
"""

from __future__ import annotations

from typing import Any

from pipelines.training_job import MAX_RESTARTS, RENDEZVOUS_CONF, TrainingJob

GROUP, VERSION, PLURAL = "kubeflow.org", "v1", "pytorchjobs"


def build_pytorchjob(job: TrainingJob) -> dict[str, Any]:
    """Builds the manifest."""
    workers = job.resources.workers
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "PyTorchJob",
        "metadata": job.metadata(),
        "spec": {
            "elasticPolicy": {
                "rdzvBackend": "c10d",
                "rdzvId": job.name,
                # The sharded state needs every worker, so the number of workers never changes.
                "minReplicas": workers,
                "maxReplicas": workers,
                # torchrun must not restart a worker itself: the pod ends with its exit code.
                "maxRestarts": 0,
                "rdzvConf": [
                    {"key": key, "value": str(value)} for key, value in RENDEZVOUS_CONF.items()
                ],
            },
            "runPolicy": {
                "backoffLimit": MAX_RESTARTS,
                "cleanPodPolicy": "Running",
                # Kueue's webhook suspends a job with a queue itself. One that is created suspended
                # would wait for ever where Kueue does not manage PyTorchJobs.
                "suspend": False,
                "ttlSecondsAfterFinished": 24 * 3600,
            },
            "pytorchReplicaSpecs": {
                "Worker": {
                    "replicas": workers,
                    # Exit codes 1 to 127 fail the job, 128 to 255 restart the pod.
                    "restartPolicy": "ExitCode",
                    "template": job.pod_template("pytorch", {}),
                }
            },
        },
    }
